"""Attention within rows on a device: all kernels give the same numbers.

Legend: N tokens of all rows, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates
from rljob_trainer.engines.train import attention, attention_kernels
from rljob_trainer.engines.train.attention_kernels import FlatRows, Kernel, attend
from rljob_trainer.engines.train.engine import TrainEngine

LENGTHS = (130, 1, 47, 300, 12, 86)
EQUAL_LENGTHS = (96,) * 5


@dataclass(frozen=True)
class Shape:
    """Shape of one layer's attention."""

    num_heads: int
    num_key_heads: int
    size: int
    window: int | None = None


SHAPES = (Shape(4, 4, 64), Shape(8, 2, 128), Shape(6, 2, 64, window=20))


@dataclass(frozen=True)
class Result:
    """Output of a layer, and gradients of query, key and value for a randomly weighted sum of the output."""

    output: Tensor
    gradients: tuple[Tensor, ...]


def result(
    kernel: Kernel | None, shape: Shape, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Result:
    """The result for the same numbers each time, on the host in float32; `kernel` None means `written_out`."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    inputs = [
        torch.randn(1, heads, num_tokens, shape.size, generator=generator).to(device, dtype).requires_grad_()
        for heads in (shape.num_heads, shape.num_key_heads, shape.num_key_heads)
    ]
    weights = torch.randn(1, num_tokens, shape.num_heads, shape.size, generator=generator).to(device, dtype)
    query_1HND, key_1KND, value_1KND = inputs
    if kernel is None:
        found = written_out(query_1HND, key_1KND, value_1KND, lengths, shape.window)
    else:
        found = attend(kernel, query_1HND, key_1KND, value_1KND, FlatRows(lengths, device), None, shape.window)
    gradients = torch.autograd.grad((found * weights).float().sum(), inputs)
    return Result(found.detach().float().cpu(), tuple(each.float().cpu() for each in gradients))


def written_out(
    query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, lengths: Sequence[int], window: int | None
) -> Tensor:
    """[1, N, H, D]: scores between all tokens of the batch, masked to those that a token may attend to."""
    num_groups = query_1HND.shape[1] // key_1KND.shape[1]
    key_1HND, value_1HND = (each.repeat_interleave(num_groups, dim=1) for each in (key_1KND, value_1KND))
    scores_1HNN = query_1HND @ key_1HND.transpose(-1, -2) / query_1HND.shape[-1] ** 0.5
    rows_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places_N = torch.arange(sum(lengths))
    back_NN = places_N[:, None] - places_N
    is_seen_NN = (rows_N[:, None] == rows_N) & (back_NN >= 0) & (back_NN < (window or sum(lengths)))
    return (scores_1HNN.masked_fill(~is_seen_NN, -torch.inf).softmax(dim=-1) @ value_1HND).transpose(1, 2)


def error(found: Result, expected: Result) -> float:
    """The largest of the four errors, relative to the norm."""
    pairs = zip((found.output, *found.gradients), (expected.output, *expected.gradients), strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def test_kernels_agree_in_float32(case: DeviceContext) -> None:
    host = torch.device("cpu")
    for shape in SHAPES:
        for kernel, lengths in (
            (Kernel.PER_ROW, LENGTHS),
            (Kernel.PADDED, LENGTHS),
            (Kernel.ONE_VIEW, EQUAL_LENGTHS),
        ):
            expected = result(None, shape, lengths, host, torch.float64)
            found = result(kernel, shape, lengths, case.device, torch.float32)
            assert case.note(f"{kernel}, {shape.num_heads}x{shape.size}", error(found, expected)) < 1e-5


def test_variable_lengths_in_half_precision_are_as_exact_as_padding(case: DeviceContext) -> None:
    case.needs_gpu("torch's kernel for variable lengths has no form for CPUs")
    host = torch.device("cpu")
    for shape in SHAPES:
        expected = result(None, shape, LENGTHS, host, torch.float64)
        flat, padded = (
            error(result(kernel, shape, LENGTHS, case.device, torch.bfloat16), expected)
            for kernel in (Kernel.VARIABLE_LENGTH, Kernel.PADDED)
        )
        name = f"{shape.num_heads}x{shape.size}"
        assert case.note(name, flat) <= 1.1 * case.note(f"{name}, padded", padded)


def test_the_engine_uses_the_kernel_for_variable_lengths(case: DeviceContext) -> None:
    case.needs_gpu("torch's kernel for variable lengths has no form for CPUs")
    folder, batch = tiny_models.save("qwen3", case.folder / "model"), engine_updates.random_batch()
    right_N = TrainEngine(engine_updates.engine_settings(folder, case.device)).forward(batch, 1.0).logprobs_N
    engine = TrainEngine(engine_updates.engine_settings(folder, case.device, torch.bfloat16))
    kernels: list[Kernel] = []

    def seen(kernel: Kernel, *others: object) -> Tensor:
        kernels.append(kernel)
        return attention_kernels.attend(kernel, *others)  # type: ignore[arg-type]

    with patch.object(attention, "attend", seen):
        flat_N = (engine.forward(batch, 1.0).logprobs_N - right_N).abs()
    assert set(kernels) == {Kernel.VARIABLE_LENGTH}
    with patch.object(attention, "choose_kernel", lambda *_: Kernel.PADDED):
        padded_N = (engine.forward(batch, 1.0).logprobs_N - right_N).abs()
    assert case.note("mean error", float(flat_N.mean())) <= 1.1 * case.note("padded", float(padded_N.mean()))
    assert float(flat_N.max()) <= 1.5 * float(padded_N.max())
