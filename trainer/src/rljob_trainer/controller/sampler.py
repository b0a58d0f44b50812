"""The responses in flight: requests are distributed over the rollout engines, and each finished response is scored
while others are still being generated.

    submit -> engines -> poll: finished responses -> scoring processes -> rows and scores, by the ids of the responses

The controller polls. In each poll every engine returns the responses that have finished since the last poll, and their
scoring starts in the process that has them.

A response is *in flight* from `submit` until its engine has returned it; it may still wait for an engine. It is
*collected* when `take_rows` or `finish_scoring` has returned its row or its score.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    ENVIRONMENT_RESULTS,
    ENVIRONMENT_SEEDS,
    IS_GREEDY,
    IS_LOST,
    MESSAGES,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    SCORED_BY,
    SCORED_GROUPS,
    TURN_BEGINNINGS,
)
from rljob_trainer.workers.protocols import HybridGroup, PendingResult, RewardGroup

log = logging.getLogger(__name__)

TAKE_SECONDS = 0.25
"""Longest duration of a poll: a finished response waits at most about this long until its scoring starts."""
REQUEST_COLUMNS = (PROMPT_TOKEN_IDS, SAMPLE_SEEDS, SAMPLE_IDS, IS_GREEDY)
ENVIRONMENT_REQUEST_COLUMNS = (PROMPT_MESSAGES, DATASET_ROWS, ENVIRONMENT_SEEDS, SAMPLE_SEEDS, SAMPLE_IDS, IS_GREEDY)
"""The same in a job with an environment, which makes the prompts."""
RESPONSE_COLUMNS = (SAMPLE_IDS, IS_LOST, RESPONSE_TEXTS, RESPONSE_LENGTHS, ENVIRONMENT_RESULTS, MESSAGES)
"""Columns of finished responses that reward functions need; the last two only in a job with an environment."""
REWARD_COLUMNS = (PROMPT_TEXTS, TURN_BEGINNINGS, ANSWERS, DATASET_ROWS, SCORED_BY)
"""Prompt columns that rewards need; SCORED_BY is optional. With an environment the first two come with the response."""


@dataclass(frozen=True)
class Ticket:
    """Identifies a group of training responses: the prompt follows from `ordinal`, and the seeds from `issue_step` and
    `number`. Example: `Ticket(ordinal=130, issue_step=2, number=2)` is the third group of the third step."""

    ordinal: int
    """The number of the prompt in the endless stream of the dataset; see `DrawnRow`."""
    issue_step: int
    """The step in which the group was requested, from 0."""
    number: int
    """The number of the group in that step, from 0."""


@dataclass(frozen=True)
class Engines:
    """The rollout engines of the worker processes. Each engine is in `ranks_per_engine` consecutive ranks, which share
    the model; every rank has scoring processes."""

    num_engines: int = 1
    ranks_per_engine: int = 1
    max_num_sequences: int = 256
    """Responses that an engine generates at the same time."""
    is_load_balanced: bool = False
    """False: each engine gets an equal number of consecutive responses at once. True: each engine gets at most about
    `max_num_sequences` responses, and further ones after each poll; see `Sampler._distribute_waiting`."""

    @property
    def num_ranks(self) -> int:
        """The number of worker processes."""
        return self.num_engines * self.ranks_per_engine


@dataclass(frozen=True)
class ScoringSettings:
    """What the job's rewards need."""

    sees_groups: bool = False
    """Whether a reward sees all responses of a group. Then all rewards score a group when its last response has
    finished."""
    counts_calls: bool = False
    """Whether a reward counts calls of a service."""


PLAIN_SCORING = ScoringSettings()


@dataclass(frozen=True)
class _Sample:
    """A row of a batch: the request of a response in flight, or the finished response."""

    inputs: DataProto
    row: int
    """The row in `inputs`."""


class Sampler:
    """Generates and scores responses. Each response has an id, its value of SAMPLE_IDS, which is never used for another
    one."""

    def __init__(
        self,
        hybrid: HybridGroup,
        reward: RewardGroup,
        engines: Engines,
        stop: StopRequest,
        scoring: ScoringSettings = PLAIN_SCORING,
    ) -> None:
        self.hybrid = hybrid
        self.reward = reward
        self.engines = engines
        self.stop = stop
        self.scoring = scoring
        self.num_samples = 0
        """Number of responses requested so far."""
        self._sampling: SamplingSettings | None = None
        self._samples: dict[int, _Sample] = {}
        self._waiting: deque[int] = deque()
        """Responses in flight that were not sent to an engine yet."""
        self._engine_of: dict[int, int] = {}
        """The engine of each response in flight that was sent to one."""
        self._num_polls = 0
        """Polls since `prepare`."""
        self._num_finished: Counter[int] = Counter()
        """By engine: responses that finished since `prepare`."""
        self._finished: dict[int, list[_Sample]] = {}
        """The rows of finished responses that were not collected, as rows of what an engine has returned."""
        self._rank_of: dict[int, int] = {}
        """The rank that scores each finished response whose score was not collected."""
        self._group_of: dict[int, int] = {}
        """The group of each response that waits for its group's scoring; the number of a group is its first
        response."""
        self._members: dict[int, list[int]] = {}
        """The responses of these groups."""
        self._unscored: dict[int, _Sample] = {}
        """Finished responses that wait for the rest of their group, as rows for `start_scoring`."""
        self._started: list[PendingResult[DataProto]] = []
        self._requested_again: set[int] = set()
        """Responses that an engine has failed to complete once."""
        self._scored: set[int] = set()
        """Responses whose scores can be collected without waiting."""

    @property
    def num_in_flight(self) -> int:
        """Responses that were submitted and have not finished, including those that wait for an engine."""
        return len(self._waiting) + len(self._engine_of)

    def prepare(self, sampling: SamplingSettings, *, syncs: bool) -> None:
        """Prepares the engines for the next requests, which all have these settings. No response may be in flight.
        `syncs`: whether the engines first get the current weights."""
        assert not self.num_in_flight, "responses are in flight"
        self._requested_again.clear()
        self._sampling = sampling
        self._num_polls = 0
        self._num_finished.clear()
        self.hybrid.begin_rollout(syncs)

    def submit(
        self,
        inputs: DataProto,
        finished: Sequence[tuple[int, DataProto]] = (),
        groups_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Requests one response per row, and returns their SAMPLE_IDS, int64. Needs PROMPT_TOKEN_IDS, SAMPLE_SEEDS and
        REWARD_COLUMNS; IS_GREEDY is optional. `groups_S`: the group of each response, for `sees_groups`.

        `finished`: responses that are already generated, and are only scored. In the pair (8, batch), SAMPLE_IDS 0 to 3
        are the responses for the rows 8 to 11."""
        ids = torch.arange(self.num_samples, self.num_samples + len(inputs))
        self.num_samples += len(inputs)
        inputs = inputs.with_columns({SAMPLE_IDS: ids})
        self._samples |= {sample_id: _Sample(inputs, row) for row, sample_id in enumerate(ids.tolist())}
        if self.scoring.sees_groups:
            assert groups_S is not None, "a reward sees groups"
            self._add_groups(ids, groups_S)
        for number, (row, batch) in enumerate(finished):
            ids_of_batch = ids[row + batch[SAMPLE_IDS]]
            self._engine_of |= dict.fromkeys(ids_of_batch.tolist(), number % self.engines.num_engines)
            self._accept(batch.with_columns({SAMPLE_IDS: ids_of_batch}))
        self._waiting.extend(sample_id for sample_id in ids.tolist() if sample_id in self._samples)
        if self.engines.is_load_balanced:
            self._distribute_waiting()
        elif self._waiting:
            self._distribute(equal_parts([*self._waiting], self.engines.num_engines))
            self._waiting.clear()
        return ids

    def poll(self) -> list[int]:
        """Waits up to TAKE_SECONDS for responses, at most until none is in flight, and starts their scoring. Returns
        their ids.

        Raises StepAbandonedError after a stop request; then call `abandon`."""
        batch = self.hybrid.take(TAKE_SECONDS)
        if self.stop.is_requested and ENVIRONMENT_RESULTS in batch:
            # The stop signal may have reached services and processes of an environment before the rollout ended.
            raise StepAbandonedError
        if len(batch):
            batch = self._retry_failed(batch)
        if len(batch):
            self._accept(batch)
        if self.stop.is_requested:
            raise StepAbandonedError
        self._num_polls += 1
        self._distribute_waiting()
        return list(dict.fromkeys(batch[SAMPLE_IDS].tolist()))

    def drain(self) -> None:
        """Polls until no response is in flight. Raises StepAbandonedError."""
        while self.num_in_flight:
            self.poll()

    def abandon(self) -> None:
        """Drops all responses and scores that were not collected."""
        if self.num_in_flight:
            self.hybrid.abort()
        self.reward.drop_scores()
        by_id = (self._samples, self._waiting, self._engine_of, self._finished, self._rank_of, self._scored)
        by_group = (self._group_of, self._members, self._unscored)
        for of_responses in (*by_id, *by_group, self._started):
            of_responses.clear()

    def poll_scores(self) -> None:
        """Updates which responses have all their scores (`are_scored`). If no response is in flight, waits up to
        TAKE_SECONDS for further scores.

        Raises StepAbandonedError after a stop request; then call `abandon`. Raises the errors of
        RewardWorker.start_scoring."""
        seconds = 0.0 if self.num_in_flight else TAKE_SECONDS
        for of_rank in self.reward.completed_ids(seconds):
            self._scored.update(of_rank)
        if self.stop.is_requested:
            raise StepAbandonedError
        # These calls have ended before `scored`. Responses of a failed one would never have scores.
        self._check_started()

    def are_scored(self, ids: torch.Tensor) -> bool:
        """Whether all of these responses had their scores at the last `poll_scores`."""
        return self._scored.issuperset(ids.tolist())

    def are_finished(self, ids: torch.Tensor) -> bool:
        """Whether all of these responses have finished, and their rows were not collected."""
        return self._finished.keys() >= set(ids.tolist())

    def take_rows(self, ids: torch.Tensor) -> DataProto:
        """Returns the rows of these finished responses, in this order, with the columns of a rollout. Each response can
        be collected once."""
        return _rows(row for sample_id in ids.tolist() for row in self._finished.pop(sample_id))

    def finish_scoring(self, ids: torch.Tensor) -> DataProto:
        """Waits for the scores of these finished responses, and returns them in this order; see
        RewardWorker.finish_scoring for the columns and errors. Each score can be collected once."""
        self._check_started()
        self._scored.difference_update(ids.tolist())
        ranks_S = torch.tensor([self._rank_of.pop(sample_id) for sample_id in ids.tolist()])
        parts = [ids[ranks_S == rank] for rank in range(self.engines.num_ranks)]
        scores = self.reward.finish_scoring([DataProto({SAMPLE_IDS: part}) for part in parts])
        return scores.reorder(ranks_S.argsort(stable=True).argsort())

    def take_reward_metrics(self, prefix: str = "") -> Metrics:
        """Returns what the rewards have counted of their calls of services since the last call, such as the cost.
        `prefix`: of the metrics' names."""
        if not self.scoring.counts_calls:
            return {}
        return {f"{prefix}{name}": value for name, value in self.reward.take_metrics().items()}

    def _check_started(self) -> None:
        """Raises the error of a `start_scoring` that has failed."""
        for started in self._started:
            started.result()
        self._started.clear()

    def _distribute_waiting(self) -> None:
        """Sends waiting responses to the engines that have the fewest. An engine gets up to `max_num_sequences`, plus
        as many as it finishes between two polls on average: these wait in the engine, and begin when others end before
        the next poll. An engine gets consecutive responses, because responses to the same prompt share its keys and
        values in the engine's cache."""
        in_hand = Counter(self._engine_of.values())
        sizes = [0] * self.engines.num_engines
        per_poll = [self._num_finished[engine] / max(1, self._num_polls) for engine in range(len(sizes))]
        limits = [self.engines.max_num_sequences + round(each) for each in per_poll]
        while sum(sizes) < len(self._waiting):
            taking = [engine for engine, limit in enumerate(limits) if in_hand[engine] + sizes[engine] < limit]
            if not taking:
                break
            sizes[min(taking, key=lambda each: in_hand[each] + sizes[each])] += 1
        if any(sizes):
            self._distribute([[self._waiting.popleft() for _ in range(size)] for size in sizes])

    def _distribute(self, parts: Sequence[Sequence[int]]) -> None:
        """Submits responses to the engines: `parts` has the ids for each engine."""
        assert self._sampling is not None, "call prepare first"
        self._engine_of |= {sample_id: engine for engine, part in enumerate(parts) for sample_id in part}
        rows = _rows([self._samples[sample_id] for part in parts for sample_id in part])
        names = ENVIRONMENT_REQUEST_COLUMNS if ENVIRONMENT_SEEDS in rows else REQUEST_COLUMNS
        columns = [name for name in names if name in rows]
        ends = list(accumulate(map(len, parts), initial=0))
        self.hybrid.submit([rows.only(columns).slice(*each) for each in pairwise(ends)], self._sampling)

    def _retry_failed(self, batch: DataProto) -> DataProto:
        """Requests the responses that an engine did not complete once more, from the same engine. Returns the others,
        and those that an engine did not complete for the second time. Rollouts with an environment are not requested
        again: their workers have tried as often as the job allows."""
        if ENVIRONMENT_RESULTS in batch:
            return batch
        failed = batch[SAMPLE_IDS][batch[IS_LOST]].tolist()
        again = set(failed) - self._requested_again
        if not again:
            return batch
        num_requested = self._num_finished.total() + self.num_in_flight
        log.warning(
            "the rollout engine did not complete %d of %d responses; requesting them once more",
            *(len(again), num_requested),
        )
        self._requested_again |= again
        engines = range(self.engines.num_engines)
        self._distribute([[each for each in again if self._engine_of[each] == engine] for engine in engines])
        return batch.rows([each not in again for each in batch[SAMPLE_IDS].tolist()])

    def _accept(self, batch: DataProto) -> None:
        """Stores finished responses, and starts their scoring. The ranks that share an engine score them in turns. The
        last row of a response is scored."""
        finished: dict[int, list[_Sample]] = {}
        for row, sample_id in enumerate(batch[SAMPLE_IDS].tolist()):
            finished.setdefault(sample_id, []).append(_Sample(batch, row))
        size = self.engines.ranks_per_engine
        for sample_id in finished:
            self._rank_of[sample_id] = self._engine_of[sample_id] * size + sample_id % size
        inputs = _rows([self._samples.pop(sample_id) for sample_id in finished])
        of_response = [name for name in (*RESPONSE_COLUMNS, *REWARD_COLUMNS) if name in batch]
        of_prompt = [name for name in REWARD_COLUMNS if name not in batch and name in inputs]
        scored = batch.only(of_response).rows([samples[-1].row for samples in finished.values()])
        self._finished |= finished
        self._num_finished.update(self._engine_of.pop(sample_id) for sample_id in finished)
        rows = scored.union(inputs.only(of_prompt))
        if self.scoring.sees_groups:
            self._unscored |= {sample_id: _Sample(rows, row) for row, sample_id in enumerate(finished)}
            self._start_scoring_of_groups({self._group_of[sample_id]: None for sample_id in finished})
        else:
            self._start_scoring(rows)

    def _add_groups(self, ids_S: torch.Tensor, groups_S: torch.Tensor) -> None:
        first_of: dict[int, int] = {}
        for sample_id, group in zip(ids_S.tolist(), groups_S.tolist(), strict=True):
            number = first_of.setdefault(group, sample_id)
            self._group_of[sample_id] = number
            self._members.setdefault(number, []).append(sample_id)

    def _start_scoring_of_groups(self, groups: Iterable[int]) -> None:
        """Starts the scoring of those groups whose responses have all finished, each by the rank of its first one."""
        samples: list[_Sample] = []
        numbers: list[int] = []
        for group in groups:
            members = self._members[group]
            if any(sample_id not in self._unscored for sample_id in members):
                continue
            for sample_id in members:
                self._rank_of[sample_id] = self._rank_of[group]
                del self._group_of[sample_id]
                samples.append(self._unscored.pop(sample_id))
            numbers += [group] * len(members)
            del self._members[group]
        if samples:
            self._start_scoring(_rows(samples).with_columns({SCORED_GROUPS: torch.tensor(numbers)}))

    def _start_scoring(self, rows: DataProto) -> None:
        ranks_S = torch.tensor([self._rank_of[sample_id] for sample_id in rows[SAMPLE_IDS].tolist()])
        self._started.append(
            self.reward.start_scoring([rows.rows(ranks_S == rank) for rank in range(self.engines.num_ranks)])
        )


def equal_parts(ids: Sequence[int], num_parts: int) -> list[Sequence[int]]:
    """Splits a sequence into consecutive parts of the same length; the last parts may be shorter or empty."""
    size = -(-len(ids) // num_parts)
    return [ids[part * size : (part + 1) * size] for part in range(num_parts)]


def _rows(samples: Iterable[_Sample]) -> DataProto:
    """Returns the rows of these responses, in this order."""
    runs = [list(run) for _, run in groupby(samples, key=lambda sample: id(sample.inputs))]
    return DataProto.concat([run[0].inputs.rows([sample.row for sample in run]) for run in runs])
