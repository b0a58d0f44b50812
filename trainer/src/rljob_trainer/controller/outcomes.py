"""How responses and their scoring ended. A failure of the infrastructure is never a score: a response without a score
that training needs is excluded, which means that it is counted, but not trained on and not in any mean of the rewards.

Legend: B responses, S scored responses: B, then one greedy response per prompt if requested.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.errors import ResourceError, RewardError, TrainerError
from rljob_trainer.observability.metrics import (
    COMPLETED_FRACTION,
    CONTEXT_FULL_FRACTION,
    ENVIRONMENT_SECONDS_MEAN,
    ERROR_FRACTION,
    EXCLUDED_FRACTION,
    GENERATION_SECONDS_MEAN,
    INFRASTRUCTURE_FRACTION,
    MAX_TOKENS_FRACTION,
    MAX_TURNS_FRACTION,
    NAMED_REWARD_PREFIX,
    PARSE_ERROR_FRACTION,
    REWRITTEN_FRACTION,
    STATUS_RATES,
    TIME_LIMIT_FRACTION,
    TOOL_CALLS_MEAN,
    TOOL_ERROR_RATE,
    TURNS_PREFIX,
    spread,
)
from rljob_trainer.rewards.base import RewardStatus, excerpt
from rljob_trainer.workers.columns import (
    ENVIRONMENT_SECONDS,
    GENERATION_SECONDS,
    IS_LOST,
    IS_REWRITTEN,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    NUM_TURNS,
    OUTCOME_LIST,
    OUTCOMES,
    score_column,
    skipped_column,
    status_column,
)
from rljob_trainer.workers.reward import STATUSES

NUM_STEPS = 10
"""Number of steps over which failures are counted."""
MAX_PROMPT_CHARACTERS = 200
"""Characters of a prompt that a message shows."""
FAILURES = (RewardStatus.ERROR, RewardStatus.TIMEOUT, RewardStatus.DIED, RewardStatus.UNREACHABLE)
"""Statuses without a result of the reward, as far as they reach the controller."""


OUTCOME_FRACTIONS: Mapping[Outcome, str] = {
    Outcome.COMPLETED: COMPLETED_FRACTION,
    Outcome.MAX_TOKENS: MAX_TOKENS_FRACTION,
    Outcome.CONTEXT_FULL: CONTEXT_FULL_FRACTION,
    Outcome.MAX_TURNS: MAX_TURNS_FRACTION,
    Outcome.PARSE_ERROR: PARSE_ERROR_FRACTION,
    Outcome.TIME_LIMIT: TIME_LIMIT_FRACTION,
    Outcome.INFRASTRUCTURE: INFRASTRUCTURE_FRACTION,
    Outcome.ERROR: ERROR_FRACTION,
}
"""The metric of each outcome."""
OF_SINGLE_RESPONSES = (Outcome.COMPLETED, Outcome.MAX_TOKENS, Outcome.INFRASTRUCTURE)
"""The outcomes that a rollout without an environment can have."""
ROLLOUT = "rollout"
"""Names the engine and the environments in reasons."""
Reasons = Counter[tuple[str, RewardStatus | Outcome]]
"""Number of excluded responses by the reward that gave no score and the status of its scoring, or by ROLLOUT and
INFRASTRUCTURE."""


def without_scores_of(
    scores: DataProto, is_lost_S: Tensor, weights: Mapping[str, float], scored_by_S: Sequence[Sequence[str]] = ()
) -> DataProto:
    """Removes the scores of responses that the engine did not complete, and adds IS_LOST. A reward may have
    scored what there is of such a response. Also removes the scores of rewards that the prompt's dataset does not name
    (`skipped_column`). `scored_by_S`: the names for each response, empty for all rewards; empty: no dataset names
    any."""
    columns = dict[str, Tensor]()
    for name in weights:
        is_removed_S = is_lost_S
        if scored_by_S:
            is_skipped_S = torch.tensor([bool(names) and name not in names for names in scored_by_S])
            columns[skipped_column(name)] = is_skipped_S
            is_removed_S = is_lost_S | is_skipped_S
        columns[score_column(name)] = scores[score_column(name)].masked_fill(is_removed_S, math.nan)
    return scores.with_columns({**columns, IS_LOST: is_lost_S})


def rewards_of_rows(prompts: Sequence[PromptRow], num_scored: int) -> list[tuple[str, ...]]:
    """Returns for each scored response the rewards that the dataset of its prompt names. `prompts`: of each response;
    after these come the greedy ones, one for each prompt."""
    num_greedy = num_scored - len(prompts)
    greedy = prompts[:: len(prompts) // num_greedy] if num_greedy else ()
    return [prompt.rewards for prompt in (*prompts, *greedy)]


def is_skipped(scores: DataProto, name: str) -> Tensor:
    """Returns [B] bool: whether the dataset of the prompt does not name this reward, which then has no score."""
    if skipped_column(name) in scores:
        return scores[skipped_column(name)]
    return torch.zeros(len(scores), dtype=torch.bool)


def weighted_sum(scores: DataProto, weights: Mapping[str, float]) -> Tensor:
    """Returns [B] float64: the sum of weight x score over the rewards that score the response; NaN if one of them with
    a weight other than 0 has no score."""
    totals_B = torch.zeros(len(scores), dtype=torch.float64)
    for name, weight in weights.items():
        # A missing score is NaN, which would remain NaN with weight 0.
        if weight != 0:
            totals_B += (weight * scores[score_column(name)]).masked_fill(is_skipped(scores, name), 0.0)
    return totals_B


def is_without_score(scores: DataProto, weights: Mapping[str, float]) -> Tensor:
    """Returns [B] bool: whether a reward that is needed gave no score (`is_needed`). `weights`: the rewards by name."""
    missing_B = torch.zeros(len(scores), dtype=torch.bool)
    for name, weight in weights.items():
        missing_B = missing_B | (is_missing(scores, name) & is_needed(scores, name, weight))
    return missing_B


def is_needed(scores: DataProto, name: str, weight: float) -> Tensor:
    """Returns [B] bool: whether training needs the score of a reward with this weight. It needs those with a weight
    other than 0 that the prompt's dataset does not leave out. For the outcome ERROR it needs all of these, because such
    a rollout may only be trained on if the reward that its environment did not give has a score by `onError` or
    `onTimeout`."""
    if weight != 0 or OUTCOMES not in scores:
        return ~is_skipped(scores, name) & (weight != 0)
    return ~is_skipped(scores, name) & (scores[OUTCOMES] == OUTCOME_LIST.index(Outcome.ERROR))


def reasons_of(scores: DataProto, weights: Mapping[str, float]) -> Reasons:
    """Returns why responses are excluded; a response counts once for each reward that is needed and gave no score
    (`is_needed`)."""
    found: Reasons = Counter()
    is_lost = scores[IS_LOST].clone()
    for name, weight in weights.items():
        if status_column(name) in scores:
            # A rollout that has no turn, because its environment raised an exception, has that status.
            is_error = scores[status_column(name)] == STATUSES.index(RewardStatus.ERROR)
            is_of_reward = is_missing(scores, name) & (~scores[IS_LOST] | is_error) & is_needed(scores, name, weight)
            is_lost &= ~is_of_reward
            numbers = scores[status_column(name)][is_of_reward].tolist()
            found.update((name, STATUSES[number]) for number in numbers)
    if num_lost := int(is_lost.sum()):
        found[ROLLOUT, Outcome.INFRASTRUCTURE] = num_lost
    return found


def reasons_text(reasons: Reasons) -> str:
    """Returns the reasons for messages, the most frequent first, such as `judge TIMEOUT: 3`."""
    return ", ".join(f"{name} {status}: {number}" for (name, status), number in reasons.most_common())


def statuses_of(scores: DataProto, weights: Mapping[str, float]) -> dict[str, list[RewardStatus]]:
    """Returns [B] statuses for each reward that has scoring processes, by name."""
    return {
        name: [STATUSES[number] for number in scores[status_column(name)].tolist()]
        for name in weights
        if status_column(name) in scores
    }


def reward_metrics(scores: DataProto, weights: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics for each reward: mean, maximum and minimum over the responses that have a score, and the
    fractions of responses for which it failed; also the fractions for which any reward failed."""
    num_rows, found = len(scores), dict[str, float]()
    has_failed_B = {status: torch.zeros(num_rows, dtype=torch.bool) for status in FAILURES}
    for name in weights:
        prefix = f"{NAMED_REWARD_PREFIX}/{name}"
        scores_B = scores[score_column(name)]
        found |= spread(prefix, scores_B[~is_missing(scores, name)].tolist())
        if status_column(name) not in scores:
            continue
        for status in FAILURES:
            failed_B = scores[status_column(name)] == STATUSES.index(status)
            has_failed_B[status] |= failed_B
            found[f"{prefix}/{STATUS_RATES[status]}"] = float(failed_B.sum()) / num_rows
    for status in FAILURES:
        found[f"{NAMED_REWARD_PREFIX}/{STATUS_RATES[status]}"] = float(has_failed_B[status].sum()) / num_rows
    return found


def outcome_metrics(batch: DataProto, is_excluded_B: Tensor) -> dict[str, float]:
    """Returns the fractions of responses by their outcome, and the fraction of excluded responses."""
    counts = Counter(OUTCOME_LIST[number] for number in batch[OUTCOMES].tolist())
    is_conversation = NUM_TURNS in batch
    return {
        **{
            name: counts[outcome] / len(batch)
            for outcome, name in OUTCOME_FRACTIONS.items()
            if is_conversation or outcome in OF_SINGLE_RESPONSES
        },
        EXCLUDED_FRACTION: float(is_excluded_B.double().mean()),
    }


def conversation_metrics(batch: DataProto) -> dict[str, float]:
    """Returns metrics of conversations with an environment, without those that were lost; none for other batches."""
    if NUM_TURNS not in batch or batch[IS_LOST].all():
        return {}
    batch = batch.rows((~batch[IS_LOST]).nonzero().flatten())
    num_turns, num_calls = batch[NUM_TURNS].double(), int(batch[NUM_TOOL_CALLS].sum())
    found = {
        **spread(TURNS_PREFIX, num_turns.tolist()),
        TOOL_CALLS_MEAN: num_calls / len(batch),
        REWRITTEN_FRACTION: float(batch[IS_REWRITTEN].double().mean()),
        ENVIRONMENT_SECONDS_MEAN: float(batch[ENVIRONMENT_SECONDS].double().mean()),
        GENERATION_SECONDS_MEAN: float(batch[GENERATION_SECONDS].double().mean()),
    }
    if num_calls:
        found[TOOL_ERROR_RATE] = int(batch[NUM_TOOL_ERRORS].sum()) / num_calls
    return found


def is_missing(scores: DataProto, name: str) -> Tensor:
    """Returns [B] bool: whether the reward gave no score, or the engine did not complete the response. NaN from a
    reward without scoring processes is not a missing score: `refuse_not_finite` reports it."""
    if status_column(name) not in scores:
        return scores[IS_LOST] | is_skipped(scores, name)
    return scores[score_column(name)].isnan() | scores[IS_LOST]


def refuse_not_finite(
    prompts: Sequence[PromptRow],
    weights: Mapping[str, float],
    scores: DataProto,
    totals_S: Tensor,
    names: Sequence[str],
) -> None:
    """Raises RewardError for a score that is not finite in float32, which training uses. A single such score would make
    the advantages of its group, or of the whole batch, not finite. A missing score is NaN and allowed.

    `prompts`: of each response. In `scores` and in the weighted sums `totals_S`, the rows after these belong to greedy
    responses, one for each prompt. `names`: all rewards of the job, in order."""
    checked = [
        *(
            (
                f"spec.training.rewards[{names.index(name)}] (reward {name})",
                scores[score_column(name)],
                is_missing(scores, name),
            )
            for name in weights
        ),
        ("spec.training.rewards (weighted sum of all rewards)", totals_S, is_without_score(scores, weights)),
    ]
    for where, values_S, is_missing_S in checked:
        bad_rows = (~values_S.float().isfinite() & ~is_missing_S).nonzero().flatten().tolist()
        if bad_rows:
            num_rows = len(prompts)
            num_responses = num_rows // (len(values_S) - num_rows) if len(values_S) > num_rows else 1
            first = bad_rows[0]
            prompt = prompts[first if first < num_rows else (first - num_rows) * num_responses].prompt
            raise RewardError(
                f"{where}: the score {float(values_S[first])} is not finite in float32, for a response to "
                f"{excerpt(prompt, MAX_PROMPT_CHARACTERS)!r} ({len(bad_rows)} of {len(values_S)} responses); fix the "
                "reward, or reduce its weight"
            )


class FailureRate:
    """The fraction of excluded responses in the last `NUM_STEPS` steps of this attempt, compared with
    `training.maxFailureRate`.

    Until that many steps are done, the denominator is the number of responses of that many steps: a short failure at
    the start does not end the job, and a total outage ends it after a few steps. A resumed run starts to count at 0,
    because the services that its rewards call may be available again."""

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self.steps: deque[tuple[int, int, Reasons]] = deque(maxlen=NUM_STEPS)
        """For each step the numbers of its responses and of the excluded ones, and the reasons."""

    def add(self, num_responses: int, num_excluded: int, reasons: Reasons) -> None:
        """Counts the responses of a step. `reasons` may count a response several times."""
        self.steps.append((num_responses, num_excluded, reasons))

    @property
    def rate(self) -> float:
        """The fraction, see above; 0 before the first step."""
        num_responses, num_excluded = self._totals()
        return num_excluded / max(1.0, num_responses * NUM_STEPS / max(1, len(self.steps)))

    def error(self, *, is_end: bool = False) -> TrainerError | None:
        """Returns the error that ends the run if the fraction is too large. It is a ResourceError, after which a retry
        may succeed, unless most failures are exceptions of the rewards' own code. `is_end`: whether the last step of
        the job is done. Then the fraction is 1 if none of the responses has a score: a job that has learned nothing
        must not succeed."""
        has_no_score = all(responses == excluded for responses, excluded, _ in self.steps)
        rate = 1.0 if is_end and self.steps and has_no_score else self.rate
        if rate <= self.max_rate:
            return None
        reasons = sum((of_step for _, _, of_step in self.steps), Reasons())
        num_responses, num_excluded = self._totals()
        counted = f"{num_excluded} of {num_responses} responses of the last {len(self.steps)} steps"
        return too_many_excluded(counted, self.max_rate, f"the responses of {NUM_STEPS} steps", reasons)

    def _totals(self) -> tuple[int, int]:
        """The numbers of responses and of excluded responses."""
        return sum(responses for responses, _, _ in self.steps), sum(excluded for _, excluded, _ in self.steps)


def too_many_excluded(counted: str, max_rate: float, whole: str, reasons: Reasons) -> TrainerError:
    """Returns the error that ends a run. `counted`: such as `30 of 60 responses of the last 10 steps`; `whole`: what
    `max_rate` is a fraction of, such as `the responses of 10 steps`."""
    counts = reasons_text(reasons)
    # Without a limit, only a batch of dynamic sampling in which nothing has a score ends the run.
    other = "set dynamicSampling.onMaxRounds: TrainOnFewer" if max_rate >= 1 else "increase maxFailureRate"
    text = (
        f"spec.training.maxFailureRate: {counted} were excluded, because a reward gave no score, or the engine or the "
        f"environment failed (allowed: {max_rate:g} of {whole}; failures: {counts}); the logs of the workers have the "
        "first failure of each kind. Fix the reward or the service that it calls, increase timeoutSeconds for TIMEOUT, "
        f"or {other}"
    )
    num_errors = sum(number for (_, status), number in reasons.items() if status is RewardStatus.ERROR)
    return RewardError(text) if 2 * num_errors > reasons.total() else ResourceError(text)
