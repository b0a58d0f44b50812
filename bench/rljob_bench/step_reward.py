"""The reward of the measured training steps: next to nothing to compute, alike for all contenders.

With ours it is also where a run waits between its turns. Its job evaluates one held-out prompt at the start and after
every turn, whose row says where the turns are kept; scoring that row takes until the next turn is due. So the product
itself is not changed, and nothing waits within a step.
"""

from __future__ import annotations

import time
from pathlib import Path

POLL_SECONDS = 0.01
TURNS_COLUMN = "turns"
"""Of the held-out row: a folder."""


def score(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:  # noqa: ARG001 - by these names
    """From 0 to 1. Of the held-out row always 0, when its turn has come."""
    turns = row.get(TURNS_COLUMN)
    if isinstance(turns, str):
        wait_for_turn(Path(turns))
        return 0.0
    return value_of(response)


def value_of(response: str) -> float:
    """Depends on every character, and differs between responses that differ."""
    return sum(response.encode()) % 97 / 97


def wait_for_turn(turns: Path) -> None:
    """Says that the run waits, and waits until it is told to go on."""
    number = len(list(turns.glob("waits-*")))
    waiting_file(turns, number).touch()
    released = released_file(turns, number)
    while not released.exists():
        time.sleep(POLL_SECONDS)


def waiting_file(turns: Path, number: int) -> Path:
    """There once the run waits for its turn `number`, from 0."""
    return turns / f"waits-{number:06d}"


def released_file(turns: Path, number: int) -> Path:
    """There once it may go on."""
    return turns / f"goes-{number:06d}"
