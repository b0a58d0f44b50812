"""Workers get the settings that a job names: the same as those with which the other tests here replay its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.kl import Kl
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.training import replays, training_runs
from rljob_trainer.controller.model_roles import Models, model_roles, step_plan
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout import hf_engine
from rljob_trainer.models.source import controller_model
from rljob_trainer.workers import factories

TEMPERATURE = 0.7
MODEL: dict[str, JsonValue] = {
    "dtype": "BFloat16",
    "gradientCheckpointing": "Always",
    "gradientCheckpointingEveryNthLayer": 2,
    "headDtype": "Float32",
}


def build_settings_only(patch: pytest.MonkeyPatch) -> None:
    """More workers than there are processes here: their settings, except for folder and device."""
    patch.setattr(factories, "ActorWorker", lambda _, settings: settings)
    patch.setattr(factories, "TrainEngine", lambda settings: settings)
    patch.setattr(factories, "ReferenceWorker", lambda _, *settings: settings)
    patch.setattr(factories, "RolloutWorker", lambda _, make_engine, *__: make_engine())
    patch.setattr(hf_engine, "HfEngine", lambda settings: settings)


@pytest.mark.parametrize(("num_workers", "top_p", "top_k"), [(1, 1.0, 0), (1, 0.9, 0), (2, 1.0, 5)])
def test_workers_get_the_settings_of_the_job(
    num_workers: int,
    top_p: float,
    top_k: int,
    context: WorkerContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The settings of a replayed run, as derived from a job."""
    replay = replays.Replay(
        Algorithm(kl=Kl(coefficient=0.1)),
        Optimizer(learning_rate=2e-4, warmup_steps=3),
        num_steps=7,
        mini_batch_size=2,
        num_epochs_per_batch=3,
        temperature=TEMPERATURE,
        top_p=top_p,
        top_k=top_k,
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=True,
        gradient_checkpointing_every_nth_layer=2,
        has_float32_head=True,
        max_tokens_per_micro_batch=500,
        shard_size=1,
        sequence_parallel=num_workers,
        entropy_every_steps=3,
    )
    layout: JsonValue = {"shardSize": 1, "sequenceParallel": num_workers}
    document = training_runs.small_job(
        num_workers=num_workers,
        roles={"actor": layout, "ref": layout},
        model=MODEL,
        algorithm={"kl": {"coefficient": 0.1}},
        optimizer={"learningRate": 2e-4, "warmupSteps": 3},
        rollout={"temperature": TEMPERATURE, "topP": top_p, "topK": top_k, "groupSize": 4, "maxNewTokens": 12},
        steps=7,
        batchSize=4,
        miniBatchSize=2,
        numEpochsPerBatch=3,
        maxTokensPerMicroBatch=500,
        seed=replays.SEED,
        entropyEverySteps=3,
    )
    job = TrainerJob(name="small", spec=RLJob.from_wire(document).spec)
    _, model = controller_model(job.spec.training.model, tmp_path, tmp_path)
    build_settings_only(monkeypatch)
    actor, reference, rollout = (
        role.factory(context, {})
        for role in model_roles(job, Models(model), replays.LONGEST_PROMPT)[:3]
        if role.factory
    )
    assert actor == replay.actor_settings(num_workers)
    assert reference == (replay.engine_settings(num_workers, is_trained=False), TEMPERATURE)
    assert rollout == hf_engine.HfSettings(
        replays.MODEL, context.device, torch.bfloat16, job.spec.training.rollout.max_num_sequences, True
    )
    assert step_plan(job, replays.MODEL) == replay.plan(num_workers)


@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_micro_batches_are_planned_for_the_layout_of_each_role(sequence_parallel: int) -> None:
    document = training_runs.small_job(
        num_workers=4,
        roles={each: {"sequenceParallel": sequence_parallel} for each in ("critic", "ref")},
        algorithm={"kl": {"coefficient": 0.1}, "advantage": {"type": "GAE"}},
        maxTokensPerMicroBatch=500,
    )
    plan = step_plan(TrainerJob(name="small", spec=RLJob.from_wire(document).spec), replays.MODEL)
    assert (plan.num_data_ranks, plan.row_costs.max_tokens) == (4, 500)
    assert (plan.num_critic_ranks, plan.critic_row_costs.max_tokens) == (
        4 // sequence_parallel,
        500 * sequence_parallel,
    )
    assert plan.critic_follows_actor == plan.reference_follows_actor == (sequence_parallel == 1)
