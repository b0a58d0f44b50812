"""The options of `rljob logs`. Every command imports this module, so it imports little itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rljob_api.constants import DRIVER_LOG_CONTAINER, HEAD_GROUP, RAY_CONTAINER


class Container(StrEnum):
    """The container whose log is printed."""

    DRIVER = DRIVER_LOG_CONTAINER
    """The log of the training, in the head pod."""
    RAY = RAY_CONTAINER
    """The log of Ray."""


@dataclass(frozen=True)
class LogOptions:
    """The log to print, and how much of it."""

    pool: str | None = None
    """Pool of the worker whose log is printed; None for the head pod."""
    index: int = 0
    """Number of the worker pod in the order of the pods' names, from 0. With --storage: rank of the worker process."""
    container: Container | None = None
    """The container; None for `driver` in the head pod, `ray` in a worker pod."""
    follow: bool = False
    num_lines: int | None = None
    """Number of lines from the end; None for all."""
    since_seconds: int | None = None
    """Only the lines of the last seconds; None for all."""
    previous: bool = False
    """Whether to print the log of the attempt before the newest one."""
    attempt: int | None = None
    """Number of the attempt; None for the newest attempt that has this pod. With --storage, None means the attempt
    whose log was written last or, with --pool, the worker's log of all attempts."""

    @property
    def group(self) -> str:
        """The value of `Pod.group` of the pod: the pool, or the head."""
        return self.pool or HEAD_GROUP

    @property
    def container_name(self) -> str:
        """The container to read."""
        return self.container or (Container.RAY if self.pool else Container.DRIVER)
