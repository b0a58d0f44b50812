"""The start of a worker on a GPU that is missing, or that another process would use by mistake."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.messages import Mentions
from rljob_testing.training import training_runs
from rljob_trainer.controller import run_workers
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines import process_group
from rljob_trainer.errors import ResourceError
from rljob_trainer.groups import ray_worker
from rljob_trainer.groups.devices import CUDA_VARIABLE
from rljob_trainer.groups.worker_side import WorkerSide
from rljob_trainer.pools.resource_pool import ResourcePool
from rljob_trainer.settings import read_settings

RAY_WORKER = SimpleNamespace(original_visible_accelerator_ids={"GPU": ["4", "5"]})
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


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_only_workers_that_share_a_model_see_their_neighbours(
    monkeypatch: pytest.MonkeyPatch, tensor_parallel: int
) -> None:
    monkeypatch.setenv("RLJOB_SPEC", "{}")
    spec = RLJobSpec.from_wire(training_runs.small_job()["spec"])
    rollout = spec.roles.rollout.model_copy(update={"tensor_parallel": tensor_parallel})
    roles = spec.roles.model_copy(update={"rollout": rollout})
    job = TrainerJob(name="small", spec=spec.model_copy(update={"roles": roles}))
    started = Mock()
    monkeypatch.setattr(run_workers, "start_processes", started)
    run_workers.start_pool(Mock(ResourcePool), job, read_settings(), "cuda")
    assert started.call_args.kwargs["sees_all_gpus"] is (tensor_parallel == 2)


@pytest.mark.parametrize(("worker", "visible"), [(SimpleNamespace(), "5"), (RAY_WORKER, "4,5")])
def test_without_rays_private_name_a_worker_sees_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, worker: object, visible: str
) -> None:
    devices = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["5"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: devices)
    monkeypatch.setattr(ray._private.worker, "global_worker", worker)
    monkeypatch.setenv(CUDA_VARIABLE, "5")
    ray_worker.show_devices_of_node()
    assert os.environ[CUDA_VARIABLE] == visible


def test_cuda_must_not_be_used_before_the_own_gpu_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="used CUDA"):
        WorkerSide().build(context(1), [], None)
