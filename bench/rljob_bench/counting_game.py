"""The environment of the measured conversations: a class as TRL 1.16 expects it, which RLJob runs unchanged."""

from __future__ import annotations

import random
import time
from pathlib import Path

from rljob_bench.step_reward import wait_for_turn

FINISHED = "finished"
"""The result of the last call."""


class CountingGame:
    """Counts the calls of its tool, and says when they are enough."""

    def __init__(self, num_calls: int = 3, tool_seconds: float = 0.0) -> None:
        self._enough = num_calls
        self._tool_seconds = tool_seconds
        self._num_calls = 0

    def reset(self, turns: str | None = None, **_columns: object) -> str:
        """Begins a game. A row of RLJob's evaluation names the folder of the turns, and waits for the next one there
        (see `step_reward`)."""
        self._num_calls = 0
        if turns is not None:
            wait_for_turn(Path(turns))
        return " Call count until it is enough."

    def count(self, note: str) -> str:
        """Counts one call.

        Args:
            note: Any text.

        Returns:
            Whether it is enough.
        """
        self._num_calls += 1
        time.sleep(self._tool_seconds)
        return f"{note[:1]}: {FINISHED}" if self._num_calls == self._enough else f"{note[:1]}: not yet"

    def get_reward(self) -> float:
        """A number that differs between rollouts if the calls were enough, so that there is something to train."""
        return random.random() if self._num_calls == self._enough else 0.0
