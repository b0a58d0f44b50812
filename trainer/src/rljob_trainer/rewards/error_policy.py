"""What failed scorings do to the job: fail it, or give a fixed score and be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.v1alpha1.reward import ErrorPolicy, Reward
from rljob_trainer.errors import RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, excerpt

MAX_EXCERPT_CHARACTERS = 400


@dataclass(frozen=True)
class Scores:
    """One score per request, in order, with the counts of what went wrong."""

    scores: tuple[float, ...]
    num_errors: int
    num_timeouts: int


def settle(
    reward: Reward, scorer_name: str, requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome]
) -> Scores:
    """The scores, `errorScore` for failed ones, after `onError` and `onTimeout`.

    Raises RewardError about the first failure that the job does not tolerate.
    """
    policies = {RewardStatus.ERROR: reward.on_error, RewardStatus.TIMEOUT: reward.on_timeout}
    counts = Counter(outcome.status for outcome in outcomes)
    for request, outcome in zip(requests, outcomes, strict=True):
        if policies.get(outcome.status) is ErrorPolicy.FAIL:
            raise RewardError(_failure_text(scorer_name, request, outcome, counts[outcome.status], len(outcomes)))
    return Scores(
        scores=tuple(
            outcome.score if outcome.status is RewardStatus.OK else reward.error_score for outcome in outcomes
        ),
        num_errors=counts[RewardStatus.ERROR],
        num_timeouts=counts[RewardStatus.TIMEOUT],
    )


def _failure_text(
    scorer_name: str, request: RewardRequest, outcome: RewardOutcome, num_failed: int, num_outcomes: int
) -> str:
    field = "onError" if outcome.status is RewardStatus.ERROR else "onTimeout"
    return (
        f"spec.training.reward: {scorer_name} {outcome.detail}\n"
        f"  prompt: {excerpt(request.prompt, MAX_EXCERPT_CHARACTERS)!r}\n"
        f"  response: {excerpt(request.response, MAX_EXCERPT_CHARACTERS)!r}\n"
        f"  answer: {excerpt(str(request.answer), MAX_EXCERPT_CHARACTERS)!r}\n"
        f"{num_failed} of {num_outcomes} responses failed like this; mend the reward, or set "
        f"spec.training.reward.{field}: Score to give such responses errorScore"
    )
