"""Rollout engines and scoring processes in simulated time: by default one decoding step per poll."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rljob_testing.training.joined_workers import FinishedCall
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.controller.sampler import PLAIN_SCORING, REWARD_COLUMNS, Engines, Sampler, ScoringSettings
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, SamplingSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.workers.columns import (
    PROMPT_TEXTS,
    PROMPT_TOKEN_IDS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    SCORED_GROUPS,
    score_column,
)
from rljob_trainer.workers.rollout import rollout_columns

SAMPLING = SamplingSettings(1.0, 1.0, 0, 8, ())
ONE_ENGINE = Engines()


@dataclass
class SimulatedEngine:
    """Generates the oldest `num_slots` responses at the same time; response i takes `lengths[i]` steps."""

    lengths: Sequence[int]
    num_slots: int
    remaining: dict[int, int] = field(default_factory=dict)
    """Steps that each response still needs, in the order of the requests."""

    def advance(self) -> list[int]:
        """Returns the responses that finish in this step."""
        running = list(self.remaining)[: self.num_slots]
        for sample_id in running:
            self.remaining[sample_id] -= 1
        finished = [sample_id for sample_id in running if not self.remaining[sample_id]]
        for sample_id in finished:
            del self.remaining[sample_id]
        return finished


@dataclass
class SimulatedRollouts:
    """HybridGroup and RewardGroup in one. The score of a response is ten times its number."""

    lengths: Sequence[int]
    engines: Engines = ONE_ENGINE
    polls_until_scored: int = 0
    steps_per_poll: int = 1
    stop: StopRequest = field(default_factory=StopRequest)
    scoring: ScoringSettings = PLAIN_SCORING
    num_polls: int = 0
    submitted: list[list[list[int]]] = field(default_factory=list)
    """For each call of `submit`, the responses of each engine."""
    scored_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Response -> (the poll after which its scoring began, its rank)."""
    scored_pairs: list[tuple[str, str]] = field(default_factory=list)
    """Prompt and response of each scoring."""
    scored_groups: list[list[int]] = field(default_factory=list)
    """The groups of the responses of each rank in each call of `start_scoring`, if a reward sees groups."""
    num_aborts: int = 0
    num_rows: Sequence[int] = (1,)
    """Rows of the responses 0, 1, ..., and the same again for later ones."""
    failures: Counter[int] = field(default_factory=Counter)
    """For each response how often the engine fails to complete it."""

    def __post_init__(self) -> None:
        slots = self.engines.max_num_sequences
        self.simulated = [SimulatedEngine(self.lengths, slots) for _ in range(self.engines.num_engines)]
        self.seeds: dict[int, int] = {}
        """Of the requested responses."""
        self.sampler = Sampler(self, self, self.engines, self.stop, self.scoring)

    def begin_rollout(self, syncs: bool) -> list[None]:
        assert syncs
        return [None]

    def submit(self, batch: list[DataProto], sampling: SamplingSettings) -> DataProto:
        assert sampling == SAMPLING
        self.submitted.append([part[SAMPLE_IDS].tolist() for part in batch])
        for engine, part in zip(self.simulated, batch, strict=True):
            self.seeds |= dict(zip(part[SAMPLE_IDS].tolist(), part[SAMPLE_SEEDS].tolist(), strict=True))
            engine.remaining |= {sample_id: self.lengths[sample_id] for sample_id in part[SAMPLE_IDS].tolist()}
        return DataProto.concat(batch)

    def take(self, max_seconds: float) -> DataProto:
        assert max_seconds > 0
        self.num_polls += 1
        steps = range(self.steps_per_poll)
        ids = [sample_id for engine in self.simulated for _ in steps for sample_id in engine.advance()]
        responses = [response_of(each, self.seeds[each], has_failed=self.failures[each] > 0) for each in ids]
        self.failures.subtract(ids)
        batch = rollout_columns([(1,)] * len(ids), responses).with_columns(
            {SAMPLE_IDS: torch.tensor(ids, dtype=torch.int64)}
        )
        rows = [row for row, each in enumerate(ids) for _ in range(self.num_rows[each % len(self.num_rows)])]
        texts = [text for each in ids for text in self.texts_of(each)]
        return batch.rows(rows).with_columns(objects={RESPONSE_TEXTS: texts})

    def texts_of(self, sample_id: int) -> list[str]:
        """The texts of the rows of a response; the last one is that of the response."""
        earlier = self.num_rows[sample_id % len(self.num_rows)] - 1
        return [*(f"row {row}" for row in range(earlier)), f"text {self.seeds[sample_id]}"]

    def abort(self) -> list[None]:
        self.num_aborts += 1
        for engine in self.simulated:
            engine.remaining.clear()
        return [None]

    def start_scoring(self, batch: list[DataProto]) -> FinishedCall[DataProto]:
        assert len(batch) == self.engines.num_ranks
        self.scored_groups += [part[SCORED_GROUPS].tolist() for part in batch if SCORED_GROUPS in part and len(part)]
        for rank, part in enumerate(batch):
            for sample_id, text, prompt in zip(
                part[SAMPLE_IDS].tolist(), *map(part.object_column, (RESPONSE_TEXTS, PROMPT_TEXTS)), strict=True
            ):
                self.scored_pairs.append((str(prompt), str(text)))
                self.scored_at[sample_id] = (self.num_polls, rank)
        return FinishedCall(DataProto())

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        for rank, part in enumerate(batch):
            assert {self.scored_at[sample_id][1] for sample_id in part[SAMPLE_IDS].tolist()} <= {rank}
        return DataProto({score_column("score"): 10.0 * torch.cat([part[SAMPLE_IDS] for part in batch])})

    def completed_ids(self, max_seconds: float) -> list[list[int]]:
        del max_seconds
        return [[each for each, (at, _) in self.scored_at.items() if at + self.polls_until_scored <= self.num_polls]]

    def drop_scores(self) -> list[None]:
        return [None]

    def response_texts(self, batch: DataProto) -> DataProto:
        return batch

    def take_metrics(self) -> Metrics:
        return {}

    def take_memory(self) -> Metrics:
        return {}

    def record_tokens(self, path: Path, step: int, version: int, rows: DataProto, updated: DataProto) -> str | None:
        del step, version, rows, updated
        raise AssertionError(f"{path}: nothing records tokens here")

    def submit_all(self, first: int = 0, group_size: int = 1) -> torch.Tensor:
        """Requests all responses from number `first` on. `group_size`: consecutive responses of a group."""
        ids = torch.arange(first, len(self.lengths))
        columns = {name: tuple(f"prompt {each}" for each in ids.tolist()) for name in REWARD_COLUMNS}
        self.sampler.prepare(SAMPLING, syncs=True)
        prompts = RaggedColumn.from_rows([[1]] * len(ids), torch.int64)
        inputs = DataProto({SAMPLE_SEEDS: ids}, columns, ragged={PROMPT_TOKEN_IDS: prompts})
        return self.sampler.submit(inputs, groups_S=(ids - first) // group_size)


def response_of(sample_id: int, seed: int, *, has_failed: bool = False) -> FinishedSequence:
    """A response of two tokens; all of it follows from the seed."""
    reason = FinishReason.ERROR if has_failed else FinishReason.STOP
    return FinishedSequence(
        str(sample_id),
        (seed, seed + 1),
        (-0.1, -1e-7 * seed),
        (3, 4),
        f"text {seed}",
        f"plain {seed}",
        reason,
    )
