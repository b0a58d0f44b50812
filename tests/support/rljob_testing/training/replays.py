"""Training steps on fixed rollouts, on gloo ranks without Ray: the real step, actor and reference, without a rollout
engine.

Every rank plays the controller: all ranks make the same calls, each runs its own share, and all get the results that
the controller would get.

Legend: B responses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.model import Critic, Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.models.tiny_models import QUICKSTART_MODEL
from rljob_testing.training import stub_step
from rljob_testing.training.joined_workers import (
    FinishedCall,
    JoinedActor,
    JoinedCritic,
    JoinedReference,
    JoinedTrained,
)
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.checkpoints.layout import read_manifest
from rljob_trainer.checkpoints.save import begin_save, commit
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.controller.balanced_order import RowCosts
from rljob_trainer.controller.rollout import ROW_COLUMNS, Rollout, Scoring, one_row_per_response
from rljob_trainer.controller.rollout_phase import RolloutPhase
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.training_step import TrainingStep
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.model import attention_cost, read_config
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.engines.train.output_head import Head
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.weights.buckets import whole_tensors
from rljob_trainer.workers.actor import ActorSettings, ActorWorker
from rljob_trainer.workers.columns import (
    NUM_TOKENS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SCORES,
    TOKENS,
    outcome_columns,
    score_column,
)
from rljob_trainer.workers.critic import CriticSettings, CriticWorker
from rljob_trainer.workers.reference import ReferenceWorker

MODEL = QUICKSTART_MODEL
FIRST_TOKEN, END_TOKEN = 3, 13
"""Token ids of the rollouts are in range(FIRST_TOKEN, END_TOKEN)."""
LONGEST_PROMPT, LONGEST_RESPONSE = 8, 12
SEED = 5
KL_COEFFICIENT = "klCoefficient"
"""Key in the manifest of a replayed run's checkpoint."""


@dataclass(frozen=True)
class Replay:
    """A run on fixed rollouts. Batch sizes are in prompts, as in a job."""

    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    num_steps: int = 20
    batch_size: int = 4
    group_size: int = 4
    mini_batch_size: int = 4
    num_epochs_per_batch: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    compute_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    gradient_checkpointing_every_nth_layer: int = 1
    has_float32_head: bool = False
    max_tokens_per_micro_batch: int = 4096
    model: Path = MODEL
    shard_size: int | None = None
    sequence_parallel: int = 1
    lora: Lora | None = None
    offloads: bool = False
    """Turns on all offload of actor and reference."""
    defers_reduction: bool = False
    entropy_every_steps: int = 1
    critic: Critic | None = None
    """Required for an advantage that needs values."""

    @property
    def resolved(self) -> Algorithm:
        """The algorithm with all defaults of its recipe."""
        return resolve_algorithm(self.algorithm)

    def layout(self, num_ranks: int) -> ParallelLayout:
        """Layout of actor and reference on this number of ranks."""
        return ParallelLayout.of(num_ranks, self.shard_size, self.sequence_parallel)

    def engine_settings(self, num_ranks: int, *, is_trained: bool = True) -> TrainEngineSettings:
        """Engine settings of the actor, or of a frozen model."""
        return TrainEngineSettings(
            model_folder=self.model,
            device=torch.device("cpu"),
            compute_dtype=self.compute_dtype,
            gradient_checkpointing=is_trained and self.gradient_checkpointing,
            gradient_checkpointing_every_nth_layer=self.gradient_checkpointing_every_nth_layer if is_trained else 1,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            optimizer=self.optimizer if is_trained else None,
            layout=self.layout(num_ranks),
            has_float32_head=self.has_float32_head,
            adapters=AdapterSettings(self.lora, SEED) if self.lora and is_trained else None,
            offload=OffloadSettings(*[self.offloads] * (3 if is_trained else 1)),
            role="actor" if is_trained else "reference",
            offload_field="spec.training.model.offload" + ("" if is_trained else ".reference"),
            defers_reduction=is_trained and self.defers_reduction,
        )

    def actor_settings(self, num_ranks: int) -> ActorSettings:
        """Settings of the actor on this number of ranks."""
        return ActorSettings(
            engine=self.engine_settings(num_ranks),
            algorithm=self.resolved,
            optimizer=self.optimizer,
            temperature=self.temperature,
            max_new_tokens=LONGEST_RESPONSE,
            group_size=self.group_size,
            samples_all_tokens=self.top_k == 0 and self.top_p == 1,
            num_steps=self.num_steps,
            num_epochs_per_batch=self.num_epochs_per_batch,
            mini_batch_rows=self.mini_batch_size * self.group_size // self.layout(num_ranks).num_data_ranks,
            first_step=self.critic.warmup_steps if self.critic else 0,
            entropy_every_steps=self.entropy_every_steps,
        )

    def critic_settings(self, num_ranks: int) -> CriticSettings:
        """Settings of the critic on this number of ranks."""
        assert self.critic is not None
        optimizer = self.critic.optimizer
        return CriticSettings(
            engine=replace(
                self.engine_settings(num_ranks),
                head=Head.VALUE,
                role="critic",
                offload_field="spec.training.critic.model.offload",
                adapters=None,
                optimizer=optimizer,
                defers_reduction=False,
            ),
            optimizer=optimizer,
            clip_range=self.critic.value_clip_range or None,
            num_steps=self.num_steps,
            num_epochs_per_batch=self.num_epochs_per_batch,
            mini_batch_rows=self.mini_batch_size * self.group_size // self.layout(num_ranks).num_data_ranks,
        )

    def plan(self, num_ranks: int) -> StepPlan:
        """Plan of the steps on this number of ranks."""
        layout = self.layout(num_ranks)
        max_tokens = self.max_tokens_per_micro_batch * layout.num_sequence_ranks
        costs = RowCosts(max_tokens, attention_cost(read_config(self.model)))
        return StepPlan(
            algorithm=self.resolved,
            sampling=SamplingSettings(self.temperature, self.top_p, self.top_k, LONGEST_RESPONSE, ()),
            group_size=self.group_size,
            has_single_update=self.mini_batch_size == self.batch_size and self.num_epochs_per_batch == 1,
            seed=SEED,
            num_data_ranks=layout.num_data_ranks,
            num_critic_ranks=layout.num_data_ranks,
            row_costs=costs,
            critic_row_costs=costs,
            reference_follows_actor=True,
            critic_warmup_steps=self.critic.warmup_steps if self.critic else 0,
            rows_per_update=self.mini_batch_size * self.group_size,
            has_dropout=self.lora is not None and self.lora.dropout > 0,
            sync_every_steps=1,
            max_failure_rate=0.2,
        )


class ReplayedRollouts(RolloutPhase):
    """Replaces rollout engine and rewards: responses and scores depend only on the seeds."""

    def __init__(self) -> None:
        """Overrides RolloutPhase.__init__, whose arguments are not needed."""

    def begin(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        sampling: SamplingSettings,
        seeds: torch.Tensor,
        *,
        syncs: bool = True,
        environment_seeds: torch.Tensor | None = None,
        with_greedy: bool = False,
        tickets: Sequence[Ticket] = (),
        weights: Mapping[str, float] | None = None,
    ) -> Rollout:
        """Responses with scores 0 and 1, as if generated with the weights of step 0. Every other group has equal scores
        only."""
        del sampling, syncs, environment_seeds, weights
        assert not with_greedy
        generator = torch.Generator().manual_seed(int(seeds[0]))
        repeated = tuple(prompt for prompt in prompts for _ in range(num_responses))
        lengths_B = torch.randint(1, LONGEST_RESPONSE + 1, (len(repeated),), generator=generator)
        rows: dict[str, list[torch.Tensor]] = {TOKENS: [], RESPONSE_MASK: [], ROLLOUT_LOGPROBS: []}
        for prompt, length in zip(repeated, lengths_B.tolist(), strict=True):
            response = torch.randint(FIRST_TOKEN, END_TOKEN, (length,), generator=generator)
            before = torch.zeros(len(prompt.token_ids))
            rows[TOKENS].append(torch.cat([torch.tensor(prompt.token_ids), response]))
            rows[RESPONSE_MASK].append(torch.cat([before.bool(), torch.ones(length, dtype=torch.bool)]))
            rows[ROLLOUT_LOGPROBS].append(torch.cat([before, -5 * torch.rand(length, generator=generator)]))
        is_mixed_B = torch.arange(len(repeated)) // num_responses % 2 == 0
        versions = [torch.zeros(len(row), dtype=torch.int32) for row in rows[TOKENS]]
        scores_B = torch.where(is_mixed_B, torch.arange(len(repeated)) % num_responses < 2, True).double()
        batch = DataProto(
            {
                RESPONSE_LENGTHS: lengths_B,
                **outcome_columns(
                    [
                        Outcome.MAX_TOKENS if length == LONGEST_RESPONSE else Outcome.COMPLETED
                        for length in lengths_B.tolist()
                    ]
                ),
                PROMPT_LENGTHS: torch.tensor([len(prompt.token_ids) for prompt in repeated]),
                NUM_TOKENS: torch.tensor([len(row) for row in rows[TOKENS]]),
                SAMPLE_IDS: torch.arange(len(repeated)),
            },
            ragged={
                name: RaggedColumn.from_rows(column) for name, column in {**rows, POLICY_VERSIONS: versions}.items()
            },
        )
        scores = FinishedCall(DataProto({SCORES: scores_B, score_column("score"): scores_B}))
        groups_G = torch.tensor([ticket.number for ticket in tickets] or range(len(prompts)))
        batch = self.cut(batch)
        return Rollout(
            repeated,
            groups_G.repeat_interleave(num_responses),
            one_row_per_response(batch).without(ROW_COLUMNS),
            batch.only(ROW_COLUMNS),
            {"score": 1.0},
            Scoring(torch.arange(len(repeated)), torch.zeros(len(repeated), dtype=torch.bool), scores),
        )

    def cut(self, batch: DataProto) -> DataProto:
        """Returns the rows of the responses; here each response is one row."""
        return batch

    def scored(self, rollout: Rollout) -> Rollout:
        """Adds the scores that `begin` has drawn."""
        if rollout.scoring is None:
            return rollout
        assert rollout.scoring.by_model is not None
        return replace(rollout, batch=rollout.batch.union(rollout.scoring.by_model.result()), scoring=None)


@dataclass(frozen=True)
class ReplayedRun:
    """One rank of a run."""

    replay: Replay
    actor: ActorWorker
    group: JoinedActor
    reference: ReferenceWorker | None
    critic: CriticWorker | None
    groups: Sequence[JoinedTrained]
    """The groups whose state is in a checkpoint."""
    training_step: TrainingStep

    def step(self, number: int) -> dict[str, float]:
        """Runs training step `number` (from 0) and returns its metrics. Collective."""
        return self.training_step.run(stub_step.drawn(prompts_of(number, self.replay.batch_size)), number)[1]

    def steps(self, first: int, last: int) -> list[dict[str, float]]:
        """Runs the steps from `first` up to, but not including, `last`. Collective."""
        return [self.step(number) for number in range(first, last)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole trained tensors. Collective."""
        engine = self.actor.engine
        return whole_copies(engine.named_adapters() if self.replay.lora else engine.named_shards())

    def state(self) -> dict[str, torch.Tensor]:
        """Whole trained tensors and optimizer state. Collective."""
        moments = {
            f"optimizer.{name}": each for name, each in whole_copies(self.actor.engine.named_optimizer_state()).items()
        }
        return {**self.weights(), **moments}

    def save(self, root: Path, step: int) -> Location:
        """Saves a checkpoint after `step` steps and returns its folder. Collective."""
        folders = [begin_save(root, step, start_number=1) if self.actor.context.rank == 0 else None]
        dist.broadcast_object_list(folders)
        [folder] = folders
        assert folder is not None
        first_writer, records = 0, []
        for group in self.groups:
            group.begin_checkpoint(folder, first_writer)
            records += group.finish_checkpoint()
            first_writer = len(records)
        if self.actor.context.rank == 0:
            commit(root, folder, step, 1, records, {KL_COEFFICIENT: self.training_step.kl_coefficient.state()})
        dist.barrier()
        return folder

    def load(self, folder: Location, step: int) -> None:
        """Loads a checkpoint that was saved after `step` steps. Collective."""
        for group in self.groups:
            group.load_checkpoint(folder, step)
        kept = read_manifest(folder)[0].extra[KL_COEFFICIENT]
        assert kept is None or isinstance(kept, float)
        self.training_step.kl_coefficient.restore(kept)


def replayed_run(
    replay: Replay,
    context: WorkerContext,
    cursor: PromptCursor[PromptRow] | None = None,
    rollout: RolloutPhase | None = None,
) -> ReplayedRun:
    """Creates a run before its first step. Collective.

    `cursor`: the prompts for dynamic sampling. `rollout`: replaces `ReplayedRollouts`.
    """
    actor = ActorWorker(context, replay.actor_settings(context.world_size))
    group = JoinedActor(actor)
    reference = None
    if replay.algorithm.kl.coefficient:
        frozen = replay.engine_settings(context.world_size, is_trained=False)
        engine = actor.engine if replay.lora else TrainEngine(frozen)
        reference = ReferenceWorker(context, engine, replay.temperature)
    critic = CriticWorker(context, replay.critic_settings(context.world_size)) if replay.critic else None
    critics = JoinedCritic(critic) if critic else None
    training_step = TrainingStep(
        replay.plan(context.world_size),
        rollout or ReplayedRollouts(),
        group,
        JoinedReference(reference) if reference else None,
        critics,
        PhaseTimer(time.perf_counter),
        cursor,
    )
    return ReplayedRun(replay, actor, group, reference, critic, [group, critics] if critics else [group], training_step)


def prompts_of(step: int, num_prompts: int) -> list[PromptRow]:
    """The prompts of a step; their lengths differ."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = []
    for index in range(num_prompts):
        length = int(torch.randint(3, LONGEST_PROMPT + 1, (), generator=generator))
        tokens = torch.randint(FIRST_TOKEN, END_TOKEN, (length,), generator=generator).tolist()
        found.append(PromptRow(index, "", "", tuple(tokens), None, {}))
    return found


def whole_copies(named_shards: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of whole tensors, in float32. Collective."""
    return {name: tensor.clone() for name, tensor in whole_tensors(named_shards, torch.float32)}
