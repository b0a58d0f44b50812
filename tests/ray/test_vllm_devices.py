"""How vLLM finds the GPUs of the ranks that share a model, with vLLM's own code and the variables of a worker process;
and what users read if vLLM does not start. No GPU is used."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from rljob_testing.messages import Mentions
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.select import LACKS_LORA, SUPPORTS_LORA
from rljob_trainer.groups.devices import CUDA_VARIABLE, device_number, visible_devices
from rljob_trainer.settings import set_variable, worker_environment

pytestmark = pytest.mark.vllm

OUTSIDE = ("4", "5", "6", "7")
"""The GPUs of a node that was started with CUDA_VISIBLE_DEVICES=4,5,6,7."""
MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
Found = tuple[int, list[int], list[tuple[int, int]]]
"""The device on which vLLM runs, the devices of the ranks that share its model, and the pairs of devices whose
connection it looks up."""


def vllm_lookups(at_start: Sequence[str] | None, assigned: str, rank: int, tensor_parallel: int) -> Found | str:
    """What vLLM looks up on a rank of a tensor-parallel group whose process has this GPU; the error if it raises
    one."""
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms.interface import Platform

    class CudaPlatform(Platform):  # type: ignore[misc]
        """vLLM's own look-ups, which on GPUs `CudaPlatformBase` inherits. It needs NVIDIA's driver."""

        device_control_env_var = CUDA_VARIABLE

    set_variable(CUDA_VARIABLE, visible_devices([assigned], at_start, assigned))
    # The rank's LOCAL_RANK, see `join_process_group`.
    number = device_number({"GPU": [assigned]}, os.environ)
    pairs: list[tuple[int, int]] = []

    def can_access(device: int, peer: int) -> bool:
        pairs.append((device, peer))
        return True

    with (
        patch.object(custom_all_reduce, "current_platform", CudaPlatform),
        patch.object(torch.cuda, "can_device_access_peer", can_access),
    ):
        device_of = CudaPlatform.logical_device_id_to_visible_device_id
        try:
            custom_all_reduce._can_p2p(rank, tensor_parallel)
            return device_of(number), [device_of(peer) for peer in range(tensor_parallel)], pairs
        except IndexError as error:
            return repr(error)


def lookups(_context: WorkerContext) -> list[Found | str]:
    """The look-ups of both ranks of a group with the node's first two GPUs; of a rank with its last GPU; and of a rank
    on a node where the variable was not set."""
    return [
        vllm_lookups(OUTSIDE, "4", 0, 2),
        vllm_lookups(OUTSIDE, "5", 1, 2),
        vllm_lookups(OUTSIDE, "7", 1, 2),
        vllm_lookups(None, "3", 3, 4),
        # A process that sees only its own device, such as a MIG device: `check_devices` refuses such a group.
        vllm_lookups(["0"], "0", 0, 2),
    ]


def start_errors(_context: WorkerContext) -> list[tuple[str, str]]:
    """Class and message of the error if a worker sees one GPU and its model is shared by two; and if vLLM itself raises
    a KeyError, because a variable is missing."""
    from rljob_trainer.engines.rollout import vllm_start
    from rljob_trainer.errors import TrainerError

    def settings(device_type: str, tensor_parallel: int) -> vllm_start.VllmSettings:
        return vllm_start.VllmSettings(MODEL, device_type, False, torch.float32, tensor_parallel, 32, 16, 0.5, 2**24, 0)

    found = []
    # The installed vLLM is the build for CPUs, which `check_build` would name first.
    with (
        patch.object(vllm_start, "check_build", lambda *_: None),
        patch.object(torch.cuda, "device_count", lambda: 1),
    ):
        vllm_start.check_devices(settings("cuda", 1))
        vllm_start.check_devices(settings("cpu", 2))
        try:
            vllm_start.start_vllm(settings("cuda", 2))
        except TrainerError as error:
            found.append((type(error).__name__, str(error)))
    set_variable("RANK", None)
    try:
        vllm_start.start_vllm(settings("cpu", 1))
    except TrainerError as error:
        found.append((type(error).__name__, str(error)))
    return found


def exit_codes(_context: WorkerContext) -> list[tuple[str, str]]:
    """Class and exit code of the error if vLLM fails with each of these errors."""
    from rljob_trainer.__main__ import exit_code_of
    from rljob_trainer.engines.rollout import vllm_start
    from rljob_trainer.errors import TrainerError

    settings = vllm_start.VllmSettings(MODEL, "cpu", False, torch.float32, 1, 32, 16, 0.5, 2**24, 0)
    found = []
    for failure in FAILURES:

        def failing(_arguments: object, failure: Exception = failure) -> None:
            raise failure

        with patch.object(vllm_start, "_built_engine", failing):
            try:
                vllm_start.start_vllm(settings)
            except TrainerError as error:
                found.append((type(error).__name__, exit_code_of(error).name))
    return found


def models_with_adapters(_context: WorkerContext) -> list[object]:
    """The exit codes of the program that says whether vLLM supports adapters of these models."""
    from rljob_trainer.engines.rollout.select import LORA_SUPPORT_PROGRAM

    found: list[object] = []
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Step3TextForCausalLM", "OnlyInTransformers"):
        with patch.object(sys, "argv", ["", architecture]):
            try:
                runpy.run_module(LORA_SUPPORT_PROGRAM, run_name="__main__")
            except SystemExit as end:
                found.append(end.code)
    return found


FAILURES = (
    TypeError("EngineArgs got an unexpected keyword argument 'kv_cache_memory_bytes'"),
    ImportError("cannot import name 'x' from 'vllm.device_allocator.memory'"),
    AttributeError("no attribute 'get_device_total_memory'"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("not enough memory"),
    MemoryError(),
    NotImplementedError("this attention has no kernel for 5 heads"),
    RecursionError("maximum recursion depth exceeded"),
    OSError("No space left on device"),
    AssertionError("6 is not divisible by 4"),
)


def test_vllm_finds_the_gpus_of_all_ranks_and_explains_why_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)
    runs = [gloo_ranks.RankedRun(program, 1) for program in (lookups, start_errors, exit_codes, models_with_adapters)]
    [[found], [errors], [codes], [with_adapters]] = gloo_ranks.run_on_ranks(runs, gloo_ranks.VLLM)
    # A retry on other nodes cannot help against an error in the code, and more memory cannot either.
    assert codes == [
        *[("WorkerError", "APPLICATION")] * 3,
        ("ResourceError", "INFRASTRUCTURE"),
        *[("HostMemoryError", "INFRASTRUCTURE")] * 2,
        ("ConfigurationError", "CONFIGURATION"),
        ("WorkerError", "APPLICATION"),
        ("ResourceError", "INFRASTRUCTURE"),
        ("ConfigurationError", "CONFIGURATION"),
    ]
    assert with_adapters == [SUPPORTS_LORA, SUPPORTS_LORA, LACKS_LORA, SUPPORTS_LORA]
    assert found == [
        (0, [0, 1], [(0, 1)]),
        (1, [0, 1], [(1, 0)]),
        (3, [0, 1], [(1, 0)]),
        (3, [0, 1, 2, 3], [(3, 0)]),
        Mentions("IndexError"),
    ]
    assert errors == [
        (
            "ConfigurationError",
            Mentions("spec.roles.rollout.tensorParallel", "only 1", "MIG", "Ray", "seen: 2", "to 1"),
        ),
        ("WorkerError", Mentions("spec.training.rollout.engine", "KeyError", "RANK")),
    ]
