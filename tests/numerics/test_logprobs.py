"""Log-probabilities and entropy against PyTorch's own formulas in 64 bits, and the memory they need."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rljob_trainer.engines.train.logprobs import token_logprobs_and_entropy

NUM_VOCABULARY = 11


def naive(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    all_BTV = torch.log_softmax(logits_BTV / temperature, dim=-1)
    entropy_BT = -(all_BTV.exp() * all_BTV).sum(dim=-1)
    return all_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1), entropy_BT


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_BTV = 4 * torch.randn(3, 5, NUM_VOCABULARY, generator=generator, dtype=torch.float64)
    tokens_BT = torch.randint(0, NUM_VOCABULARY, (3, 5), generator=generator)
    return logits_BTV.to(dtype), tokens_BT


def test_two_tokens_by_hand() -> None:
    # softmax of (ln 1, ln 3) is (1/4, 3/4); at temperature 1/2, of (ln 1, ln 9), it is (1/10, 9/10).
    logits_BTV = torch.tensor([[[0.0, math.log(3.0)]]])
    tokens_BT = torch.tensor([[1]])
    logprobs_BT, entropy_BT = token_logprobs_and_entropy(logits_BTV, tokens_BT, with_entropy=True)
    assert entropy_BT is not None
    assert logprobs_BT.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert entropy_BT.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), rel=1e-6)
    colder_BT, no_entropy = token_logprobs_and_entropy(logits_BTV, tokens_BT, 0.5)
    assert no_entropy is None
    assert colder_BT.item() == pytest.approx(math.log(0.9), rel=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_naive_formula(chunk_tokens: int, temperature: float) -> None:
    logits_BTV, tokens_BT = make_inputs()
    weights_BT = torch.linspace(-1, 2, 15, dtype=torch.float64).reshape(3, 5)
    gradients = []
    for use_ours in (True, False):
        leaf_BTV = logits_BTV.clone().requires_grad_()
        if use_ours:
            logprobs_BT, entropy_BT = token_logprobs_and_entropy(
                leaf_BTV,
                tokens_BT,
                temperature,
                differentiable_entropy=True,
                chunk_bytes=4 * NUM_VOCABULARY * chunk_tokens,
            )
            assert entropy_BT is not None
            ours = (logprobs_BT.detach(), entropy_BT.detach())
        else:
            logprobs_BT, entropy_BT = naive(leaf_BTV, tokens_BT, temperature)
            torch.testing.assert_close(ours, (logprobs_BT.detach(), entropy_BT.detach()), rtol=1e-12, atol=1e-12)
        torch.autograd.backward((weights_BT * logprobs_BT - 0.3 * weights_BT.square() * entropy_BT).sum())
        assert leaf_BTV.grad is not None
        gradients.append(leaf_BTV.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_entropy_carries_no_gradient_unless_asked() -> None:
    logits_BTV, tokens_BT = make_inputs()
    logits_BTV.requires_grad_()
    logprobs_BT, entropy_BT = token_logprobs_and_entropy(logits_BTV, tokens_BT, with_entropy=True)
    assert entropy_BT is not None
    assert logprobs_BT.requires_grad
    assert not entropy_BT.requires_grad


def test_low_precision_logits_are_computed_in_32_bits_with_gradients_in_theirs() -> None:
    logits_BTV, tokens_BT = make_inputs(torch.bfloat16)
    logits_BTV.requires_grad_()
    logprobs_BT, _ = token_logprobs_and_entropy(logits_BTV, tokens_BT)
    expected_BT, _ = naive(logits_BTV.detach().double(), tokens_BT, 1.0)
    assert logprobs_BT.dtype == torch.float32
    torch.testing.assert_close(logprobs_BT.detach().double(), expected_BT, rtol=1e-6, atol=1e-6)
    torch.autograd.backward(logprobs_BT.sum())
    assert logits_BTV.grad is not None
    assert logits_BTV.grad.dtype == torch.bfloat16


def test_large_logits_and_forbidden_tokens_are_exact() -> None:
    # Two equal logits at 1e4 and one at -inf: probabilities 1/2, 1/2, 0.
    logits_BTV = torch.tensor([[[1e4, 1e4, -math.inf]]], requires_grad=True)
    logprobs_BT, entropy_BT = token_logprobs_and_entropy(logits_BTV, torch.tensor([[0]]), differentiable_entropy=True)
    assert entropy_BT is not None
    assert logprobs_BT.item() == pytest.approx(-math.log(2), rel=1e-6)
    assert entropy_BT.item() == pytest.approx(math.log(2), rel=1e-6)
    torch.autograd.backward((logprobs_BT + entropy_BT).sum())
    assert logits_BTV.grad is not None
    torch.testing.assert_close(logits_BTV.grad, torch.tensor([[[0.5, -0.5, 0.0]]]), atol=1e-6, rtol=0)


def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward_pass() -> None:
    logits_BTV = torch.randn(2, 64, 500, requires_grad=True)
    tokens_BT = torch.randint(0, 500, (2, 64))
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        token_logprobs_and_entropy(logits_BTV, tokens_BT, 0.9, with_entropy=True, chunk_bytes=4 * 500 * 8)
    other = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() != logits_BTV.data_ptr()]
    assert len(saved) == 5
    assert max(tensor.numel() for tensor in other) == 128
