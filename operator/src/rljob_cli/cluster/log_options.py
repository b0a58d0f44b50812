"""Which log `rljob logs` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rljob_api.constants import DRIVER_LOG_CONTAINER, HEAD_GROUP, RAY_CONTAINER


class Container(StrEnum):
    """Whose log."""

    DRIVER = DRIVER_LOG_CONTAINER
    """The training, in the head pod."""
    RAY = RAY_CONTAINER
    """Ray itself."""


@dataclass(frozen=True)
class LogOptions:
    """Which log, and how much of it."""

    pool: str | None = None
    """A worker of this pool instead of the head pod."""
    index: int = 0
    """Which worker, in the order of the pods' names."""
    container: Container | None = None
    """The head's driver, or the worker's Ray, when unset."""
    follow: bool = False
    num_lines: int | None = None
    """From the end; all when unset."""
    attempt: int | None = None
    """Of this attempt; else of the newest one that has pods."""

    @property
    def group(self) -> str:
        """The pool, or the head."""
        return self.pool or HEAD_GROUP

    @property
    def container_name(self) -> str:
        """The container to read."""
        return self.container or (Container.RAY if self.pool else Container.DRIVER)
