"""The Python client of RLJob: `from rljob import Client`.

The names are imported when they are first used, because every command of `rljob` imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob.client import Client
    from rljob.errors import (
        ClusterError,
        ClusterUnreachableError,
        JobChangedError,
        JobFinishedError,
        JobNotFoundError,
        NoLogError,
        NotAllowedError,
        RejectedError,
        ResultsError,
        RLJobError,
        WaitTimeoutError,
    )
    from rljob.stored_job import StoredJob
    from rljob.submission import Submission

__all__ = [
    "Client",
    "ClusterError",
    "ClusterUnreachableError",
    "JobChangedError",
    "JobFinishedError",
    "JobNotFoundError",
    "NoLogError",
    "NotAllowedError",
    "RLJobError",
    "RejectedError",
    "ResultsError",
    "StoredJob",
    "Submission",
    "WaitTimeoutError",
]

_MODULES = {"Client": "client", "StoredJob": "stored_job", "Submission": "submission"}
"""The module of each name; all others are in `errors`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
