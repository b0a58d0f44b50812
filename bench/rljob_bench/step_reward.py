"""The reward of the measured training steps: almost nothing to compute, the same for all contenders.

Our run also uses it to wait between its turns. Its job evaluates one held-out prompt at the start and after every turn.
That row names the folder of the turns, and its scoring takes until the next turn is due. So the product is unchanged,
and nothing waits within a step.
"""

from __future__ import annotations

import time
from pathlib import Path

POLL_SECONDS = 0.01
TURNS_COLUMN = "turns"
"""Column of the held-out row: the folder of the turns."""


def score(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:  # noqa: ARG001 - by these names
    """A score from 0 to 1. The held-out row scores 0 as soon as its turn has come."""
    turns = row.get(TURNS_COLUMN)
    if isinstance(turns, str):
        wait_for_turn(Path(turns))
        return 0.0
    return value_of(response)


def value_of(response: str) -> float:
    """A number that depends on every character, so that different responses have different scores."""
    return sum(response.encode()) % 97 / 97


def wait_for_turn(turns: Path) -> None:
    """Signals that the run is waiting, and waits until it may continue."""
    number = len(list(turns.glob("waits-*")))
    waiting_file(turns, number).touch()
    released = released_file(turns, number)
    while not released.exists():
        time.sleep(POLL_SECONDS)


def waiting_file(turns: Path, number: int) -> Path:
    """Exists when the run waits for its turn `number` (from 0)."""
    return turns / f"waits-{number:06d}"


def released_file(turns: Path, number: int) -> Path:
    """Exists when the run may continue."""
    return turns / f"goes-{number:06d}"
