"""How a completed response is scored. Every scorer runs in a process of its own with a hard time limit."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import FunctionPath, Number, PositiveCount, PositiveNumber


class RewardType(StrEnum):
    """One block of the same name says the rest, where there is more to say."""

    FUNCTION = "Function"
    MATH_ANSWER = "MathAnswer"
    """1 if the response's final mathematical answer equals the row's, else 0 (math-verify)."""
    REASONING_GYM = "ReasoningGym"
    """The task's own scorer, 0 to 1; only with a ReasoningGym dataset."""


class FunctionReward(WireModel):
    """`function(prompt: str, response: str, answer: object, row: dict) -> float`, importable on PYTHONPATH."""

    path: FunctionPath


class ErrorPolicy(StrEnum):
    """What a scorer that fails does to the job."""

    FAIL = "Fail"
    SCORE = "Score"
    """The sample gets `errorScore`; counted in `reward/error_rate` or `reward/timeout_rate`."""


class Reward(WireModel):
    """The scorer and its limits."""

    type: RewardType
    function: FunctionReward | None = None
    timeout_seconds: PositiveNumber = 10.0
    """For one response, on the wall clock; the process is killed then."""
    num_processes: PositiveCount = 2
    """Scoring processes in all. They run beside the workers, which share them out evenly; each has at least one."""
    on_error: ErrorPolicy = ErrorPolicy.FAIL
    """What a scorer that raises, or returns something that is no number, does to the job."""
    on_timeout: ErrorPolicy = ErrorPolicy.SCORE
    """What a scorer that runs longer than `timeoutSeconds` does to the job."""
    error_score: Number = 0.0
