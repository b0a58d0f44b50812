"""Log-probabilities of given tokens, entropy and squared probabilities, computed directly from hidden states.

Legend: N response tokens, V vocabulary, D hidden size; R rows (tokens) and C columns (of the vocabulary) of one tile.

Whole logits would be the largest tensor of a training step, and PyTorch would keep them, their log-softmax and the
gradients of both. Here the logits are computed in tiles, one after the other (`logit_tiles`). The forward pass computes
each tile once. The backward pass recomputes the tile, computes the gradient of its logits, and adds the tile's
contribution to the gradients of hidden states and weight. Small logits are computed whole, with ordinary operations.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear

from rljob_trainer.engines.train.logit_tiles import LogitsGradient, Sums, Tiles, TileSettings, Totals, tile_shape

CPU_TILE_BYTES = 4 * 1024 * 1024
"""The size of a tile on CPUs: small enough to stay in the CPU's caches between operations."""
GPU_TILE_BYTES = 128 * 1024 * 1024
"""The size of a tile on GPUs: large enough that an operation takes longer than the launch of its kernel."""
WHOLE_BYTES = 32 * 1024 * 1024
"""Logits of at most this many bytes, in the dtype of the softmax, are not divided into tiles."""


class Entropy(enum.Enum):
    """Whether entropy is computed."""

    NO = enum.auto()
    VALUE = enum.auto()
    """Its value, without gradient."""
    GRADIENT = enum.auto()
    """Its value, with gradient."""


@dataclass(frozen=True)
class OutputHead:
    """How logits are computed from hidden states: with x = multiplier * (hidden @ weight.T + bias), they are x, or
    soft_cap * tanh(x / soft_cap) if there is a soft cap."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    multiplier: float = 1.0
    soft_cap: float | None = None
    is_float32: bool = False
    """True: products return logits in float32, also for 16-bit inputs."""


@dataclass(frozen=True)
class TokenDistribution:
    """Results for softmax(logits / temperature), in float32 (float64 for float64 hidden states)."""

    logprobs_N: Tensor
    """The natural logarithm of the probability of each target token."""
    entropy_N: Tensor | None
    """In nats."""
    squares_N: Tensor | None
    """The sum of the squared probabilities of the vocabulary, without gradient."""


def token_distribution(
    hidden_ND: Tensor,
    targets_N: Tensor,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    entropy: Entropy = Entropy.NO,
    with_squares: bool = False,
    tile_bytes: int | None = None,
    whole_bytes: int | None = None,
) -> TokenDistribution:
    """Log-probabilities of `targets_N` (int64, in the vocabulary), and optionally entropy and squares. Logits must be
    finite.

    Hidden states, weight and bias must have the same dtype. If they require a gradient, they get one; with N = 0 it is
    zero. The softmax is computed at least in float32. With 16-bit inputs, matrix products return logits (unless
    `head.is_float32`) and read gradients of logits in 16 bits, as in the model's own forward pass; CPUs without 16-bit
    instructions multiply in float32, and so do all CPUs for a float32 head. Sums over tiles have the dtype of the
    softmax.

    `tile_bytes` is the size of a tile in the dtype of the softmax (default: by device); up to three tensors of this
    size exist at a time. Logits of up to `whole_bytes` (default: WHOLE_BYTES) are not divided into tiles. Raises
    ValueError for arguments that do not match."""
    _check(hidden_ND, targets_N, head, temperature)
    num_vocabulary, hidden_size = head.weight_VD.shape
    softmax_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    product_dtype, logits_dtype = _dtypes(hidden_ND, head)
    # The number of elements of the largest tensor that autograd would keep for the backward pass of whole logits: the
    # logits, or the weight in another dtype.
    kept_elements = len(hidden_ND) * num_vocabulary
    if logits_dtype != hidden_ND.dtype:
        kept_elements = max(kept_elements, head.weight_VD.numel())
    if kept_elements * softmax_dtype.itemsize <= (WHOLE_BYTES if whole_bytes is None else whole_bytes):
        scaled_NV = _scaled_logits(hidden_ND, head, temperature, logits_dtype, softmax_dtype)
        return _of_whole_logits(scaled_NV, targets_N, entropy, with_squares)
    if tile_bytes is None:
        tile_bytes = CPU_TILE_BYTES if hidden_ND.device.type == "cpu" else GPU_TILE_BYTES
    rows, columns = tile_shape(len(hidden_ND), num_vocabulary, hidden_size, tile_bytes // softmax_dtype.itemsize)
    settings = TileSettings(
        multiplier=head.multiplier,
        soft_cap=head.soft_cap,
        temperature=temperature,
        with_entropy=entropy is not Entropy.NO,
        with_squares=with_squares,
        tile_tokens=rows,
        tile_columns=columns,
        softmax_dtype=softmax_dtype,
        product_dtype=product_dtype,
        logits_dtype=logits_dtype,
    )
    logprobs_N, entropy_N, squares_N = _ByTiles.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head.weight_VD, head.bias_V, targets_N, settings, entropy is Entropy.GRADIENT
    )
    return TokenDistribution(logprobs_N, entropy_N, squares_N)


def _scaled_logits(
    hidden_ND: Tensor, head: OutputHead, temperature: float, product_dtype: torch.dtype, softmax_dtype: torch.dtype
) -> Tensor:
    bias_V = None if head.bias_V is None else head.bias_V.to(product_dtype)
    logits_NV = linear(hidden_ND.to(product_dtype), head.weight_VD.to(product_dtype), bias_V).to(softmax_dtype)
    if head.multiplier != 1:
        logits_NV = logits_NV * head.multiplier
    if head.soft_cap is not None:
        logits_NV = head.soft_cap * torch.tanh(logits_NV / head.soft_cap)
    return logits_NV if temperature == 1 else logits_NV / temperature


def _of_whole_logits(scaled_NV: Tensor, targets_N: Tensor, entropy: Entropy, with_squares: bool) -> TokenDistribution:
    all_NV = torch.log_softmax(scaled_NV, dim=-1)
    # A sum over the single column instead of a view: an in-place operation on a view that a module returns would drop
    # the hook with which FSDP2 detects the beginning of the backward pass.
    logprobs_N = all_NV.gather(1, targets_N[:, None]).sum(dim=1)
    entropy_N = squares_N = None
    if entropy is not Entropy.NO:
        entropy_of_NV = all_NV if entropy is Entropy.GRADIENT else all_NV.detach()
        entropy_N = -(entropy_of_NV.exp() * entropy_of_NV).sum(dim=-1)
    if with_squares:
        squares_N = (2 * all_NV.detach()).exp().sum(dim=-1)
    return TokenDistribution(logprobs_N, entropy_N, squares_N)


def _dtypes(hidden_ND: Tensor, head: OutputHead) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of matrix products, and the dtype in which they return logits."""
    product_dtype = _product_dtype(hidden_ND)
    if not head.is_float32:
        return product_dtype, product_dtype
    wide_dtype = torch.promote_types(product_dtype, torch.float32)
    # CPUs have no product of 16-bit matrices with a float32 result.
    return (wide_dtype if hidden_ND.device.type == "cpu" else product_dtype), wide_dtype


def _product_dtype(hidden_ND: Tensor) -> torch.dtype:
    """The dtype of matrix products. A CPU without 16-bit instructions is three times as fast in float32."""
    dtype = hidden_ND.dtype
    if dtype.itemsize > 2 or hidden_ND.device.type != "cpu":
        return dtype
    # Instruction sets of x86 and ARM with 16-bit matrix products.
    names = ("amx_bf16", "avx512_bf16", "bf16") if dtype == torch.bfloat16 else ("amx_fp16", "avx512_fp16")
    capabilities = torch.cpu.get_capabilities()
    return dtype if any(capabilities.get(name) for name in names) else torch.float32


def _check(hidden_ND: Tensor, targets_N: Tensor, head: OutputHead, temperature: float) -> None:
    if hidden_ND.ndim != 2 or head.weight_VD.ndim != 2 or hidden_ND.shape[1] != head.weight_VD.shape[1]:
        shapes = tuple(hidden_ND.shape), tuple(head.weight_VD.shape)
        raise ValueError(
            f"token_distribution: shapes of hidden states and weight do not match {shapes}; pass [N, D] and [V, D]"
        )
    if targets_N.shape != hidden_ND.shape[:1] or targets_N.dtype != torch.int64:
        raise ValueError(
            f"token_distribution: targets must be one int64 per hidden state (seen: {tuple(targets_N.shape)} of"
            f" {targets_N.dtype}); pass int64 of shape ({len(hidden_ND)},)"
        )
    dtypes = {each.dtype for each in (hidden_ND, head.weight_VD, head.bias_V) if each is not None}
    if len(dtypes) > 1:
        seen = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"token_distribution: hidden states, weight and bias differ in dtype ({seen}); use one dtype")
    if temperature <= 0:
        raise ValueError(f"token_distribution: temperature is not positive ({temperature}); pass one above 0")


class _Context(FunctionCtx):
    """What `forward` stores for `backward`, declared for the type checker."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]
    settings: TileSettings


class _ByTiles(torch.autograd.Function):
    """`token_distribution` for logits that are divided into tiles."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: TileSettings,
        has_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        sums = Sums(targets_N, settings)
        tiles = Tiles(hidden_ND, weight_VD, bias_V, settings)
        for columns in tiles.columns():
            weight_CD = tiles.weight(columns)
            for rows in tiles.rows():
                sums.add(rows, columns, tiles.scaled(rows, columns, weight_CD), tiles)
        logprobs_N, entropy_N, squares_N = sums.results()
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        saved = hidden_ND, weight_VD, bias_V, targets_N, sums.largest_N, sums.sum_N, entropy_N
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # the stubs do not know that None can be saved
        without_gradient = (None if has_entropy_gradient else entropy_N, squares_N)
        ctx.mark_non_differentiable(*(each for each in without_gradient if each is not None))
        return logprobs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, gradient_N: Tensor | None, entropy_gradient_N: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, weight_VD, bias_V, targets_N, largest_N, sum_N, entropy_N = ctx.saved_tensors
        assert hidden_ND is not None
        assert weight_VD is not None
        assert targets_N is not None
        assert largest_N is not None
        assert sum_N is not None
        settings = ctx.settings
        tiles = Tiles(hidden_ND, weight_VD, bias_V, settings)
        gradients = gradient_N, entropy_gradient_N
        of_logits = LogitsGradient(targets_N, largest_N, sum_N, entropy_N, gradients, settings)
        totals = Totals(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad, settings)
        for columns in tiles.columns():
            weight_CD = tiles.weight(columns)
            for rows in tiles.rows():
                gradient_RC = of_logits.of_tile(rows, columns, tiles.scaled(rows, columns, weight_CD), tiles)
                totals.add(rows, columns, gradient_RC, tiles.hidden_ND[rows], weight_CD)
            totals.finish(columns)
        return *totals.in_dtypes_of_inputs(), None, None, None
