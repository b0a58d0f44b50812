"""The interface of scorers: the request, the returned score, its checks, and the outcome of a request."""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MAX_VALUE_CHARACTERS = 200
MAX_FOUND_CHARACTERS = 200
"""The maximum length of the answer found in a response: enough for any answer, and samples stay short."""
MAX_SCORE = 3.4028234663852886e38
"""The largest finite float32."""
MACHINE_ERRORS = (MemoryError, OSError, ImportError)
"""Errors that say nothing about the response, such as a disk from which a library cannot be read."""


@dataclass(frozen=True)
class RewardRequest:
    """One response to score. `wire` must be able to encode all fields."""

    prompt: str
    response: str
    answer: object
    """The expected answer from the dataset."""
    row: Mapping[str, object]
    """The whole row of the dataset."""
    messages: Sequence[Mapping[str, object]] = ()
    """The whole conversation with an environment; `response` is then the text of everything after the prompt."""

    @property
    def last_turn(self) -> str:
        """The text of the policy's last turn, in which scorers search for an answer."""
        return last_turn_of(self.messages, self.response)


def last_turn_of(messages: Sequence[Mapping[str, object]], response: str) -> str:
    """The text of the last message of the assistant; the response if there are no messages."""
    if not messages:
        return response
    turns = [message for message in messages if message["role"] == "assistant"]
    return str(turns[-1]["content"]) if turns else ""


class RewardStatus(StrEnum):
    """How the scoring of one request ended, after all retries."""

    OK = "OK"
    ERROR = "ERROR"
    """The scorer raised an exception or returned an invalid score. Not retried, except that a judge is asked once more
    if its answer cannot be parsed."""
    TIMEOUT = "TIMEOUT"
    """The scorer exceeded its time limit, also in a second attempt, and its process was killed."""
    DIED = "DIED"
    """The scorer's process crashed, exited or broke its connection, also in a second attempt."""
    UNREACHABLE = "UNREACHABLE"
    """A service that the scorer calls could not be reached in 4 attempts (see `unreachable` for what counts); 6 for a
    judge or a reward server."""
    KILLED = "KILLED"
    """SIGKILL ended the process, and then a second process that scored the same request. Memory probably ran out, so
    the response is not to blame, and no policy applies: the attempt of the job ends."""


@dataclass(frozen=True)
class RewardOutcome:
    """The result of one request."""

    score: float | None
    """None unless the status is OK: a failure is not a score of 0."""
    status: RewardStatus
    detail: str
    """Why there is no score; empty for OK."""
    seconds: float
    """Wall-clock seconds in the scoring process; for TIMEOUT the time limit, 0 if the process died."""
    found: str | None = None
    """An excerpt of the answer that the scorer extracted from the response; empty if it found none, None if the scorer
    does not report it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What the scorer counted, by the last part of a metric's name, such as `{"total_requests": 2.0}`."""


@dataclass(frozen=True)
class Scored:
    """A score with the answer that it is based on, for a scorer that extracts an answer from the response.

    Example: `Scored(1.0, "18")`
    """

    score: float
    found: str
    """The answer that the scorer extracted from the response; empty if it found none."""


Scorer = Callable[[RewardRequest], object]
"""Returns the score or `Scored`; `as_score` and `as_found` check the returned value."""


@dataclass(frozen=True)
class SyncCalls:
    """A scorer that gets all responses of a call."""

    score: Callable[[Sequence[RewardRequest]], Sequence[object]]
    """Returns for each response what a Scorer returns."""


@dataclass(frozen=True)
class AsyncCalls:
    """A scorer whose calls run at the same time in the event loop of its process."""

    score: Callable[[Sequence[RewardRequest]], Awaitable[Sequence[object]]]
    """Returns for each response what a Scorer returns, or a RewardOutcome."""
    has_own_limits: bool = False
    """Whether the scorer has time limits of its own. Otherwise a call is cancelled at the time limit."""
    probe: Callable[[], Coroutine[object, object, None]] | None = None
    """Finds out before a run whether the scorer can work. Raises ConfigurationError, or ResourceError if a later
    attempt may succeed."""


class Takes(StrEnum):
    """What one call of a scorer gets."""

    RESPONSE = "Response"
    """One response."""
    BATCH = "Batch"
    """Responses to any prompts, at most `max_responses`."""
    GROUP = "Group"
    """All responses to one prompt."""


@dataclass(frozen=True)
class CallSettings:
    """How a pool calls a scorer."""

    takes: Takes = Takes.RESPONSE
    max_responses: int = 1
    """The largest number of responses of one call that takes a batch."""
    max_calls: int = 1
    """The largest number of calls at the same time in one process, for a scorer with AsyncCalls."""
    retries_unreachable: bool = True
    """Whether the pool retries if a service is unreachable. False for a scorer that retries by itself."""


class ScorerSpec(Protocol):
    """Specifies a scorer: a dataclass of plain values, which is sent to each scoring process. The process loads the
    scorer once."""

    @property
    def where(self) -> str:
        """The field of the job that chose the scorer, for messages."""

    @property
    def name(self) -> str:
        """The scorer's name for messages."""

    def load(self) -> Scorer | SyncCalls | AsyncCalls:
        """Imports and returns the scorer, in the scoring process. Raises ConfigurationError if it cannot be used."""


def as_score(value: object) -> float:
    """Converts the returned value to a float.

    Valid scores are finite real numbers, including NumPy scalars; True and False are 1 and 0, because `return response
    == answer` is the most natural reward. For a `Scored`, the score in it is converted. Strings are rejected even if
    they look like numbers. Scores are stored as float32, so a number must be finite in float32. Raises TypeError or
    ValueError that says what was returned.
    """
    if isinstance(value, Scored):
        return as_score(value.score)
    if isinstance(value, numbers.Real) or type(value).__name__ == "bool":
        try:
            score = float(value)  # type: ignore[arg-type]
        except Exception as error:
            # Integers and fractions beyond a float's range, and any error of the number's own class.
            raise ValueError(
                f"returned {_shown(value)}, which cannot be converted to float ({type(error).__name__}); return a "
                f"finite number of at most {MAX_SCORE:.3g} in size"
            ) from error
        if not math.isfinite(score):
            raise ValueError(f"returned {score}; return a finite number")
        if abs(score) > MAX_SCORE:
            raise ValueError(
                f"returned {score}, which is not finite in float32; return a number of at most {MAX_SCORE:.3g} in size"
            )
        return score
    seen = "None" if value is None else _shown(value)
    raise TypeError(f"returned {seen}; return a finite number (int, float, True or False)")


def as_found(value: object) -> str | None:
    """An excerpt of the answer in a returned `Scored`; None for a plain score. Raises TypeError if the answer is not a
    string."""
    if not isinstance(value, Scored):
        return None
    if not isinstance(value.found, str):
        raise TypeError(f"returned Scored with found of type {type(value.found).__name__}; it must be a string")
    return excerpt(value.found, MAX_FOUND_CHARACTERS)


def _shown(value: object) -> str:
    """The type and repr of a value; also works if the value's `__repr__` raises."""
    try:
        text = excerpt(repr(value), MAX_VALUE_CHARACTERS)
    except Exception as error:
        # For example an integer of more than 4300 digits.
        text = f"its repr raises {type(error).__name__}"
    return f"a {type(value).__name__} ({text})"


def excerpt(text: str, max_characters: int) -> str:
    """The text, or if it is too long its beginning and end with the number of omitted characters between them."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
