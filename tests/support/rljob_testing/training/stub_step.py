"""A training step on fake worker groups that record their inputs: nothing is generated or trained."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.training.finished_rollouts import FinishedRollouts
from rljob_testing.training.joined_workers import FinishedCall
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.controller.balanced_order import RowCosts
from rljob_trainer.controller.rollout_phase import RewardModelWorkers, RolloutPhase
from rljob_trainer.controller.sampler import Engines, Sampler
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.controller.training_step import TrainingStep
from rljob_trainer.datasets.cursor import DrawnRow
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, Outcome, SamplingSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    KL_SUMS,
    OLD_LOGPROBS,
    OUTCOME_LIST,
    OUTCOMES,
    PROMPT_TOKEN_IDS,
    REF_LOGPROBS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RETURNS,
    SAMPLE_IDS,
    VALUES,
    score_column,
    status_column,
)
from rljob_trainer.workers.protocols import ActorGroup, CriticGroup, RewardGroup
from rljob_trainer.workers.reward import STATUSES
from rljob_trainer.workers.rollout import rollout_columns

SAMPLING = SamplingSettings(0.7, 0.9, 5, 8, ("stop",))


def drawn(prompts: Sequence[PromptRow]) -> list[DrawnRow[PromptRow]]:
    """The prompts as the first rows of a stream."""
    return [DrawnRow(ordinal, prompt) for ordinal, prompt in enumerate(prompts)]


PROMPTS = drawn([PromptRow(index, f"p{index}", f"p{index}", (index, 9), f"answer {index}", {}) for index in range(3)])


class Generator(FinishedRollouts):
    """Generates responses of two tokens; both tokens of response i of the run are i."""

    def __init__(self) -> None:
        super().__init__()
        self.cut_off = frozenset[int]()
        """Rows that are truncated."""
        self.failed = frozenset[int]()
        """Rows that the engine never completes."""
        self.raised = frozenset[int]()
        """Rows whose environment raised an exception."""
        self.requests: list[DataProto] = []

    def generate(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        assert sampling == SAMPLING
        self.requests.append(batch)
        prompts = [tuple(row.tolist()) for row in batch.ragged_column(PROMPT_TOKEN_IDS).row_tensors()]
        rows = batch[SAMPLE_IDS].tolist()
        found = rollout_columns(
            prompts,
            [finished(str(row), row, cut_off=row in self.cut_off, has_failed=row in self.failed) for row in rows],
        )
        has_raised = torch.tensor([row in self.raised for row in rows])
        return found.with_columns(
            {OUTCOMES: found[OUTCOMES].masked_fill(has_raised, OUTCOME_LIST.index(Outcome.ERROR))}
        )


@dataclass
class Rewards:
    """Gives fixed scores to the responses by their numbers, and the same again to later ones. For a status other than
    OK in place of a score, the response has no score."""

    scores: dict[str, Sequence[float | RewardStatus]]
    asked: list[DataProto] = field(default_factory=list)

    def start_scoring(self, batch: list[DataProto]) -> FinishedCall[DataProto]:
        self.asked += batch
        return FinishedCall(DataProto())

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        columns: dict[str, torch.Tensor] = {}
        ids = [sample_id for part in batch for sample_id in part[SAMPLE_IDS].tolist()]
        for name, fixed in self.scores.items():
            given = [fixed[sample_id % len(fixed)] for sample_id in ids]
            scores = [math.nan if isinstance(each, RewardStatus) else each for each in given]
            columns[score_column(name)] = torch.tensor(scores, dtype=torch.float64)
            if any(isinstance(each, RewardStatus) for each in fixed):
                statuses = [each if isinstance(each, RewardStatus) else RewardStatus.OK for each in given]
                columns[status_column(name)] = torch.tensor([STATUSES.index(each) for each in statuses])
        return DataProto(columns)

    def completed_ids(self, max_seconds: float) -> list[list[int]]:
        del max_seconds
        return [[sample_id for part in self.asked for sample_id in part[SAMPLE_IDS].tolist()]]


def zeros_of(batch: DataProto) -> RaggedColumn:
    """A zero for each response token."""
    mask = batch.ragged_column(RESPONSE_MASK)
    return RaggedColumn(torch.zeros(len(mask.values)), mask.lengths)


@dataclass
class Actor:
    """An actor without a model."""

    kl_sums: Sequence[float] | None = None
    """One number per row; None for zeros."""
    updates: list[DataProto] = field(default_factory=list)
    num_passes: int = 0

    def compute_logprobs(self, batch: DataProto) -> FinishedCall[DataProto]:
        self.num_passes += 1
        return FinishedCall(DataProto(ragged={OLD_LOGPROBS: zeros_of(batch)}))

    def compute_kl_sums(self, batch: DataProto) -> DataProto:
        return DataProto({KL_SUMS: torch.tensor(self.kl_sums or [0.0] * len(batch))})

    def compute_token_advantages(
        self, batch: DataProto | list[DataProto], kl_coefficient: float | None = None
    ) -> DataProto:
        del kl_coefficient
        assert isinstance(batch, DataProto)
        return DataProto(ragged={ADVANTAGES: zeros_of(batch), RETURNS: zeros_of(batch)})

    def skip_update(self, step: int) -> list[None]:
        del step
        return []

    def update_policy(self, batch: DataProto, step: int, kl_coefficient: float | None = None) -> FinishedCall[Metrics]:
        del step, kl_coefficient
        self.updates.append(batch)
        return FinishedCall({})


@dataclass
class Reference:
    """A reference that reports zero log-probabilities."""

    num_passes: int = 0
    columns: list[str] = field(default_factory=list)
    """Of the last pass."""

    def compute_ref_logprobs(self, batch: DataProto) -> FinishedCall[DataProto]:
        self.num_passes += 1
        self.columns = batch.column_names()
        return FinishedCall(DataProto(ragged={REF_LOGPROBS: zeros_of(batch)}))


@dataclass
class Critic:
    """A critic that predicts zeros."""

    columns: list[str] = field(default_factory=list)
    """Of the last pass."""

    def compute_values(self, batch: DataProto) -> FinishedCall[DataProto]:
        self.columns = batch.column_names()
        return FinishedCall(DataProto(ragged={VALUES: zeros_of(batch)}))

    def update_critic(self, batch: DataProto, step: int) -> FinishedCall[Metrics]:
        del batch, step
        return FinishedCall({})


class RewardModel:
    """Scores of 0 under the name `liking`."""

    def compute_scores(self, batch: DataProto) -> FinishedCall[DataProto]:
        return FinishedCall(DataProto({score_column("liking"): torch.zeros(len(batch), dtype=torch.float64)}))


def finished(request_id: str, token: int, *, cut_off: bool = False, has_failed: bool = False) -> FinishedSequence:
    """A response of twice this token."""
    reason = FinishReason.ERROR if has_failed else FinishReason.LENGTH if cut_off else FinishReason.STOP
    return FinishedSequence(request_id, (token, token), (-1.0, -1.0), (0, 0), f"text {token}", f"plain {token}", reason)


@dataclass
class Step:
    """A training step on the fakes."""

    generator: Generator
    rewards: Rewards
    actor: Actor
    step: TrainingStep


def step_of(
    wire: dict[str, object],
    weights: dict[str, float],
    scores: dict[str, Sequence[float | RewardStatus]],
    reference: Reference | None = None,
    critic: Critic | None = None,
    reward_model: RewardModel | None = None,
    *,
    critic_warmup_steps: int = 0,
    has_single_update: bool = True,
    critic_tokens: int = 100,
    reference_follows_actor: bool = True,
    group_size: int = 2,
) -> Step:
    """A step on one worker. The actor's micro-batches have 100 tokens."""
    generator, rewards, actor, timer = Generator(), Rewards(scores), Actor(), PhaseTimer(time.perf_counter)
    plan = StepPlan(
        algorithm=resolve_algorithm(Algorithm.from_wire(wire)),
        sampling=SAMPLING,
        group_size=group_size,
        has_single_update=has_single_update,
        seed=0,
        num_data_ranks=1,
        num_critic_ranks=1,
        row_costs=RowCosts(100, 0.0),
        critic_row_costs=RowCosts(critic_tokens, 0.0),
        reference_follows_actor=reference_follows_actor,
        critic_warmup_steps=critic_warmup_steps,
        rows_per_update=group_size * len(PROMPTS),
        has_dropout=False,
        sync_every_steps=1,
    )
    model = RewardModelWorkers("liking", reward_model, [RESPONSE_LENGTHS], 1) if reward_model else None
    stop = StopRequest()
    sampler = Sampler(generator, cast(RewardGroup, rewards), Engines(), stop)
    phase = RolloutPhase(sampler, weights, timer, stop, model)
    critics = cast(CriticGroup, critic) if critic else None
    step = TrainingStep(plan, phase, cast(ActorGroup, actor), reference, critics, timer)
    return Step(generator, rewards, actor, step)
