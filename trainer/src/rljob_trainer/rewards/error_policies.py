"""What happens to a response that a reward could not score: `onError`, `onTimeout`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rljob_api.v1alpha1.reward import ErrorPolicy, Reward, RewardType
from rljob_trainer.errors import ResourceError, RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, excerpt

MAX_EXCERPT_CHARACTERS = 400


def apply_error_policies(
    reward: Reward, where: str, scorer_name: str, requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome]
) -> tuple[float, ...]:
    """Applies `onError` and `onTimeout`. Returns one score per request, in order. A failed request gets `errorScore`
    with the policy Score, and NaN with the policy Exclude. `where` is the reward's field in the job, such as
    `spec.training.rewards[0]`.

    Raises ResourceError if scoring processes were killed, whatever the policy is, because a lack of memory must not
    become a score. Raises RewardError for the first failure whose policy is Fail.
    """
    for request, outcome in zip(requests, outcomes, strict=True):
        if outcome.status is RewardStatus.KILLED:
            raise ResourceError(f"{where} (reward {reward.name}): {scorer_name} {_kill_text(where, request, outcome)}")
    counts = Counter(outcome.status for outcome in outcomes)
    for request, outcome in zip(requests, outcomes, strict=True):
        if policy_for(reward, outcome.status) is ErrorPolicy.FAIL:
            seen = f"{counts[outcome.status]} of {len(outcomes)}"
            raise RewardError(
                f"{where} (reward {reward.name}): {scorer_name} {_failure_text(where, request, outcome, seen)}"
            )
    return tuple(_score(reward, outcome) for outcome in outcomes)


def policy_for(reward: Reward, status: RewardStatus) -> ErrorPolicy | None:
    """The policy for a failure; None for OK and KILLED. An unreachable service says nothing about the response, so it
    never gives a score: the policy is Exclude, or Fail if `onTimeout` is Fail.

    A reward with weight 0 is only measured, so Fail does not end the run for it: the response has no score of this
    reward. An environment is different, because its failure concerns the rollout."""
    policy = _policy_of(reward, status)
    is_only_measured = reward.weight == 0 and reward.type is not RewardType.ENVIRONMENT
    return ErrorPolicy.EXCLUDE if policy is ErrorPolicy.FAIL and is_only_measured else policy


def _policy_of(reward: Reward, status: RewardStatus) -> ErrorPolicy | None:
    match status:
        case RewardStatus.ERROR:
            return reward.error_policy
        case RewardStatus.TIMEOUT | RewardStatus.DIED:
            return reward.on_timeout
        case RewardStatus.UNREACHABLE:
            return ErrorPolicy.FAIL if reward.on_timeout is ErrorPolicy.FAIL else ErrorPolicy.EXCLUDE
        case RewardStatus.OK | RewardStatus.KILLED:
            return None


def _score(reward: Reward, outcome: RewardOutcome) -> float:
    if outcome.score is not None:
        return outcome.score
    return reward.error_score if policy_for(reward, outcome.status) is ErrorPolicy.SCORE else math.nan


def _failure_text(where: str, request: RewardRequest, outcome: RewardOutcome, seen: str) -> str:
    field = "onError" if outcome.status is RewardStatus.ERROR else "onTimeout"
    or_score = "" if outcome.status is RewardStatus.UNREACHABLE else ", or Score to give them errorScore"
    return (
        f"{outcome.detail}\n{_request_text(request)}"
        f"{seen} responses of this worker failed in this way; fix the reward, or set {where}.{field}: Exclude to "
        f"exclude such responses from the update{or_score}"
    )


def _kill_text(where: str, request: RewardRequest, outcome: RewardOutcome) -> str:
    return (
        f"{outcome.detail}\n{_request_text(request)}"
        "two scoring processes were killed while they scored this response; the trainer is probably out of memory: "
        f"increase its memory or reduce {where}.numProcesses. If only such responses fail, limit the memory in the "
        "code of the reward, so that it raises an error, to which onError applies"
    )


def _request_text(request: RewardRequest) -> str:
    shown = {"prompt": request.prompt, "response": request.response}
    if request.answer is not None:
        shown["answer"] = str(request.answer)
    return "".join(f"  {name}: {excerpt(text, MAX_EXCERPT_CHARACTERS)!r}\n" for name, text in shown.items())
