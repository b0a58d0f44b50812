"""With `headDtype: Float32`, vLLM's logits have 32 bits in a job in BFloat16, and follow from the newest weights. Runs
in a process of its own, without Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates, gloo_ranks, training_runs
from rljob_trainer.controller.model_roles import Models, model_roles
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.models.source import controller_model
from rljob_trainer.workers.factories import ROLLOUT

pytestmark = [pytest.mark.vllm]

NUM_VERSIONS = 2
LONGEST_PROMPT = 16


def errors_of_logits(folder: Path, context: WorkerContext) -> list[float]:
    """The error of vLLM's logits for each version of the weights. The engine's settings are those of a job."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
    from rljob_trainer.weights.sync import sync_weights
    from rljob_trainer.workers.rollout import RolloutWorker

    document = training_runs.small_job(
        model={"source": str(folder), "dtype": "BFloat16", "headDtype": "Float32"},
        rollout={"engine": "VLLM", "compile": "Never", "groupSize": 4, "maxNewTokens": 8, "cpuKvCache": "16Mi"},
    )
    job = TrainerJob(name="small", spec=RLJob.from_wire(document).spec)
    _, model = controller_model(job.spec.training.model, folder, folder)
    [make] = [role.factory for role in model_roles(job, Models(model), LONGEST_PROMPT) if role.name == ROLLOUT]
    assert make is not None
    rollout = make(context, {})
    assert isinstance(rollout, RolloutWorker)
    assert isinstance(rollout.engine, VllmEngine)
    trained = TrainEngine(engine_updates.engine_settings(folder, context.device, torch.bfloat16))
    found = []
    for version in range(NUM_VERSIONS):
        sync_weights(trained, rollout.engine, torch.bfloat16, version)
        found.append(small_vllm.error_of_logits(rollout.engine, trained))
        engine_updates.update(trained, engine_updates.random_batch())
        trained.optimizer_step(1e-2)
    return found


def test_logits_are_not_rounded_and_follow_from_the_newest_weights(tmp_path: Path) -> None:
    """On CPUs, vLLM packs a head that shares its weight with the embedding."""
    folder = tiny_models.save("qwen3 tied", tmp_path)
    tiny_models.copy_tokenizer(folder)
    [[found]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(errors_of_logits, folder), 1)], gloo_ranks.VLLM)
    assert isinstance(found, list)
    assert len(found) == NUM_VERSIONS
    assert max(found) < 1e-5
