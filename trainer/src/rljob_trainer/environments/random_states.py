"""Separate random numbers for the rollouts that share a process."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from types import ModuleType

NUM_NUMPY_SEEDS = 1 << 32


@dataclass(frozen=True)
class _State:
    python: tuple[object, ...]
    numpy: object
    """None if NumPy is not installed."""


class RandomStates:
    """Keeps the states of `random` and NumPy's global generator of each rollout. They change only when another rollout
    gets the process, so nothing is copied while a single rollout runs.
    """

    def __init__(self) -> None:
        self._current: int | None = None
        """The rollout whose state the generators have."""
        self._kept: dict[int, _State] = {}

    def seed(self, rollout: int, seed: int) -> None:
        """Starts the state of a new rollout."""
        self._keep_current()
        self._current = rollout
        random.seed(seed)
        if (numpy_random := _numpy_random()) is not None:
            numpy_random.seed(seed % NUM_NUMPY_SEEDS)

    def switch_to(self, rollout: int) -> None:
        """Gives the generators the state of this rollout; call it before each piece of its code. Code that an ended
        rollout has left behind changes the state of no other rollout."""
        if rollout == self._current:
            return
        self._keep_current()
        if (state := self._kept.pop(rollout, None)) is None:
            self._current = None
            return
        self._current = rollout
        random.setstate(state.python)
        numpy_random = _numpy_random()
        if numpy_random is not None and state.numpy is not None:
            numpy_random.set_state(state.numpy)

    def forget(self, rollout: int) -> None:
        """Drops the state of a rollout that has ended."""
        self._kept.pop(rollout, None)
        if self._current == rollout:
            self._current = None

    def _keep_current(self) -> None:
        if self._current is not None:
            numpy_random = _numpy_random()
            numpy_state = None if numpy_random is None else numpy_random.get_state()
            self._kept[self._current] = _State(random.getstate(), numpy_state)


def _numpy_random() -> ModuleType | None:
    """NumPy's module of generators; None if NumPy is not installed. It is imported here, because user code may import
    it only in a method, after the rollout was seeded."""
    return importlib.import_module("numpy.random") if importlib.util.find_spec("numpy") is not None else None
