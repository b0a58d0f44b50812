"""What a scorer is given, what it returns, and which return values count as a score."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MAX_VALUE_CHARACTERS = 200
MAX_FOUND_CHARACTERS = 200
"""Of what a scorer found in a response: enough for any answer, and samples stay short."""
MAX_SCORE = 3.4028234663852886e38
"""The largest number of 32 bits."""


@dataclass(frozen=True)
class RewardRequest:
    """One response to score; what `wire` can carry."""

    prompt: str
    response: str
    answer: object
    """The expected answer, as the dataset has it."""
    row: Mapping[str, object]
    """The whole dataset row."""


class RewardStatus(StrEnum):
    """What became of one request."""

    OK = "OK"
    ERROR = "ERROR"
    """The scorer raised, returned something that is no score, or its process died."""
    TIMEOUT = "TIMEOUT"
    """The scorer ran longer than allowed and its process was killed."""


@dataclass(frozen=True)
class RewardOutcome:
    """The result of one request."""

    score: float
    """0 unless the status is OK."""
    status: RewardStatus
    detail: str
    """Why there is no score; empty for OK."""
    seconds: float
    """Wall-clock time in the scoring process."""
    found: str | None = None
    """What the scorer took from the response as its answer, excerpted; empty where it found nothing, None where the
    scorer does not say."""
    has_died: bool = False
    """The process ended while it worked on this request: a crash, or it was killed."""
    was_killed: bool = False
    """SIGKILL ended the process, and another one that was given the request after it: probably memory is short. Says
    nothing about the response."""


@dataclass(frozen=True)
class Scored:
    """A score, and what it was computed from, for a scorer that reads an answer out of the response.

    Example: `Scored(1.0, "18")`
    """

    score: float
    found: str
    """What the scorer took from the response as its answer; empty where it found nothing."""


Scorer = Callable[[RewardRequest], object]
"""Returns the score, or `Scored`; what it may be is checked by `as_score` and `as_found`."""


class ScorerSpec(Protocol):
    """Says which scorer to use; a dataclass of plain values. Each scoring process makes it anew and loads it once."""

    @property
    def where(self) -> str:
        """The field of the job that chose the scorer, for messages."""

    @property
    def name(self) -> str:
        """The scorer as people call it, for messages."""

    def load(self) -> Scorer:
        """Imports what the scorer needs, in the scoring process. Raises ConfigurationError if it cannot work."""


def as_score(value: object) -> float:
    """The score as a float.

    Any finite real number is one, numpy's scalars included, and True and False are 1 and 0, because `return response
    == answer` is the most natural reward. Of `Scored` its score counts. Strings are refused even if they look like
    numbers. Scores are used in 32 bits: a number that is not finite there is none. Raises TypeError or ValueError
    saying what was returned.
    """
    if isinstance(value, Scored):
        return as_score(value.score)
    if isinstance(value, numbers.Real) or type(value).__name__ == "bool":
        try:
            score = float(value)  # type: ignore[arg-type]
        except Exception as error:
            # Integers and fractions beyond a float's range, and whatever the number's own class raises.
            raise ValueError(
                f"returned {_shown(value)}, which cannot be made a float ({type(error).__name__}); return a finite "
                f"number of at most {MAX_SCORE:.3g} in size"
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
    """What a returned `Scored` says that was found in the response, excerpted; None for a plain score. Raises TypeError
    if that is no string."""
    if not isinstance(value, Scored):
        return None
    if not isinstance(value.found, str):
        raise TypeError(f"returned Scored with found of type {type(value.found).__name__}; it must be a string")
    return excerpt(value.found, MAX_FOUND_CHARACTERS)


def _shown(value: object) -> str:
    """Its type and its text, whatever the type does when it is asked for one."""
    try:
        text = excerpt(repr(value), MAX_VALUE_CHARACTERS)
    except Exception as error:
        # Integers of more than 4300 digits, too.
        text = f"its repr raises {type(error).__name__}"
    return f"a {type(value).__name__} ({text})"


def excerpt(text: str, max_characters: int) -> str:
    """The text, or its two ends with the number of characters left out between them."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
