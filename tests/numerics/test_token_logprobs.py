"""Log-probabilities, entropy and squared probabilities from hidden states, compared with PyTorch's own formulas on
whole logits in float64 and with values by hand; and the memory that they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_trainer.engines.train.logit_tiles import tile_shape
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, TokenDistribution, token_distribution

NUM_TOKENS, NUM_VOCABULARY, HIDDEN_SIZE = 7, 17, 6
SIZES = {
    "whole logits": (1, 1 << 20),
    "one tile": (1 << 20, 0),
    "several tiles": (8 * 20, 0),
    "a logit at a time": (8, 0),
}
"""Bytes of a tile, for elements of 8 bytes, and of logits that are not split."""
HEADS: Mapping[str, tuple[bool, float, float | None]] = {
    "plain": (False, 1.0, None),
    "bias": (True, 1.0, None),
    "multiplied": (True, 0.3, None),
    "soft-capped": (False, 1.0, 2.0),
    "all": (True, 1.7, 3.0),
}
"""Whether there is a bias, the multiplier, the soft cap."""


@dataclass(frozen=True)
class Inputs:
    """Leaf tensors: hidden states, weight and bias."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor
    targets_N: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """All leaves that can require a gradient."""
        return self.hidden_ND, self.weight_VD, self.bias_V


def make_inputs(dtype: torch.dtype = torch.float64, num_tokens: int = NUM_TOKENS) -> Inputs:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets_N = torch.randint(0, NUM_VOCABULARY, (num_tokens,), generator=generator)
    return Inputs(
        normal(num_tokens, HIDDEN_SIZE), normal(NUM_VOCABULARY, HIDDEN_SIZE), normal(NUM_VOCABULARY), targets_N
    )


def naive(inputs: Inputs, head: tuple[bool, float, float | None], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy and squares from whole logits."""
    with_bias, multiplier, soft_cap = head
    logits_NV = inputs.hidden_ND @ inputs.weight_VD.T
    if with_bias:
        logits_NV = logits_NV + inputs.bias_V
    logits_NV = logits_NV * multiplier
    if soft_cap is not None:
        logits_NV = soft_cap * torch.tanh(logits_NV / soft_cap)
    all_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
    logprobs_N = all_NV.gather(1, inputs.targets_N[:, None])[:, 0]
    return logprobs_N, -(all_NV.exp() * all_NV).sum(dim=-1), all_NV.exp().square().sum(dim=-1)


def ours(
    inputs: Inputs,
    head: tuple[bool, float, float | None] = HEADS["plain"],
    temperature: float = 1.0,
    entropy: Entropy = Entropy.NO,
    with_squares: bool = False,
    sizes: tuple[int, int] = SIZES["several tiles"],
) -> TokenDistribution:
    with_bias, multiplier, soft_cap = head
    output_head = OutputHead(inputs.weight_VD, inputs.bias_V if with_bias else None, multiplier, soft_cap)
    tile_bytes, whole_bytes = sizes
    return token_distribution(
        inputs.hidden_ND,
        inputs.targets_N,
        output_head,
        temperature=temperature,
        entropy=entropy,
        with_squares=with_squares,
        tile_bytes=tile_bytes,
        whole_bytes=whole_bytes,
    )


def loss_of(logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
    """A loss with different weights for every token and for the two terms."""
    weights_N = torch.linspace(-1, 2, len(logprobs_N), dtype=logprobs_N.dtype)
    loss = (weights_N * logprobs_N).sum()
    return loss if entropy_N is None else loss - 0.3 * (weights_N.square() * entropy_N).sum()


def gradients_of(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]


def given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def test_two_tokens_match_values_by_hand() -> None:
    # Logits (ln 1, ln 3) give (1/4, 3/4); at temperature 1/2, as those of (ln 1, ln 9), (1/10, 9/10).
    hidden_ND, targets_N = torch.ones(1, 1), torch.tensor([1])
    head = OutputHead(torch.tensor([[0.0], [math.log(3.0)]]))
    found = token_distribution(hidden_ND, targets_N, head, entropy=Entropy.VALUE, with_squares=True)
    assert found.logprobs_N.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert given(found.entropy_N).item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), rel=1e-6)
    assert given(found.squares_N).item() == pytest.approx(1 / 16 + 9 / 16, rel=1e-6)
    colder = token_distribution(hidden_ND, targets_N, head, temperature=0.5)
    assert colder.logprobs_N.item() == pytest.approx(math.log(0.9), rel=1e-6)
    assert colder.entropy_N is None
    assert colder.squares_N is None


def test_the_soft_cap_comes_after_multiplier_and_before_temperature() -> None:
    # x = 3 * (1 * 2 + 4) = 18 and 0; capped 5 tanh(18 / 5) and 0; halved.
    head = OutputHead(torch.tensor([[2.0], [0.0]]), torch.tensor([4.0, 0.0]), multiplier=3.0, soft_cap=5.0)
    found = token_distribution(torch.ones(1, 1), torch.tensor([1]), head, temperature=2.0)
    assert found.logprobs_N.item() == pytest.approx(-math.log1p(math.exp(2.5 * math.tanh(3.6))), rel=1e-6)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_values_and_gradients_equal_those_of_whole_logits(
    sizes: tuple[int, int], head: tuple[bool, float, float | None]
) -> None:
    inputs = make_inputs()
    temperature = 1.0 if head == HEADS["plain"] else 0.7
    for entropy in Entropy:
        logprobs_N, entropy_N, squares_N = naive(inputs, head, temperature)
        found = ours(inputs, head, temperature, entropy, entropy is Entropy.VALUE, sizes)
        torch.testing.assert_close(found.logprobs_N, logprobs_N, rtol=1e-11, atol=1e-12)
        if entropy is not Entropy.NO:
            torch.testing.assert_close(given(found.entropy_N), entropy_N, rtol=1e-11, atol=1e-12)
        if entropy is Entropy.VALUE:
            torch.testing.assert_close(given(found.squares_N), squares_N.detach(), rtol=1e-11, atol=1e-12)
        of_entropy = entropy is Entropy.GRADIENT
        expected = gradients_of(loss_of(logprobs_N, entropy_N if of_entropy else None), inputs.leaves())
        actual = gradients_of(loss_of(found.logprobs_N, found.entropy_N if of_entropy else None), inputs.leaves())
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_gradients_equal_finite_differences() -> None:
    inputs = make_inputs(num_tokens=3)

    def distribution(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
        changed = Inputs(hidden_ND, weight_VD, bias_V, inputs.targets_N)
        found = ours(changed, HEADS["all"], 0.8, Entropy.GRADIENT)
        return found.logprobs_N, given(found.entropy_N)

    assert torch.autograd.gradcheck(distribution, inputs.leaves())


def test_only_the_entropy_may_carry_a_gradient() -> None:
    inputs = make_inputs()
    found = ours(inputs, HEADS["all"], 0.7, Entropy.GRADIENT)
    expected = gradients_of(naive(inputs, HEADS["all"], 0.7)[1].sum(), inputs.leaves())
    torch.testing.assert_close(gradients_of(given(found.entropy_N).sum(), inputs.leaves()), expected)


@pytest.mark.parametrize("sizes", [SIZES["whole logits"], SIZES["several tiles"]], ids=["whole", "tiles"])
def test_entropy_carries_a_gradient_only_on_request_and_squares_never(sizes: tuple[int, int]) -> None:
    inputs = make_inputs()
    found = ours(inputs, entropy=Entropy.VALUE, with_squares=True, sizes=sizes)
    assert found.logprobs_N.requires_grad
    assert not given(found.entropy_N).requires_grad
    found = ours(inputs, entropy=Entropy.GRADIENT, with_squares=True, sizes=sizes)
    assert given(found.entropy_N).requires_grad
    assert not given(found.squares_N).requires_grad
    with torch.no_grad():
        assert not ours(inputs, entropy=Entropy.GRADIENT, sizes=sizes).logprobs_N.requires_grad


def test_the_gradient_of_a_tied_weight_is_the_sum_of_both_uses() -> None:
    weight_VD = make_inputs().weight_VD
    tokens_N, targets_N = torch.tensor([3, 16, 3, 0]), torch.tensor([16, 1, 3, 3])

    def gradient(use_ours: bool) -> Tensor:
        hidden_ND = torch.tanh(torch.nn.functional.embedding(tokens_N, weight_VD))
        inputs = Inputs(hidden_ND, weight_VD, torch.zeros(0), targets_N)
        logprobs_N = ours(inputs).logprobs_N if use_ours else naive(inputs, HEADS["plain"], 1.0)[0]
        return gradients_of(loss_of(logprobs_N, None), [weight_VD])[0]

    torch.testing.assert_close(gradient(use_ours=True), gradient(use_ours=False))


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_gradients_that_are_not_required_are_not_computed(needed: int) -> None:
    inputs = make_inputs()
    for number, leaf in enumerate(inputs.leaves()):
        leaf.requires_grad_(number == needed)
    leaf = inputs.leaves()[needed]
    expected = gradients_of(loss_of(naive(inputs, HEADS["bias"], 1.0)[0], None), [leaf])
    loss = loss_of(ours(inputs, HEADS["bias"]).logprobs_N, None)
    with _Watch() as watch:
        actual = gradients_of(loss, [leaf])
    torch.testing.assert_close(actual, expected)
    # 7 x 17 logits in 2 x 4 tiles of 4 x 5, the last ones smaller: each is recomputed, and multiplied once more for
    # hidden states or for the weight, but not for the bias.
    assert watch.products.count(HIDDEN_SIZE) == 8
    assert len(watch.products) == (8 if needed == 2 else 16)


@pytest.mark.parametrize("sizes", [SIZES["whole logits"], (8 * 20, -1)], ids=["whole", "tiles"])
def test_without_tokens_everything_is_empty_and_gradients_are_zeros(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(num_tokens=0)
    # Uninitialized memory may hold any number.
    monkeypatch.setattr(torch, "empty_like", lambda like, **more: torch.full_like(like, math.nan, **more))
    found = ours(inputs, HEADS["all"], 1.0, Entropy.GRADIENT, True, sizes)
    assert found.logprobs_N.shape == given(found.entropy_N).shape == given(found.squares_N).shape == (0,)
    torch.autograd.backward(found.logprobs_N.sum() + given(found.entropy_N).sum())
    for leaf in inputs.leaves():
        assert torch.equal(given(leaf.grad), torch.zeros_like(leaf))


@pytest.mark.parametrize("product_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [(1, 1 << 20), (1 << 20, 0), (512, 0)], ids=["whole logits", "one tile", "several tiles"]
)
def test_bfloat16_is_as_exact_as_whole_logits(
    sizes: tuple[int, int], product_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_units = product_dtype == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_units})
    inputs = make_inputs(torch.bfloat16, num_tokens=60)
    hidden_ND, weight_VD, bias_V = (leaf.detach().double().requires_grad_() for leaf in inputs.leaves())
    exact = Inputs(hidden_ND, weight_VD, bias_V, inputs.targets_N)
    expected = gradients_of(loss_of(*naive(exact, HEADS["all"], 0.7)[:2]), exact.leaves())
    found = ours(inputs, HEADS["all"], 0.7, Entropy.GRADIENT, sizes=sizes)
    assert found.logprobs_N.dtype == given(found.entropy_N).dtype == torch.float32
    actual = gradients_of(loss_of(found.logprobs_N, found.entropy_N), inputs.leaves())
    assert [each.dtype for each in actual] == [torch.bfloat16] * 3
    plain = gradients_of(loss_of(*plain_bfloat16(inputs, HEADS["all"], 0.7)), inputs.leaves())
    for mine, other, truth in zip(actual, plain, expected, strict=True):
        if has_units:
            assert distance(mine, truth) <= 1.2 * distance(other, truth)
        else:
            # Only the result is rounded.
            assert distance(mine, truth) <= 1.01 * distance(truth.bfloat16(), truth)


def plain_bfloat16(inputs: Inputs, head: tuple[bool, float, float | None], temperature: float) -> tuple[Tensor, Tensor]:
    """Products in bfloat16, everything after them in float32."""
    _, multiplier, soft_cap = head
    assert soft_cap is not None
    logits_NV = (inputs.hidden_ND @ inputs.weight_VD.T + inputs.bias_V).float() * multiplier
    all_NV = torch.log_softmax(soft_cap * torch.tanh(logits_NV / soft_cap) / temperature, dim=-1)
    return all_NV.gather(1, inputs.targets_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(dim=-1)


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative to the norm of the exact result."""
    return float((found.double() - truth).norm() / truth.norm())


def test_near_certain_tokens_keep_their_digits() -> None:
    # Logits 40 and 40 - 16: the log-probability of the first is -log(1 + e^-16) = -1.125e-7, far below the spacing of
    # float32 numbers near 40.
    head = OutputHead(torch.tensor([[40.0], [24.0]], requires_grad=True))
    found = token_distribution(
        torch.ones(1, 1), torch.tensor([0]), head, entropy=Entropy.VALUE, tile_bytes=4, whole_bytes=0
    )
    # 1 + e^-16 itself is a multiple of 2^-23 in float32.
    assert found.logprobs_N.item() == pytest.approx(-math.log1p(2.0**-23), rel=1e-6)
    assert given(found.entropy_N).item() == pytest.approx(17 * math.exp(-16), rel=0.1)


def test_large_logits_do_not_overflow() -> None:
    head = OutputHead(torch.tensor([[1e4], [1e4], [-1e4]], requires_grad=True))
    for tile_bytes in (4, 1 << 20):
        found = token_distribution(
            torch.ones(1, 1),
            torch.tensor([0]),
            head,
            entropy=Entropy.GRADIENT,
            with_squares=True,
            tile_bytes=tile_bytes,
            whole_bytes=0,
        )
        assert found.logprobs_N.item() == pytest.approx(-math.log(2), rel=1e-6)
        assert given(found.entropy_N).item() == pytest.approx(math.log(2), rel=1e-6)
        assert given(found.squares_N).item() == pytest.approx(0.5, rel=1e-6)
        (gradient_VD,) = torch.autograd.grad((found.logprobs_N + given(found.entropy_N)).sum(), head.weight_VD)
        torch.testing.assert_close(gradient_VD, torch.tensor([[0.5], [-0.5], [0.0]]), atol=1e-6, rtol=0)


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    inputs = make_inputs()
    inputs.targets_N[4] = NUM_VOCABULARY
    is_nan_N = ours(inputs).logprobs_N.isnan()
    assert is_nan_N.nonzero().tolist() == [[4]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: Inputs(each.hidden_ND[:, 1:], each.weight_VD, each.bias_V, each.targets_N), "do not match"),
        (lambda each: Inputs(each.hidden_ND, each.weight_VD, each.bias_V, each.targets_N[1:]), "one int64 per"),
        (lambda each: Inputs(each.hidden_ND, each.weight_VD, each.bias_V, each.targets_N.int()), "one int64 per"),
        (lambda each: Inputs(each.hidden_ND.float(), each.weight_VD, each.bias_V, each.targets_N), "dtype"),
    ],
)
def test_invalid_arguments_are_rejected(change: Callable[[Inputs], Inputs], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(change(make_inputs()))
    with pytest.raises(ValueError, match="temperature"):
        ours(make_inputs(), temperature=0.0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # One mebi-element: whole, if it fits; otherwise square and even; the vocabulary whole if it is small.
        ((1000, 512, 256), (1000, 512)),
        ((4096, 151_936, 1024), (1024, 1024)),
        ((1536, 49_152, 576), (768, 1344)),
        ((10_000, 512, 256), (2048, 512)),
        # Few tokens: no more columns than make four times as many elements of the weight.
        ((1, 151_936, 1024), (1, 4032)),
        ((0, 151_936, 1024), (1, 4032)),
    ],
)
def test_tiles_are_square_and_even(sizes: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert tile_shape(*sizes, 1 << 20) == expected


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records for every operation the bytes of its result, and for matrix products the summed dimension."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes: list[int] = []
        self.products: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_bytes.append(result.untyped_storage().nbytes())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products.append(args[-1].shape[0])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [2, 300])
def test_neither_whole_logits_nor_a_whole_float32_weight_exist(
    dtype: torch.dtype, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    hidden_ND = torch.randn(num_tokens, 32, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(2000, 32, dtype=dtype, requires_grad=True)
    targets_N, head = torch.randint(0, 2000, (num_tokens,)), OutputHead(weight_VD, soft_cap=30.0)
    with _Watch() as watch:
        found = token_distribution(
            hidden_ND,
            targets_N,
            head,
            entropy=Entropy.GRADIENT,
            with_squares=True,
            tile_bytes=16 * 1024,
            whole_bytes=16_000,
        )
        torch.autograd.backward((found.logprobs_N + given(found.entropy_N)).sum())
    # The largest is the weight's gradient. Logits of two tokens take 16,000 bytes, and would be whole if that did not
    # need the weight in float32; those of 300 take 2.4 MB.
    assert max(watch.num_bytes) == weight_VD.nbytes


def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward_pass() -> None:
    inputs = make_inputs()
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        ours(inputs, HEADS["bias"], entropy=Entropy.GRADIENT)
    pointers = {leaf.data_ptr() for leaf in inputs.leaves()}
    other = [tensor for tensor in saved if tensor.data_ptr() not in pointers]
    assert len(saved) - len(other) == 3
    assert [tensor.shape for tensor in other] == [(NUM_TOKENS,)] * 4
