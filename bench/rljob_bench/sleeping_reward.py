"""The reward of the measured rollouts: it sleeps as long as the row of the dataset says."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rljob_bench.step_reward import value_of

SECONDS, DIFFERS = "seconds", "differs"
"""Columns of the dataset: how long a score takes, and whether the scores of the row's group differ."""


def score(prompt: str, response: str, answer: object, row: Mapping[str, object]) -> float:  # noqa: ARG001 - by name
    """A score from 0 to 1; 0 for all responses of a group whose scores do not differ."""
    seconds = row[SECONDS]
    assert isinstance(seconds, int | float)
    time.sleep(seconds)
    return value_of(response) if row[DIFFERS] else 0.0
