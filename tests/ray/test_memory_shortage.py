"""Too little memory for the rollout engine: vLLM's own refusal, in the words of the job."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from rljob_testing.ranks import RankedRun, run_on_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.settings import worker_environment

pytestmark = pytest.mark.vllm


def error_with_cache_of(num_bytes: int, _context: WorkerContext) -> tuple[str, str]:
    """Class and text of what building the engine raises."""
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine, VllmSettings
    from rljob_trainer.errors import TrainerError

    model = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
    try:
        VllmEngine(VllmSettings(model, "cpu", False, torch.float32, 1, 32, 16, 0.5, num_bytes, 0))
    except TrainerError as error:
        return type(error).__name__, str(error)
    return "nothing", "the engine was built"


@pytest.mark.parametrize("num_bytes", [4096, 2**50], ids=["smaller than one block", "larger than the machine"])
def test_an_impossible_kv_cache_names_the_fields_to_change(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    for name, value in worker_environment("cpu", 1).items():
        monkeypatch.setenv(name, value)
    [[outcome]] = run_on_ranks([RankedRun(partial(error_with_cache_of, num_bytes), 1)])
    assert isinstance(outcome, tuple)
    kind, text = outcome
    assert kind == "ResourceError"
    assert text.startswith("spec.training.rollout: vLLM found too little memory")
    assert "change cpuKvCache on CPUs" in text
    assert f"{num_bytes} bytes" in text
