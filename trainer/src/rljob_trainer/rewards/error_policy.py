"""What failed scorings do to the job: fail it, or give a fixed score and be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rljob_api.v1alpha1.reward import ErrorPolicy, Reward
from rljob_trainer.errors import RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, excerpt

MAX_EXCERPT_CHARACTERS = 400


def settle(
    reward: Reward, where: str, scorer_name: str, requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome]
) -> tuple[float, ...]:
    """One score per request, in order, `errorScore` for failed ones, after `onError` and `onTimeout`. `where` is the
    reward's place in the job, such as `spec.training.rewards[0]`.

    Raises RewardError about the first failure that the job does not tolerate.
    """
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
        f"{outcome.detail}\n"
        f"  prompt: {excerpt(request.prompt, MAX_EXCERPT_CHARACTERS)!r}\n"
        f"  response: {excerpt(request.response, MAX_EXCERPT_CHARACTERS)!r}\n"
        f"  answer: {excerpt(str(request.answer), MAX_EXCERPT_CHARACTERS)!r}\n"
        f"{seen} responses failed like this; fix the reward, or set {where}.{field}: Score to give such responses "
        "errorScore"
    )
