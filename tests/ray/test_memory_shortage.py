"""Too little memory for the rollout engine: vLLM's own error is reported with the field names of the job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.settings import worker_environment

pytestmark = pytest.mark.vllm

IMPOSSIBLE = (4096, 2**50)
"""Bytes: smaller than a block, and larger than the machine's memory."""


def errors_with_caches_of(nums_bytes: Sequence[int], _context: WorkerContext) -> list[tuple[str, str]]:
    """Class and message of the error from building an engine with each of these cache sizes."""
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
    from rljob_trainer.engines.rollout.vllm_start import VllmSettings
    from rljob_trainer.errors import TrainerError

    model = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
    found = []
    for num_bytes in nums_bytes:
        try:
            VllmEngine(VllmSettings(model, "cpu", False, torch.float32, 1, 32, 16, 0.5, num_bytes, 0))
        except TrainerError as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("nothing", "the engine was built"))
    return found


def test_an_impossible_kv_cache_names_the_fields_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)
    [[outcomes]] = gloo_ranks.run_on_ranks(
        [gloo_ranks.RankedRun(partial(errors_with_caches_of, IMPOSSIBLE), 1)], gloo_ranks.VLLM
    )
    assert isinstance(outcomes, list)
    for num_bytes, (kind, text) in zip(IMPOSSIBLE, outcomes, strict=True):
        assert kind == "HostMemoryError"
        assert text.startswith("spec.training.rollout: vLLM does not have enough memory")
        assert "change cpuKvCache (now" in text
        assert f"{num_bytes} bytes" in text
