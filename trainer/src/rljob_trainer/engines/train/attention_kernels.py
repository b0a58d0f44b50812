"""Causal attention within the rows of a flat batch: no token sees another row.

Legend: M tokens of all rows, B rows, T tokens of the longest row, H query heads, K key and value heads (H is a multiple
of K), D head size, E head size of the values (almost always D).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache, cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from rljob_trainer.engines.train.sequence_parallel import SequenceRanks

MAX_WASTED_PRODUCTS = 250_000
"""Rows are padded if padding adds at most this many products per row on average. For a row of n tokens, padding adds
(T^2 - n^2) * H * D products. This many products take as long as one more kernel call, forward and backward (measured
in float32 on one core with H x D of 4 x 64, 14 x 64 and 4 x 16, and 8 to 64 rows of 4 to 200 tokens)."""
MAX_WIDENED_TOKENS = 128
"""On CPUs, attention of bfloat16 rows with at most this many tokens is computed in float32. For these rows bfloat16
takes 2.7 (24 tokens) to 1.0 times as long as float32, forward and backward; from 512 tokens on, 0.7 to 0.9 times as
long (avx512_bf16; H x D of 8 x 32, 9 x 64 and 16 x 128). A pass without gradient would be faster in bfloat16, but it
must compute the same probabilities as an update."""
MAX_VARIABLE_LENGTH_HEAD_SIZE = 256
MIN_VARIABLE_LENGTH_CAPABILITY = (8, 0)
"""What FlashAttention supports: head sizes up to this one, on GPUs from this compute capability on."""


class Kernel(StrEnum):
    """How a layer's attention is computed. All kernels give the same results up to rounding."""

    ONE_VIEW = "one view"
    """For rows of equal length: one call on the flat tensors viewed as [B, heads, T, size]."""
    PADDED = "padded"
    """For short rows of similar length: one call on a padded copy [B, heads, T, size]."""
    PER_ROW = "per row"
    """One call for each row."""
    VARIABLE_LENGTH = "variable length"
    """torch.nn.attention.varlen: FlashAttention on cumulative lengths; CUDA and half precision only."""


class FlatRows:
    """Where the rows of a flat batch begin and end. The host knows this, so no layer has to wait for the device."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """`lengths`: the number of tokens of each row in the order of the batch, each at least 1. With `sequence_ranks`
        each rank's layers process a piece of the tokens, but attention sees all tokens of a row."""
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"rows of a flat batch: each row must have a token (lengths {list(lengths)}); remove empty rows"
            )
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.device = device
        self.sequence_ranks = sequence_ranks

    @property
    def num_tokens(self) -> int:
        """M, the number of tokens of all rows."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """T, the number of tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def position_ids_1M(self) -> Tensor:
        """int64: each token's position within its row, from 0."""
        return self._on_device(torch.arange(self.num_tokens)[None] - self._of_each_token(self._starts_B))

    @cached_property
    def cumulative_lengths(self) -> Tensor:
        """int32 [B + 1]: cumulative lengths, from 0 to M."""
        return self._on_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32))

    @cached_property
    def padding_BT(self) -> Tensor:
        """int64 [B * T]: the index of the flat token at each position of the padded batch; padding repeats a row's last
        token."""
        last_B = torch.tensor(self.lengths) - 1
        positions_BT = torch.minimum(torch.arange(self.longest), last_B[:, None])
        return self._on_device((self._starts_B[:, None] + positions_BT).flatten())

    @cached_property
    def unpadding_M(self) -> Tensor:
        """int64: the index of each flat token in the padded batch, viewed as [B * T]."""
        padded_starts_B = torch.arange(len(self.lengths)) * self.longest
        return self._on_device(torch.arange(self.num_tokens) + self._of_each_token(padded_starts_B - self._starts_B))

    @property
    def _starts_B(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths[:-1])])

    def _of_each_token(self, values_B: Tensor) -> Tensor:
        return values_B.repeat_interleave(torch.tensor(self.lengths))

    def _on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self.device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device. A GPU copies from pinned memory, so the host does not wait for the GPU's earlier
    work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def choose_kernel(
    lengths: Sequence[int],
    num_heads: int,
    head_sizes: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    capability: tuple[int, int] | None,
) -> Kernel:
    """The fastest kernel that supports these arguments. `head_sizes`: the head sizes of keys and of values.
    `capability`: the compute capability of a CUDA device.

    In float32 a CUDA device uses the same kernels as a CPU, because FlashAttention supports half precision only."""
    size = head_sizes[0]
    if (
        device_type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and capability is not None
        and capability >= MIN_VARIABLE_LENGTH_CAPABILITY
        and head_sizes[0] == head_sizes[1]
        and size <= MAX_VARIABLE_LENGTH_HEAD_SIZE
        and size % 8 == 0
        and "window_size" in _arguments(varlen.varlen_attn)
    ):
        return Kernel.VARIABLE_LENGTH
    longest = max(lengths)
    if min(lengths) == longest:
        return Kernel.ONE_VIEW
    wasted_squares = longest * longest - sum(length * length for length in lengths) / len(lengths)
    return Kernel.PADDED if wasted_squares * num_heads * size <= MAX_WASTED_PRODUCTS else Kernel.PER_ROW


def attend(
    kernel: Kernel,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KNE: Tensor,
    rows: FlatRows,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """[1, M, H, E]: causal attention within each row.

    With a `window` a token sees only the last `window` tokens, including itself. `scale` None means 1 / sqrt(D)."""
    if kernel is Kernel.VARIABLE_LENGTH:
        return _variable_length(query_1HND, key_1KND, value_1KNE, rows, scale, window)
    if kernel is Kernel.PER_ROW:
        # Split instead of sliced, because the gradient of each slice would fill a tensor of all rows.
        queries, keys, values = (
            torch.split_with_sizes(tensor, rows.lengths, dim=2) for tensor in (query_1HND, key_1KND, value_1KNE)
        )
        outputs = [
            _causal(query_1HTD, key_1KTD, value_1KTE, scale, window).transpose(1, 2)
            for query_1HTD, key_1KTD, value_1KTE in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(outputs, dim=1)
    if kernel is Kernel.PADDED:
        query_BHTD, key_BKTD, value_BKTE = (
            _as_batch(tensor.index_select(2, rows.padding_BT), rows) for tensor in (query_1HND, key_1KND, value_1KNE)
        )
        output_BTHE = _causal(query_BHTD, key_BKTD, value_BKTE, scale, window).transpose(1, 2)
        return output_BTHE.flatten(0, 1).index_select(0, rows.unpadding_M)[None]
    query_BHTD, key_BKTD, value_BKTE = (_as_batch(tensor, rows) for tensor in (query_1HND, key_1KND, value_1KNE))
    return _causal(query_BHTD, key_BKTD, value_BKTE, scale, window).transpose(1, 2).flatten(0, 1)[None]


def _as_batch(tensor_1HXD: Tensor, rows: FlatRows) -> Tensor:
    """[1, heads, B * T, size] seen as [B, heads, T, size]."""
    num_heads, _, size = tensor_1HXD.shape[1:]
    return tensor_1HXD.view(num_heads, len(rows.lengths), rows.longest, size).transpose(0, 1)


def _causal(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """[B, H, T, E]: causal attention in each of B rows of T tokens."""
    num_tokens, dtype = query_BHTD.shape[2], query_BHTD.dtype
    if query_BHTD.device.type == "cpu" and dtype == torch.bfloat16 and num_tokens <= MAX_WIDENED_TOKENS:
        query_BHTD, key_BKTD, value_BKTE = query_BHTD.float(), key_BKTD.float(), value_BKTE.float()
    mask_TT = None
    if window is not None and num_tokens > window:
        ones_TT = torch.ones((num_tokens, num_tokens), dtype=torch.bool, device=query_BHTD.device)
        mask_TT = ones_TT.tril().triu(1 - window)
    output_BHTE = scaled_dot_product_attention(
        query_BHTD,
        key_BKTD,
        value_BKTE,
        attn_mask=mask_TT,
        is_causal=mask_TT is None,
        scale=scale,
        enable_gqa=query_BHTD.shape[1] != key_BKTD.shape[1],
    )
    return output_BHTE.to(dtype)


def _variable_length(
    query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, rows: FlatRows, scale: float | None, window: int | None
) -> Tensor:
    query_MHD, key_MKD, value_MKD = (tensor[0].transpose(0, 1) for tensor in (query_1HND, key_1KND, value_1KND))
    attention = varlen.varlen_attn
    num_groups = query_MHD.shape[1] // key_MKD.shape[1]
    if num_groups > 1:
        if "enable_gqa" in _arguments(attention):
            attention = partial(attention, enable_gqa=True)
        else:
            # Earlier versions of torch lack this argument and do not document whether they support fewer key heads.
            key_MKD, value_MKD = (tensor.repeat_interleave(num_groups, dim=1) for tensor in (key_MKD, value_MKD))
    output_MHD = attention(
        query_MHD,
        key_MKD,
        value_MKD,
        rows.cumulative_lengths,
        rows.cumulative_lengths,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(output_MHD, Tensor)
    return output_MHD[None]


@cache
def _arguments(function: Callable[..., object]) -> frozenset[str]:
    """The names of a function's parameters. The variable-length kernel has other parameters in other versions of
    torch."""
    return frozenset(inspect.signature(function).parameters)
