"""Training steps that generate their responses, with transformers, in the process of the training (see `replays`)."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from rljob_testing.models import tiny_models
from rljob_testing.training import replays
from rljob_testing.training.joined_workers import FinishedCall, JoinedHybrid, JoinedRewardModel
from rljob_testing.training.sleeping_engine import SleepingHfEngine, SmallDevice
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller import rollout_phase
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import RewardModelWorkers, RolloutPhase
from rljob_trainer.controller.sampler import Engines, Sampler
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.engines.train.output_head import Head
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import RESPONSE_TEXTS, SAMPLE_IDS, score_column
from rljob_trainer.workers.factories import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD_MODEL,
    ROLLOUT,
    make_hybrid,
    train_engines,
)
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.reward_model import TOKEN_COLUMNS, RewardModelSettings, RewardModelWorker
from rljob_trainer.workers.rollout import RolloutWorker

MAX_SEQUENCES = 32


@dataclass(frozen=True)
class HybridRun:
    """One rank of a run whose responses are generated."""

    run: replays.ReplayedRun
    hybrid: HybridWorker
    cursor: PromptCursor[PromptRow]

    @property
    def sleeping(self) -> SleepingHfEngine:
        """The rollout engine of a run with a level of sleep."""
        engine = self.hybrid.rollout.engine
        assert isinstance(engine, SleepingHfEngine)
        return engine

    def step(self, number: int) -> dict[str, float]:
        """Runs training step `number` (from 0) and returns its metrics. Collective."""
        prompts = self.cursor.next_batch(self.run.replay.batch_size)
        with _without_object_store():
            return self.run.training_step.run(prompts, number)[1]

    def steps(self, first: int, last: int) -> list[dict[str, float]]:
        """Runs the steps from `first` up to, but not including, `last`. Collective."""
        return [self.step(number) for number in range(first, last)]

    def generated(
        self, prompts: Sequence[PromptRow], sampling: SamplingSettings, seeds_B: torch.Tensor, *, syncs: bool
    ) -> Rollout:
        """Generates a response to each prompt. Collective."""
        with _without_object_store():
            return self.run.training_step.rollout.begin(prompts, 1, sampling, seeds_B, syncs=syncs)


class TextRewards:
    """Scores 0 and 1 that depend only on the text of the response."""

    def __init__(self) -> None:
        self.scores: dict[int, bool] = {}
        """By SAMPLE_IDS."""

    def start_scoring(self, batch: list[DataProto]) -> FinishedCall[DataProto]:
        """See RewardGroup."""
        rows = DataProto.concat(batch)
        texts = rows.object_column(RESPONSE_TEXTS)
        for sample_id, text in zip(rows[SAMPLE_IDS].tolist(), texts, strict=True):
            self.scores[sample_id] = zlib.crc32(str(text).encode()) % 3 == 0
        return FinishedCall(rows.only([SAMPLE_IDS]))

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        """See RewardGroup."""
        scores = [self.scores.pop(sample_id) for part in batch for sample_id in part[SAMPLE_IDS].tolist()]
        return DataProto({score_column("score"): torch.tensor(scores, dtype=torch.float64)})

    def completed_ids(self, max_seconds: float) -> list[list[int]]:
        """See RewardGroup."""
        assert 0 <= max_seconds < 1
        return [list(self.scores)]

    def take_metrics(self) -> Metrics:
        return {}

    def drop_scores(self) -> list[None]:
        """See RewardGroup."""
        self.scores.clear()
        return [None]

    def response_texts(self, batch: DataProto) -> DataProto:
        """See RewardGroup."""
        return batch


def random_reward_model(folder: Path, context: WorkerContext) -> RewardModelWorker:
    """An offloaded reward model that reads tokens; `folder` gets its files. Its scores have no weight in a run."""
    torch.manual_seed(0)
    config = Qwen3Config(**tiny_models.CLASSIFIER_SIZES, num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    engine = TrainEngineSettings(
        folder,
        context.device,
        torch.float32,
        False,
        4096,
        None,
        head=Head.SCORE,
        offload=OffloadSettings(parameters=True),
    )
    return RewardModelWorker(
        context, RewardModelSettings(engine, "preference", "spec.training.rewards[1].rewardModel.", True, None)
    )


def hybrid_run(
    replay: replays.Replay,
    context: WorkerContext,
    level: int | None,
    reward_model: RewardModelWorker | None = None,
) -> HybridRun:
    """Creates a run before its first step. `level`: how deep the generator sleeps; None: it never sleeps. A generator
    that sleeps is on a small device, and everything must be offloaded in the run. Collective."""
    cursor = PromptCursor(replays.prompts_of(0, 64), seed=0, shuffle=False, digest="any")
    run = replays.replayed_run(replay, context, cursor)
    settings = HfSettings(replay.model, context.device, replay.compute_dtype, MAX_SEQUENCES)
    of_roles = {ACTOR: run.actor, REFERENCE: run.reference, CRITIC: run.critic, REWARD_MODEL: reward_model}
    workers = {role: each for role, each in of_roles.items() if each is not None}
    device: SmallDevice | None = None
    engine: HfEngine
    if level is None:
        engine = HfEngine(settings)
    else:
        trainers = {id(each): each for each in train_engines(workers)}
        copy_bytes = sum(each.numel() * each.itemsize for each in run.actor.engine.model.parameters())
        device = SmallDevice(list(trainers.values()), copy_bytes)
        engine = SleepingHfEngine(settings, level, device)
    rollout = RolloutWorker(context, lambda: engine, 1)
    hybrid = make_hybrid(replay.compute_dtype, replays.SEED, context, {**workers, ROLLOUT: rollout})
    assert isinstance(hybrid, HybridWorker)
    if device is not None:
        hybrid.device_memory = device
    timer = PhaseTimer(time.perf_counter)
    scorers = None
    if reward_model is not None:
        scorers = RewardModelWorkers("score", JoinedRewardModel(reward_model), TOKEN_COLUMNS, context.world_size)
    stop = StopRequest()
    sampler = Sampler(JoinedHybrid(hybrid), TextRewards(), Engines(context.world_size), stop)
    phase = RolloutPhase(sampler, {"score": 1.0}, timer, stop, scorers)
    run.training_step.rollout = phase
    return HybridRun(run, hybrid, cursor)


@contextmanager
def _without_object_store() -> Iterator[None]:
    """Object stores need Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_phase, "stored", lambda batch: batch)
        yield
