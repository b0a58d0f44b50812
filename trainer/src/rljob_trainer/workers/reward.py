"""The reward worker: scores responses in the process that has them, with scoring processes of its own.

One call starts the scoring of some responses, and another one collects the scores of these or other responses. Between
the calls this process runs calls of other roles, while the scoring processes work.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import accumulate, compress, repeat
from pathlib import Path

import torch

from rljob_api.v1alpha1.reward import Reward
from rljob_api.v1alpha1.training import ENVIRONMENT_REWARD
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import RewardError
from rljob_trainer.observability.metrics import NAMED_REWARD_PREFIX, Metrics
from rljob_trainer.rewards.base import CallSettings, RewardOutcome, RewardRequest, RewardStatus, ScorerSpec
from rljob_trainer.rewards.code import CodeScorer, pool_seconds
from rljob_trainer.rewards.error_policies import apply_error_policies
from rljob_trainer.rewards.overlong import overlong_scores
from rljob_trainer.rewards.process_pool import ONE_BY_ONE, ScorerPool
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    ENVIRONMENT_RESULTS,
    FOUND,
    IS_LOST,
    MESSAGES,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SCORED_BY,
    SCORED_GROUPS,
    TURN_BEGINNINGS,
    score_column,
    status_column,
)

log = logging.getLogger(__name__)

STATUSES = tuple(RewardStatus)
"""The statuses in the order of their numbers in a status column."""


@dataclass(frozen=True)
class ScorerSettings:
    """A reward that is computed in scoring processes, `num_processes` for each worker process."""

    reward: Reward
    where: str
    """The reward's field in the job, such as `spec.training.rewards[0]`."""
    scorer: ScorerSpec
    num_processes: int
    calls: CallSettings = ONE_BY_ONE
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of these scoring processes only."""


@dataclass(frozen=True)
class EnvironmentRewardSettings:
    """A reward of type Environment: its score comes with the rollout."""

    reward: Reward
    where: str
    """As in ScorerSettings."""
    others: frozenset[str]
    """The names of the other rewards of this type."""

    def outcome(self, result: object) -> RewardOutcome:
        """Returns the score of a rollout. `result`: a row of ENVIRONMENT_RESULTS.

        Of several numbers it is the one with the name of the reward. The reward ENVIRONMENT_REWARD is the sum of those
        that no other reward names."""
        name = self.reward.name
        match result:
            case ("OK", None, _):
                # Only of a rollout that was lost.
                return RewardOutcome(None, RewardStatus.OK, "", 0.0)
            case ("OK", int() | float() as score, _) if name == ENVIRONMENT_REWARD or not self.others:
                return RewardOutcome(float(score), RewardStatus.OK, "", 0.0)
            case ("OK", Mapping() as scores, _) if name == ENVIRONMENT_REWARD and scores.keys() - self.others:
                rest = (score for key, score in scores.items() if key not in self.others)
                return RewardOutcome(float(sum(rest)), RewardStatus.OK, "", 0.0)
            case ("OK", Mapping() as scores, _) if name in scores:
                return RewardOutcome(float(scores[name]), RewardStatus.OK, "", 0.0)
            case ("OK", seen, _):
                names = ", ".join(map(str, seen)) if isinstance(seen, Mapping) else f"one number, {seen}"
                detail = f"returned no {name!r} (seen: {names}); return a mapping with this name, or rename the reward"
                return RewardOutcome(None, RewardStatus.ERROR, detail, 0.0)
            case (str() as status, _, str() as detail):
                return RewardOutcome(None, RewardStatus(status), detail, 0.0)
        raise RewardError(f"not the result of an environment: {result!r:.200}")


@dataclass(frozen=True)
class RewardSettings:
    """The settings of a reward worker."""

    scorers: tuple[ScorerSettings, ...]
    penalties: tuple[Reward, ...]
    """The rewards that are computed from response lengths alone."""
    max_new_tokens: int
    log_folder: Path
    environment: Mapping[str, str]
    """Environment variables of the scoring processes."""
    of_environment: tuple[EnvironmentRewardSettings, ...] = ()
    """The rewards of type Environment."""

    def start_pool(
        self, scorer: ScorerSettings, num_processes: int, first_number: int, *, probes_service: bool = False
    ) -> ScorerPool:
        """Starts `num_processes` scoring processes of a reward without waiting until they are ready.
        `probes_service`: see ScorerPool."""
        # The sandbox ends slow code, which is a score and not a failure.
        limit = scorer.reward.timeout_seconds
        return ScorerPool(
            scorer.scorer,
            name=scorer.reward.name,
            num_processes=num_processes,
            first_number=first_number,
            timeout_seconds=pool_seconds(limit) if isinstance(scorer.scorer, CodeScorer) else limit,
            log_folder=self.log_folder,
            environment={**self.environment, **scorer.environment},
            calls=scorer.calls,
            probes_service=probes_service,
        )


@dataclass(frozen=True)
class _Started:
    """A response that is being scored."""

    request: RewardRequest
    length: int
    """Tokens of the response."""
    indices: Sequence[int]
    """For each scorer, its number in the outcomes."""
    outcomes: Sequence[Future[list[RewardOutcome]]]
    """For each scorer, the outcomes of responses of the same `start_scoring`."""
    of_environment: Sequence[RewardOutcome] = ()
    """For each reward of type Environment."""


class RewardWorker(Worker):
    """Scores this rank's responses with all rewards at the same time. The scoring processes load their scorers while
    other roles are built."""

    def __init__(self, context: WorkerContext, settings: RewardSettings) -> None:
        super().__init__(context)
        self.settings = settings
        self.pools = [
            settings.start_pool(scorer, scorer.num_processes, context.rank * scorer.num_processes)
            for scorer in settings.scorers
        ]
        self.started: dict[int, _Started] = {}
        """The responses that are being scored, or whose scores were not collected yet, by their SAMPLE_IDS."""
        self.reported: set[int] = set()
        """Those of them that `scored` has returned."""
        self.logged: set[tuple[str, RewardStatus]] = set()
        """The kinds of failures that the log has: name of the reward and status."""
        self.counts = defaultdict[str, float](float)
        """What scorers have counted since the last `take_metrics`, by the metric's name."""

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def start_scoring(self, batch: DataProto) -> DataProto:
        """Sends the responses to the scoring processes without waiting for scores. May be called again before their
        scores are collected.

        A response with IS_LOST is not sent; the controller removes its scores. Needs SAMPLE_IDS,
        IS_LOST, RESPONSE_TEXTS, RESPONSE_LENGTHS, PROMPT_TEXTS, TURN_BEGINNINGS, ANSWERS and DATASET_ROWS.
        In a job with an environment also ENVIRONMENT_RESULTS and MESSAGES, and for a reward that sees whole groups
        SCORED_GROUPS. With SCORED_BY, only the rewards that a row names score it, and the scores of the others mean
        nothing. Returns a batch without columns. Raises RewardError for a row that cannot be sent to a scorer, and for
        an exception of an environment that gives no reward."""
        of_environment = self._environment_outcomes(batch)
        texts = (PROMPT_TEXTS, TURN_BEGINNINGS, RESPONSE_TEXTS, ANSWERS, DATASET_ROWS)
        conversations = batch.object_column(MESSAGES) if ENVIRONMENT_RESULTS in batch else repeat((), len(batch))
        requests = [
            RewardRequest(str(prompt), f"{beginning}{response}", answer, _mapping(row), _messages(messages))
            for prompt, beginning, response, answer, row, messages in zip(
                *map(batch.object_column, texts), conversations, strict=True
            )
        ]
        groups = batch[SCORED_GROUPS].tolist() if SCORED_GROUPS in batch else None
        sent = [_are_sent(batch, scorer.reward.name) for scorer in self.settings.scorers]
        outcomes = [
            pool.submit(list(compress(requests, each)), None if groups is None else list(compress(groups, each)))
            for pool, each in zip(self.pools, sent, strict=True)
        ]
        numbers = [list(accumulate(each, initial=0)) for each in sent]
        columns = (batch[SAMPLE_IDS].tolist(), requests, batch[RESPONSE_LENGTHS].tolist(), of_environment)
        for row, (sample_id, request, length, of_row) in enumerate(zip(*columns, strict=True)):
            assert sample_id not in self.started, f"response {sample_id} is already being scored"
            indices = [each[row] if is_sent[row] else 0 for each, is_sent in zip(numbers, sent, strict=True)]
            found = [each if is_sent[row] else _not_scored() for each, is_sent in zip(outcomes, sent, strict=True)]
            self.started[sample_id] = _Started(request, length, indices, found, of_row)
        return DataProto()

    def _environment_outcomes(self, batch: DataProto) -> list[list[RewardOutcome]]:
        """Returns for each row the outcomes of the rewards of type Environment."""
        rewards = self.settings.of_environment
        if ENVIRONMENT_RESULTS not in batch:
            return [[] for _ in range(len(batch))]
        results = batch.object_column(ENVIRONMENT_RESULTS)
        for result in results:
            # Without a reward of type Environment, no `onError` applies.
            match result:
                case ["ERROR", _, detail] if not rewards:
                    raise RewardError(f"spec.training.environment: the environment {detail}")
        wanted = {each.reward.name: _are_scored(batch, each.reward.name) for each in rewards}
        return [
            [each.outcome(result) if wanted[each.reward.name][row] else _NO_OUTCOME for each in rewards]
            for row, result in enumerate(results)
        ]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def finish_scoring(self, batch: DataProto) -> DataProto:
        """Waits for the scores of these responses. Needs SAMPLE_IDS, in any order; `start_scoring` must have been
        called with each of them. Returns a `score_column` for each reward, a `status_column` for each reward with
        scoring processes, and FOUND.

        Raises RewardError if a reward fails and its policy is Fail, and ResourceError if scoring processes were
        killed."""
        started = [self.started.pop(sample_id) for sample_id in batch[SAMPLE_IDS].tolist()]
        self.reported.difference_update(batch[SAMPLE_IDS].tolist())
        requests, lengths = [each.request for each in started], [each.length for each in started]
        columns: dict[str, torch.Tensor] = {}
        found: list[dict[str, str]] = [{} for _ in started]
        for number, each in enumerate(self.settings.scorers):
            outcomes = [response.outcomes[number].result()[response.indices[number]] for response in started]
            columns |= self._score_columns(each.reward, each.where, each.scorer.name, requests, outcomes)
            for of_response, outcome in zip(found, outcomes, strict=True):
                if outcome.found is not None:
                    of_response[each.reward.name] = outcome.found
        for number, of_environment in enumerate(self.settings.of_environment):
            outcomes = [response.of_environment[number] for response in started]
            reward, where = of_environment.reward, of_environment.where
            columns |= self._score_columns(reward, where, "the environment", requests, outcomes)
        for reward in self.settings.penalties:
            assert reward.overlong is not None
            scores = overlong_scores(reward.overlong, lengths, self.settings.max_new_tokens)
            columns[score_column(reward.name)] = torch.tensor(scores, dtype=torch.float64)
        return DataProto(columns, {FOUND: tuple(found)})

    def _score_columns(
        self,
        reward: Reward,
        where: str,
        scorer_name: str,
        requests: Sequence[RewardRequest],
        outcomes: Sequence[RewardOutcome],
    ) -> dict[str, torch.Tensor]:
        scores = apply_error_policies(reward, where, scorer_name, requests, outcomes)
        self._log_new_failures(reward, where, outcomes)
        for outcome in outcomes:
            for name, number in outcome.counts.items():
                self.counts[f"{NAMED_REWARD_PREFIX}/{reward.name}/{name}"] += number
        statuses = [STATUSES.index(outcome.status) for outcome in outcomes]
        return {
            score_column(reward.name): torch.tensor(scores, dtype=torch.float64),
            status_column(reward.name): torch.tensor(statuses, dtype=torch.uint8),
        }

    @register(Dispatch.ONE_TO_ALL)
    def completed_ids(self, max_seconds: float) -> list[int]:
        """Returns the SAMPLE_IDS of responses whose scores have become complete since the last call, so that
        `finish_scoring` does not wait for them. If there are none, waits up to `max_seconds` for the next scores."""
        pending = [each for response in self.started.values() for each in response.outcomes if not each.done()]
        found = self._newly_scored()
        if not found and pending and max_seconds:
            wait(pending, max_seconds, FIRST_COMPLETED)
            found = self._newly_scored()
        self.reported.update(found)
        return found

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take_metrics(self) -> Metrics:
        """Returns what scorers have counted of the collected scores since the last call, summed over ranks."""
        taken = dict(self.counts)
        self.counts.clear()
        return taken

    @register(Dispatch.ONE_TO_ALL)
    def drop_scores(self) -> None:
        """Drops all scores that were not collected. Responses that wait for a scoring process are not scored any more,
        so that they do not delay the next ones."""
        for response in self.started.values():
            for outcomes in response.outcomes:
                outcomes.cancel()
        self.started.clear()
        self.reported.clear()

    def _newly_scored(self) -> list[int]:
        started = [(sample_id, each) for sample_id, each in self.started.items() if sample_id not in self.reported]
        return [sample_id for sample_id, each in started if all(map(Future.done, each.outcomes))]

    def _log_new_failures(self, reward: Reward, where: str, outcomes: Sequence[RewardOutcome]) -> None:
        """Logs the first failure of each kind of each reward; metrics count all of them."""
        for outcome in outcomes:
            kind = reward.name, outcome.status
            if outcome.status is not RewardStatus.OK and kind not in self.logged:
                self.logged.add(kind)
                log.warning(
                    "%s (reward %s): %s for a response: %s (further failures of this kind are only counted)",
                    *(where, reward.name, outcome.status, outcome.detail),
                )

    @register(Dispatch.RANK_ZERO)
    def response_texts(self, batch: DataProto) -> DataProto:
        """Returns the object columns of these rows, to show a few samples."""
        return DataProto(objects={name: batch.object_column(name) for name in batch.column_names()})


_NO_OUTCOME = RewardOutcome(0.0, RewardStatus.OK, "", 0.0)


def _not_scored() -> Future[list[RewardOutcome]]:
    """The outcome for a response that is not sent to the scorer."""
    future: Future[list[RewardOutcome]] = Future()
    future.set_result([_NO_OUTCOME])
    return future


def _are_scored(batch: DataProto, reward: str) -> list[bool]:
    """Whether this reward scores each response."""
    if SCORED_BY not in batch:
        return [True] * len(batch)
    return [reward in str(names).split() for names in batch.object_column(SCORED_BY)]


def _are_sent(batch: DataProto, reward: str) -> list[bool]:
    """Whether each response is sent to this reward's processes: the reward scores it, and the engine has completed
    it."""
    pairs = zip(_are_scored(batch, reward), batch[IS_LOST].tolist(), strict=True)
    return [is_scored and not is_lost for is_scored, is_lost in pairs]


def _messages(value: object) -> Sequence[Mapping[str, object]]:
    assert isinstance(value, Sequence), "a row of MESSAGES"
    return value


def _mapping(row: object) -> Mapping[str, object]:
    if not isinstance(row, Mapping):
        raise RewardError(f"a dataset row must be a mapping (seen: {type(row).__name__})")
    return row
