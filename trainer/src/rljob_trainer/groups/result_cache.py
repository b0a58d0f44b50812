"""A cache in each worker process for its own results, for later calls that get these results as arguments.

Reading a worker's part of a batch from the object store takes longer than a whole call without data. So if the process
that computed a result needs it again, the controller sends only the key of the call that computed it. Other processes
get a reference to the object store.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from uuid import uuid4

import ray

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.errors import DataLostError
from rljob_trainer.groups.object_store import StoredArgument

_NUMBERS = count()
IMMUTABLE_TYPES = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values a method cannot change, so that the cache may return the same object several times."""


class CachedCall:
    """The controller's handle for the cached results of one call. When this object is garbage collected, the next call
    to each process lets it drop its result."""

    def __init__(self, forgotten: Sequence[deque[str]]) -> None:
        """`forgotten`: for each process that caches a result, the queue of keys that the next call will let it drop."""
        self.key = f"{_this_process()}-{next(_NUMBERS)}"
        """Unique for this call, even if several controllers call the same processes."""
        weakref.finalize(self, _forget, tuple(forgotten), self.key).atexit = False


@cache
def _this_process() -> str:
    return uuid4().hex[:12]


def _forget(forgotten: Sequence[deque[str]], key: str) -> None:
    for queue in forgotten:
        queue.append(key)


@dataclass(frozen=True)
class CachedArgument:
    """A placeholder for a batch argument: the result that the receiving process computed in the call with this key."""

    key: str


@dataclass(frozen=True)
class ResultArgument:
    """One rank's result of a call, as an argument of another call; which process will receive it is not known yet."""

    reference: ray.ObjectRef
    cached_call: CachedCall
    producer: object
    """The actor handle of the process that computed the result."""

    def for_process(self, process: object) -> CachedArgument | StoredArgument:
        """Returns the argument in the form that is sent to a process. `process`: its actor handle."""
        return CachedArgument(self.cached_call.key) if process is self.producer else StoredArgument(self.reference)


class ResultCache:
    """The cache of a worker process for its own results."""

    def __init__(self) -> None:
        self._batches: dict[str, DataProto] = {}
        self._errors: dict[str, Exception] = {}

    def keep(self, key: str, result: DataProto, as_stored: DataProto) -> None:
        """Caches a result as other processes would read it. `as_stored`: what `object_store.stored` has returned for
        it.

        Cached columns that are in the object store share memory with the store. Object columns with mutable values are
        not cached: they are read from the store each time."""
        cached_columns = [
            name
            for name in as_stored.column_names()
            if as_stored.is_remote(name) and not result.is_remote(name) and not _is_mutable(result, name)
        ]
        with_cached = as_stored.fetched(cached_columns)
        # Tensors that came with the result and not through the store are copied.
        inline = [name for name in with_cached.tensors if name not in cached_columns]
        self._batches[key] = with_cached.with_columns(
            {name: with_cached[name].detach().cpu().clone() for name in inline}
        )
        self._errors.pop(key, None)

    def keep_error(self, key: str, error: Exception) -> None:
        """Caches the error of a call that has failed and so has no result."""
        self._errors[key] = error

    def get(self, key: str) -> DataProto:
        """Returns the result of the call with this key. Columns with one number per row are copies.

        Raises the call's own error if the call has failed, and DataLostError if the key is unknown."""
        if key in self._errors:
            raise self._errors[key]
        if key not in self._batches:
            raise DataLostError("a result is missing in this process's cache; the process may have been restarted")
        batch = self._batches[key]
        return batch.with_columns({name: column.clone() for name, column in batch.tensors.items() if column.dim() == 1})

    def forget(self, keys: Iterable[str]) -> None:
        """Drops the results and errors of these keys; unknown keys are ignored."""
        for key in keys:
            self._batches.pop(key, None)
            self._errors.pop(key, None)


def _is_mutable(batch: DataProto, name: str) -> bool:
    return any(type(value) not in IMMUTABLE_TYPES for value in batch.objects.get(name, ()))
