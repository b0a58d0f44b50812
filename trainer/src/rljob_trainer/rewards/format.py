"""Whether a whole response has a form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scorer


@dataclass(frozen=True)
class FormatScorer:
    """1 if the whole response, without white space around it, matches the pattern, else 0. `.` stands for line ends,
    too. A pattern that backtracks for ever runs into the time limit of its process."""

    pattern: str
    where: str
    name: str = "Format"

    def load(self) -> Scorer:
        """Raises ConfigurationError for what is no regular expression here: another Python may have compiled it."""
        try:
            compiled = re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigurationError(
                f"{self.where}: {self.pattern!r} is no regular expression of Python's `re`: {error}; correct it"
            ) from error

        def score(request: RewardRequest) -> object:
            return compiled.fullmatch(request.response.strip()) is not None

        return score
