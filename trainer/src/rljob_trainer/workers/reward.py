"""The rewards, where the responses are: every worker process has scoring processes of its own.

Scoring is begun by one call and ended by another. Between them the calls of other roles run in this process, while the
scoring processes work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from rljob_api.v1alpha1.reward import ErrorPolicy, OverlongPenalty, Reward
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import ResourceError, RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, ScorerSpec, excerpt
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    FOUND,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    TURN_BEGINNINGS,
    score_column,
    status_column,
)

STATUSES = tuple(RewardStatus)
"""By the numbers that stand for them in a column."""
MAX_EXCERPT_CHARACTERS = 400


@dataclass(frozen=True)
class ScorerSettings:
    """A reward that is scored in processes, `num_processes` of one worker process."""

    reward: Reward
    where: str
    """Its place in the job."""
    scorer: ScorerSpec
    num_processes: int


@dataclass(frozen=True)
class RewardSettings:
    """What a reward worker is built from."""

    scorers: tuple[ScorerSettings, ...]
    penalties: tuple[Reward, ...]
    """Those that are computed from lengths."""
    max_new_tokens: int
    log_folder: Path
    environment: Mapping[str, str]

    def start_pool(self, scorer: ScorerSettings, num_processes: int, first_number: int) -> ScorerPool:
        """Begins to start so many of a reward's processes."""
        return ScorerPool(
            scorer.scorer,
            name=scorer.reward.name,
            num_processes=num_processes,
            first_number=first_number,
            timeout_seconds=scorer.reward.timeout_seconds,
            log_folder=self.log_folder,
            environment=self.environment,
        )


@dataclass(frozen=True)
class _Scoring:
    """Responses that are being scored."""

    requests: Sequence[RewardRequest]
    outcomes: Sequence[Future[list[RewardOutcome]]]
    """By scorer."""


class RewardWorker(Worker):
    """Scores this rank's responses by all rewards at once. Its processes load their scorers while the roles after it
    are built."""

    def __init__(self, context: WorkerContext, settings: RewardSettings) -> None:
        super().__init__(context)
        self.settings = settings
        self.pools = [
            settings.start_pool(scorer, scorer.num_processes, context.rank * scorer.num_processes)
            for scorer in settings.scorers
        ]
        self.scoring: _Scoring | None = None

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def start_scoring(self, batch: DataProto) -> DataProto:
        """Hands the responses to the scoring processes and returns; what was being scored before is given up. Needs
        RESPONSE_TEXTS, RESPONSE_LENGTHS, PROMPT_TEXTS, TURN_BEGINNINGS, ANSWERS and DATASET_ROWS. Gives what
        `finish_scoring` takes: RESPONSE_LENGTHS.

        Raises RewardError for a row that cannot be handed to a scorer."""
        names = (PROMPT_TEXTS, TURN_BEGINNINGS, RESPONSE_TEXTS, ANSWERS, DATASET_ROWS)
        requests = [
            RewardRequest(str(prompt), f"{beginning}{response}", answer, _mapping(row))
            for prompt, beginning, response, answer, row in zip(*map(batch.object_column, names), strict=True)
        ]
        self.scoring = _Scoring(requests, [pool.submit(requests) for pool in self.pools])
        return batch.only([RESPONSE_LENGTHS])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def finish_scoring(self, started: DataProto) -> DataProto:
        """Waits for the scores of what `start_scoring` was given last. A `score_column` for each reward, a
        `status_column` for each that is scored in processes, and FOUND.

        Raises RewardError when a reward fails and the job says so."""
        assert self.scoring is not None, "start first"
        scoring, self.scoring = self.scoring, None
        lengths = started[RESPONSE_LENGTHS].tolist()
        assert len(lengths) == len(scoring.requests), "another batch was started"
        columns: dict[str, torch.Tensor] = {}
        found: list[dict[str, str]] = [{} for _ in lengths]
        for each, pending in zip(self.settings.scorers, scoring.outcomes, strict=True):
            outcomes = pending.result()
            scores = settle(each.reward, each.where, each.scorer.name, scoring.requests, outcomes)
            for of_response, outcome in zip(found, outcomes, strict=True):
                if outcome.found is not None:
                    of_response[each.reward.name] = outcome.found
            statuses = [STATUSES.index(outcome.status) for outcome in outcomes]
            columns[score_column(each.reward.name)] = torch.tensor(scores, dtype=torch.float64)
            columns[status_column(each.reward.name)] = torch.tensor(statuses, dtype=torch.uint8)
        for reward in self.settings.penalties:
            assert reward.overlong is not None
            scores = overlong_scores(reward.overlong, lengths, self.settings.max_new_tokens)
            columns[score_column(reward.name)] = torch.tensor(scores, dtype=torch.float64)
        return DataProto(columns, {FOUND: tuple(found)})

    @register(Dispatch.RANK_ZERO)
    def response_texts(self, batch: DataProto) -> DataProto:
        """RESPONSE_TEXTS and FOUND of these rows alone, to show some of many."""
        return DataProto(objects={name: batch.object_column(name) for name in (RESPONSE_TEXTS, FOUND)})


def _mapping(row: object) -> Mapping[str, object]:
    if not isinstance(row, Mapping):
        raise RewardError(f"a dataset row must be a mapping (seen: {type(row).__name__})")
    return row


def settle(
    reward: Reward, where: str, scorer_name: str, requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome]
) -> tuple[float, ...]:
    """One score per request, in order, `errorScore` for failed ones, after `onError` and `onTimeout`. `where` is the
    reward's place in the job, such as `spec.training.rewards[0]`.

    Raises ResourceError where processes were killed, whatever the job tolerates: that must not become a score. Raises
    RewardError about the first failure that the job does not tolerate.
    """
    for request, outcome in zip(requests, outcomes, strict=True):
        if outcome.was_killed:
            raise ResourceError(f"{where} (reward {reward.name}): {scorer_name} {_kill_text(request, outcome)}")
    policies = {RewardStatus.ERROR: reward.on_error, RewardStatus.TIMEOUT: reward.on_timeout}
    counts = Counter(outcome.status for outcome in outcomes)
    for request, outcome in zip(requests, outcomes, strict=True):
        if policies.get(outcome.status) is ErrorPolicy.FAIL:
            seen = f"{counts[outcome.status]} of {len(outcomes)}"
            raise RewardError(
                f"{where} (reward {reward.name}): {scorer_name} {_failure_text(where, request, outcome, seen)}"
            )
    return tuple(outcome.score if outcome.status is RewardStatus.OK else reward.error_score for outcome in outcomes)


def _failure_text(where: str, request: RewardRequest, outcome: RewardOutcome, seen: str) -> str:
    field = "onError" if outcome.status is RewardStatus.ERROR else "onTimeout"
    return (
        f"{outcome.detail}\n{_request_text(request)}"
        f"{seen} responses failed like this; fix the reward, or set {where}.{field}: Score to give such responses "
        "errorScore"
    )


def _kill_text(request: RewardRequest, outcome: RewardOutcome) -> str:
    return (
        f"{outcome.detail}\n{_request_text(request)}"
        "two processes were killed at this response, so the trainer is probably out of memory: give it more, or fewer "
        "numProcesses. If it happens at such responses only, let the reward limit the memory that it takes: then it "
        "fails by an error of its own, to which onError applies"
    )


def _request_text(request: RewardRequest) -> str:
    return (
        f"  prompt: {excerpt(request.prompt, MAX_EXCERPT_CHARACTERS)!r}\n"
        f"  response: {excerpt(request.response, MAX_EXCERPT_CHARACTERS)!r}\n"
        f"  answer: {excerpt(str(request.answer), MAX_EXCERPT_CHARACTERS)!r}\n"
    )


def overlong_scores(penalty: OverlongPenalty, num_tokens: Iterable[int], max_new_tokens: int) -> tuple[float, ...]:
    """min(-exceed / buffer * factor, 0) with exceed = tokens - (max_new_tokens - buffer): 0 below the buffer, -factor
    at the limit.

    Source: DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.4, equation 13, where the factor is 1; there what is
    longer than the limit gets -1, and here nothing is longer. `num_tokens` are those of each response, its end token
    included.
    """
    first = max_new_tokens - penalty.buffer_tokens
    return tuple(min((first - each) / penalty.buffer_tokens * penalty.penalty_factor, 0.0) for each in num_tokens)
