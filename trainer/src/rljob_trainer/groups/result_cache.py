"""A cache of results in the processes that computed them, for later calls that get them as arguments.

Reading a worker's part of a batch from the object store takes longer than a whole call without data. So if the same
process needs the result again, the controller sends only the key of the call that computed it; other processes get a
reference.
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
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


class CachedCall:
    """The controller's handle for the cached results of one call. The processes keep them until this object is garbage
    collected."""

    def __init__(self, forgotten: Sequence[deque[str]]) -> None:
        """`forgotten`: for each process that caches a result, the queue of keys that it should drop."""
        self.key = f"{_this_process()}-{next(_NUMBERS)}"
        """Unique for this call, even if several controllers call the same processes."""
        weakref.finalize(self, _forget, tuple(forgotten), self.key).atexit = False


@cache
def _this_process() -> str:
    return uuid4().hex[:12]


def _forget(forgotten: Sequence[deque[str]], key: str) -> None:
    for keys in forgotten:
        keys.append(key)


@dataclass(frozen=True)
class CachedArgument:
    """A placeholder for a batch argument: the result that the receiving process computed in the call with this key."""

    key: str


@dataclass(frozen=True)
class ResultArgument:
    """One rank's result of a call, used as an argument of another call whose receiver is not yet known."""

    reference: ray.ObjectRef
    kept: CachedCall
    maker: object
    """The actor handle of the process that computed it."""

    def for_process(self, process: object) -> CachedArgument | StoredArgument:
        """Returns the form in which it is sent to a process."""
        return CachedArgument(self.kept.key) if process is self.maker else StoredArgument(self.reference)


class ResultCache:
    """The cache of a process for its own results."""

    def __init__(self) -> None:
        self._batches: dict[str, DataProto] = {}
        self._errors: dict[str, Exception] = {}

    def keep(self, key: str, result: DataProto, as_stored: DataProto) -> None:
        """Caches a result as other processes would read it. Columns in the object store share memory with the store.
        Object columns with mutable values are not cached: they are read from the store each time."""
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
        """Caches the error of a call that has no result."""
        self._errors[key] = error

    def take(self, key: str) -> DataProto:
        """Returns a result, which stays in the cache; columns with one number per row are copies. Raises the error of
        the call that should have computed it, and DataLostError if the key is unknown."""
        if key in self._errors:
            raise self._errors[key]
        if key not in self._batches:
            raise DataLostError("a result is missing in this process's cache; the process may have been restarted")
        batch = self._batches[key]
        return batch.with_columns({name: column.clone() for name, column in batch.tensors.items() if column.dim() == 1})

    def forget(self, keys: Iterable[str]) -> None:
        """Drops results; unknown keys are ignored."""
        for key in keys:
            self._batches.pop(key, None)
            self._errors.pop(key, None)


def _is_mutable(batch: DataProto, name: str) -> bool:
    return any(type(value) not in IMMUTABLE for value in batch.objects.get(name, ()))
