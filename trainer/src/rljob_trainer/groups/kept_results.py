"""Results that stay at hand in the processes that made them, for calls there that get them as arguments.

Reading a share from the object store takes longer than a whole call with nothing in it. So the controller names a
result by the key of the call that made it where the same process gets it again, and sends a reference to others.
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


class KeptCall:
    """The controller's hold on the results of one call: the processes keep them until nobody has this any more."""

    def __init__(self, forgotten: Sequence[deque[str]]) -> None:
        """`forgotten`: of each process that keeps a result, where to say that it need not any longer."""
        self.key = f"{_this_process()}-{next(_NUMBERS)}"
        """Of this call, also where several controllers call the same processes."""
        weakref.finalize(self, _forget, tuple(forgotten), self.key).atexit = False


@cache
def _this_process() -> str:
    return uuid4().hex[:12]


def _forget(forgotten: Sequence[deque[str]], key: str) -> None:
    for keys in forgotten:
        keys.append(key)


@dataclass(frozen=True)
class KeptArgument:
    """Stands for a batch among the arguments of a call: what the receiving process made in the call of this key."""

    key: str


@dataclass(frozen=True)
class ResultArgument:
    """One rank's result of a call among the arguments of another, before it is known who gets it."""

    reference: ray.ObjectRef
    kept: KeptCall
    maker: object
    """The handle of the process that made it."""

    def for_process(self, process: object) -> KeptArgument | StoredArgument:
        """As it travels to a process."""
        return KeptArgument(self.kept.key) if process is self.maker else StoredArgument(self.reference)


class KeptResults:
    """What a process keeps of its own results."""

    def __init__(self) -> None:
        self._batches: dict[str, DataProto] = {}
        self._errors: dict[str, Exception] = {}

    def keep(self, key: str, result: DataProto, as_stored: DataProto) -> None:
        """Keeps a result as others would read it: of what lies in the store, this process maps the same memory. What
        somebody could change, values of object columns, is left there, to be read anew each time."""
        own = [
            name
            for name in as_stored.column_names()
            if as_stored.is_remote(name) and not result.is_remote(name) and not _is_mutable(result, name)
        ]
        mapped = as_stored.fetched(own)
        light = [name for name in mapped.tensors if name not in own]
        self._batches[key] = mapped.with_columns({name: mapped[name].detach().cpu().clone() for name in light})
        self._errors.pop(key, None)

    def keep_error(self, key: str, error: Exception) -> None:
        """Keeps why there is no result."""
        self._errors[key] = error

    def take(self, key: str) -> DataProto:
        """A result, which stays; columns with one number per row are copies. Raises what the call that should have made
        it raised, and DataLostError for one that this process does not know."""
        if key in self._errors:
            raise self._errors[key]
        if key not in self._batches:
            raise DataLostError("a result that this process should have kept is not there; it may have been restarted")
        batch = self._batches[key]
        return batch.with_columns({name: column.clone() for name, column in batch.tensors.items() if column.dim() == 1})

    def forget(self, keys: Iterable[str]) -> None:
        """Lets results go, whether they are here or not."""
        for key in keys:
            self._batches.pop(key, None)
            self._errors.pop(key, None)


def _is_mutable(batch: DataProto, name: str) -> bool:
    return any(type(value) not in IMMUTABLE for value in batch.objects.get(name, ()))
