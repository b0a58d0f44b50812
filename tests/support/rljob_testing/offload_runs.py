"""Steps with everything offloaded beside the same steps without, on one rank, and what is in memory meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm, Kl, KlPlacement
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.live_storages import num_live_bytes
from rljob_testing.replayed_steps import LONGEST_PROMPT, LONGEST_RESPONSE, MODEL, Replay, ReplayedRun, replayed_run
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train import host_room
from rljob_trainer.errors import ResourceError
from rljob_trainer.observability.memory import MEBIBYTE, MEMORY
from rljob_trainer.observability.spans import SPANS, Counts
from rljob_trainer.observability.timeline import MEMORY_TRACK
from rljob_trainer.workers.columns import PROMPT_TOKEN_IDS, SAMPLE_SEEDS
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

REPLAY = Replay(
    Algorithm(kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS)),
    Optimizer(learning_rate=3e-4),
    mini_batch_size=2,
    # Several micro-batches of a row or two in each of two updates.
    max_tokens_per_micro_batch=2 * (LONGEST_PROMPT + LONGEST_RESPONSE),
)
NUM_STEPS, SAVED_STEP = 4, 2
SAMPLING = SamplingSettings(1.0, 1.0, 0, 6, ())

Marks = list[tuple[str, Mapping[str, int]]]
"""(boundary, bytes by owner), in order."""


@dataclass(frozen=True)
class OffloadRun:
    """What one rank has seen."""

    is_equal: bool
    """The state after NUM_STEPS steps, to the last bit: with everything offloaded and without; ..."""
    is_resumed_equal: bool
    """... and of a run with offload that went on from the checkpoint of one without, and of the converse."""
    step: Marks
    """A rollout and a training step with everything offloaded, not the first; ..."""
    plain_step: Marks
    """... and with nothing."""
    metrics: dict[str, float]
    """Of the former."""
    num_parameter_bytes: int
    """Of this rank's shards."""
    live_bytes: list[int]
    """Of the whole process, after each of three steps with rollouts."""
    refusals: dict[str, str]
    deferred_peak: int
    """Bytes of all owners in the first step's passes: gradients reduced once per update; ..."""
    plain_peak: int
    """... or with every micro-batch."""


def everything(root: Path, context: WorkerContext) -> OffloadRun:
    """On one or two ranks; `root` is a folder of this number of ranks."""
    deferred_peak, plain_peak = (
        peak_of_passes(replace(REPLAY, defers_reduction=each), context) for each in (True, False)
    )
    plain = replayed_run(REPLAY, context)
    away = replayed_run(replace(REPLAY, offloads=True), context)
    for each in (plain, away):
        each.steps(0, SAVED_STEP)
    saved = {name: run.save(root / name, SAVED_STEP) for name, run in (("plain", plain), ("away", away))}
    for each in (plain, away):
        each.steps(SAVED_STEP, NUM_STEPS)
    resumed = {}
    for name, offloads in (("plain", True), ("away", False)):
        resumed[name] = replayed_run(replace(REPLAY, offloads=offloads), context)
        resumed[name].group.load_checkpoint(saved[name], SAVED_STEP)
        resumed[name].steps(SAVED_STEP, NUM_STEPS)
    expected = plain.state()
    is_resumed_equal = all(are_equal(run.state(), expected) for run in resumed.values())
    num_parameter_bytes = plain.actor.engine.memory.parameters
    is_equal = are_equal(away.state(), expected)
    del plain, away, resumed, each
    live_bytes: list[int] = []
    step = steps_with_rollouts(replayed_run(replace(REPLAY, offloads=True), context), live_bytes)
    metrics = MEMORY.take_metrics()
    plain_step = steps_with_rollouts(replayed_run(REPLAY, context), [])
    return OffloadRun(
        is_equal,
        is_resumed_equal,
        step,
        plain_step,
        metrics,
        num_parameter_bytes,
        live_bytes,
        refusals(context),
        deferred_peak,
        plain_peak,
    )


def steps_with_rollouts(run: ReplayedRun, live_bytes: list[int]) -> Marks:
    """Three rollouts and training steps of a hybrid worker; what the last one noted."""
    context = run.actor.context
    settings = HfSettings(MODEL, context.device, torch.float32, 16)
    rollout = RolloutWorker(context, lambda: HfEngine(settings), 1)
    hybrid = HybridWorker(context, run.actor, rollout, torch.float32)
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * 4)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(4)}, ragged={PROMPT_TOKEN_IDS: prompts})
    for number in range(3):
        SPANS.take()
        MEMORY.take_metrics()
        hybrid.generate_sequences(batch, SAMPLING)
        run.step(number)
        live_bytes.append(num_live_bytes())
    return [
        (each.after, {owner: round(mebibytes * MEBIBYTE) for owner, mebibytes in each.values.items()})
        for each in SPANS.take()
        if isinstance(each, Counts) and each.track == MEMORY_TRACK
    ]


def peak_of_passes(replay: Replay, context: WorkerContext) -> int:
    """Of a run's first step."""
    run = replayed_run(replay, context)
    gc.collect()
    MEMORY.take_metrics()
    run.step(0)
    return int(MEMORY.take_metrics()["memory/during_forward_backward_bytes_max"])


def refusals(context: WorkerContext) -> dict[str, str]:
    """What is said where a machine has 1 MiB left: by an engine that offloads, and by a hybrid worker."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "available_host_bytes", lambda: MEBIBYTE)
        with pytest.raises(ResourceError) as caught:
            replayed_run(replace(REPLAY, offloads=True), context)
        found["offload"] = str(caught.value)
        run = replayed_run(replace(REPLAY, algorithm=Algorithm()), context)
        patch.setattr(host_room, "available_host_bytes", lambda: MEBIBYTE // 2)
        with pytest.raises(ResourceError) as caught:
            steps_with_rollouts(run, [])
        found["moments"] = str(caught.value)
    return found


def are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """To the last bit."""
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())
