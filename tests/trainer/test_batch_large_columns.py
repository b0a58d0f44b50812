"""Columns that are large enough for a different memory path are concatenated as small ones are."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.batch.columns import LARGE_BYTES, concat_tensors
from rljob_trainer.batch.proto import DataProto

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_tensors_of_every_dtype_are_concatenated(dtype: torch.dtype) -> None:
    num_rows = LARGE_BYTES // dtype.itemsize // 3 + 1
    first, second = torch.arange(3 * num_rows).remainder(2).to(dtype).view(num_rows, 3).split([num_rows - 7, 7])
    joined = concat_tensors("x", [first, second])
    assert (joined.dtype, joined.shape) == (dtype, (num_rows, 3))
    assert joined.is_contiguous()
    for part, again in ((first, joined[:-7]), (second, joined[-7:])):
        assert torch.equal(part.view(torch.uint8), again.contiguous().view(torch.uint8))


def test_gradients_flow_through_concatenation() -> None:
    weights = torch.ones(LARGE_BYTES // 4, requires_grad=True)
    concat_tensors("x", [weights, weights]).sum().backward()
    assert weights.grad is not None
    assert weights.grad.unique().tolist() == [2.0]


def test_a_large_batch_is_concatenated() -> None:
    batch = DataProto({"x": torch.rand(4, LARGE_BYTES // 8)})
    again = DataProto.concat(batch.chunk(4))
    assert torch.equal(again["x"], batch["x"])
