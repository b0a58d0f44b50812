"""Logits in float32 from hidden states and weights in BFloat16 (`headDtype: Float32`), compared with PyTorch's own
formulas in float64. `tests/gpu/test_head.py` is the same with the product that only GPUs have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_trainer.engines.train import logit_tiles, token_logprobs
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, token_distribution

NUM_TOKENS, NUM_VOCABULARY, HIDDEN_SIZE = 60, 17, 6
MULTIPLIER, SOFT_CAP, TEMPERATURE = 1.7, 3.0, 0.7
Leaves = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU with 16-bit products, or computing as on a GPU: only the products for logits return float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    name: str = request.param
    if name == "gpu":
        monkeypatch.setattr(token_logprobs, "_dtypes", lambda *_: (torch.bfloat16, torch.float32))
        monkeypatch.setattr(
            logit_tiles, "wide_product", lambda left, right, result: torch.mm(left.float(), right.float(), out=result)
        )
    return name


def make_leaves() -> Leaves:
    """Hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD, bias_V = (
        torch.randn(*shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((NUM_TOKENS, HIDDEN_SIZE), (NUM_VOCABULARY, HIDDEN_SIZE), (NUM_VOCABULARY,))
    )
    return hidden_ND, weight_VD, bias_V


def from_whole_logits(leaves: Leaves, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy; products in the dtype of the leaves, everything after them at least in float32."""
    hidden_ND, weight_VD, bias_V = leaves
    product_NV = hidden_ND @ weight_VD.T + bias_V
    logits_NV = product_NV.to(torch.promote_types(product_NV.dtype, torch.float32)) * MULTIPLIER
    all_NV = torch.log_softmax(SOFT_CAP * torch.tanh(logits_NV / SOFT_CAP) / TEMPERATURE, dim=-1)
    return all_NV.gather(1, targets_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(dim=-1)


def gradients(found: tuple[Tensor, Tensor], leaves: Leaves) -> tuple[Tensor, ...]:
    """Of a weighted sum of log-probabilities and entropies."""
    logprobs_N, entropy_N = found
    weights_N = torch.linspace(-1.0, 2.0, NUM_TOKENS, dtype=logprobs_N.dtype)
    return torch.autograd.grad((weights_N * logprobs_N + 0.3 * weights_N.flip(0) * entropy_N).sum(), leaves)


@pytest.mark.parametrize(("tile_bytes", "whole_bytes"), [(1, 1 << 20), (512, 0)], ids=["whole logits", "tiles"])
def test_logits_are_not_rounded(tile_bytes: int, whole_bytes: int, device: str) -> None:
    leaves = make_leaves()
    targets_N = torch.randint(0, NUM_VOCABULARY, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))

    def ours(is_float32: bool) -> tuple[Tensor, Tensor]:
        head = OutputHead(leaves[1], leaves[2], MULTIPLIER, SOFT_CAP, is_float32)
        found = token_distribution(
            leaves[0],
            targets_N,
            head,
            temperature=TEMPERATURE,
            entropy=Entropy.GRADIENT,
            tile_bytes=tile_bytes,
            whole_bytes=whole_bytes,
        )
        assert found.entropy_N is not None
        return found.logprobs_N, found.entropy_N

    hidden_ND, weight_VD, bias_V = (leaf.detach().double().requires_grad_() for leaf in leaves)
    exact = hidden_ND, weight_VD, bias_V
    right = from_whole_logits(exact, targets_N)
    found = ours(is_float32=True)
    for mine_N, right_N in zip(found, right, strict=True):
        torch.testing.assert_close(mine_N.double(), right_N, rtol=0, atol=1e-5)
    usual = gradients(from_whole_logits(leaves, targets_N), leaves)
    for mine, other, truth in zip(gradients(found, leaves), usual, gradients(right, exact), strict=True):
        assert (mine - truth).norm() <= 1.2 * (other - truth).norm()
    if device == "cpu":
        assert (ours(is_float32=False)[0] - right[0]).abs().max() > 1e-3


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the result of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.usefixtures("device")
def test_no_whole_weight_in_float32_exists() -> None:
    """Two tokens have 16,000 bytes of logits, which would be whole if that did not need the weight in float32."""
    hidden_ND = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(2000, 32, dtype=torch.bfloat16, requires_grad=True)
    head = OutputHead(weight_VD, is_float32=True)
    with _Sizes() as sizes:
        found = token_distribution(hidden_ND, torch.tensor([0, 1]), head, tile_bytes=16 * 1024, whole_bytes=16_000)
        found.logprobs_N.sum().backward()
    assert max(sizes.found) == weight_VD.nbytes
