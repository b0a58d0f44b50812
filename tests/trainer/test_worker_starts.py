"""The start of a worker on a GPU that is missing, or that another process would use by mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rljob_testing.messages import Mentions
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines import process_group
from rljob_trainer.errors import ResourceError
from rljob_trainer.groups.worker_side import WorkerSide

NO_CHANGE: Callable[..., None] = lambda *_: None  # noqa: E731
"""Leaves the variables of this process alone."""


def context(device_number: int) -> WorkerContext:
    """A worker that has this GPU."""
    return WorkerContext(1, 2, 1, 0, "127.0.0.1", 0, "cuda", torch.get_num_threads(), device_number)


def start_error(device_number: int) -> str:
    with pytest.raises(ResourceError) as caught:
        process_group.join_process_group(context(device_number))
    return str(caught.value)


def test_a_gpu_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "export_rank", NO_CHANGE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start_error(0) == Mentions("worker rank 1", "no usable GPU", "RLJOB_DEVICE=cpu")
    # Ray was started with more GPUs than the node has.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert start_error(2) == Mentions("worker rank 1", "assigned GPU 2", "finds 2", "MIG", "gpusPerNode: 1")


def test_a_gpu_that_cuda_cannot_select_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is with two MIG devices of two GPUs: torch counts two GPUs, but CUDA has one device."""

    def set_device(_: object) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal\nmore lines")

    monkeypatch.setattr(process_group, "export_rank", NO_CHANGE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    message = start_error(1)
    assert message == Mentions("worker rank 1", "assigned GPU 1", "invalid device ordinal", "MIG", "tensorParallel: 1")
    assert "more lines" not in message


def test_cuda_must_not_be_used_before_the_own_gpu_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="used CUDA"):
        WorkerSide().build(context(1), [], None)
