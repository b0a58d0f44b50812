"""vLLM generates with the trained weights, although it loses them or its KV cache when it sleeps, as on a GPU: the
checks of `gpu.engine_checks`, on CPUs.

Runs in processes of its own, without Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext

pytestmark = [pytest.mark.vllm]

WITHOUT = "without a hand-over"
BOTH_LEVELS = (1, 1, 2, 2)
VERSIONS = {f"version {version}" for version in range(len(BOTH_LEVELS))}


def dense(case: DeviceContext) -> None:
    """Also the memory timeline, and weights that level 2 has lost."""
    from rljob_testing.gpu import engine_checks
    from rljob_testing.gpu.engine_process import loaded
    from rljob_testing.gpu.engine_program import CHECKS
    from rljob_testing.models import small_vllm

    hybrid = engine_checks.vllm_hybrid(case, "qwen3 tied", 1)
    engine_checks.check_versions(case, hybrid, BOTH_LEVELS)
    engine_checks.check_memory(case, hybrid)
    hybrid.worker.trainer_mode()
    hybrid.vllm.wake(weights=True, kv_cache=True)
    case.note(WITHOUT, hybrid.difference(small_vllm.generated(hybrid.vllm, 2)))
    # Here, because vLLM is loaded.
    assert all(callable(loaded(check.function)) for check in CHECKS)


def experts(case: DeviceContext) -> None:
    """All ranks share a copy of the model."""
    from rljob_testing.gpu import engine_checks

    hybrid = engine_checks.vllm_hybrid(case, "qwen3_moe", 1)
    engine_checks.check_versions(case, hybrid, (1, 2))
    engine_checks.check_whole_experts(hybrid)


def adapters(case: DeviceContext) -> None:
    """Beside kept base weights."""
    from rljob_testing.gpu import engine_checks

    hybrid = engine_checks.vllm_hybrid(case, "qwen3", 1, engine_checks.LORA)
    engine_checks.check_versions(case, hybrid, (1, 1))


CHECKS_HERE = {"dense": dense, "experts": experts, "adapters": adapters}


def notes_of(folder: Path, name: str, context: WorkerContext) -> Mapping[str, float]:
    case = DeviceContext(context, folder)
    CHECKS_HERE[name](case)
    return case.notes


def measured(folder: Path, name: str, num_ranks: int = 1) -> Mapping[str, float]:
    [[found, *_]] = gloo_ranks.run_on_ranks(
        [gloo_ranks.RankedRun(partial(notes_of, folder, name), num_ranks)], gloo_ranks.VLLM
    )
    assert isinstance(found, Mapping)
    return found


def test_every_version_of_the_weights_generates_at_both_levels(tmp_path: Path) -> None:
    found = measured(tmp_path, "dense")
    assert {*VERSIONS, "again", "asleep, MiB in use"} < found.keys()
    # Level 2 has really lost the weights.
    assert math.isnan(found[WITHOUT])


def test_every_version_of_the_experts_generates_on_two_ranks(tmp_path: Path) -> None:
    assert {"version 0", "version 1", "again"} < measured(tmp_path, "experts", 2).keys()


def test_every_version_of_the_adapters_generates_beside_a_kept_base(tmp_path: Path) -> None:
    assert {"version 0", "version 1", "again"} < measured(tmp_path, "adapters").keys()
