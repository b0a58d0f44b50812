"""Results that stay at hand in the processes that made them, for calls there that get them as arguments.

Reading a share from the object store takes longer than a whole call with nothing in it. So the controller names a
result by the number of the call that made it where the same process gets it again, and sends a reference to others.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import ray

from rljob_trainer.cluster.object_store import StoredArgument
from rljob_trainer.data.proto import DataProto
from rljob_trainer.errors import DataLostError

_NUMBERS = count()


class KeptCall:
    """The controller's hold on the results of one call: the processes keep them until nobody has this any more."""

    def __init__(self, forgotten: Sequence[deque[int]]) -> None:
        """`forgotten`: of each process that keeps a result, where to say that it need not any longer."""
        self.number = next(_NUMBERS)
        weakref.finalize(self, _forget, tuple(forgotten), self.number).atexit = False


def _forget(forgotten: Sequence[deque[int]], number: int) -> None:
    for numbers in forgotten:
        numbers.append(number)


@dataclass(frozen=True)
class KeptArgument:
    """Stands for a batch among the arguments of a call: what the receiving process made in the call of this number."""

    number: int


@dataclass(frozen=True)
class ResultArgument:
    """One rank's result of a call among the arguments of another, before it is known who gets it."""

    reference: ray.ObjectRef
    kept: KeptCall
    maker: object
    """The handle of the process that made it."""

    def for_process(self, process: object) -> KeptArgument | StoredArgument:
        """As it travels to a process."""
        return KeptArgument(self.kept.number) if process is self.maker else StoredArgument(self.reference)


class KeptResults:
    """What a process keeps of its own results."""

    def __init__(self) -> None:
        self._batches: dict[int, DataProto] = {}
        self._errors: dict[int, Exception] = {}

    def keep(self, number: int, result: DataProto, as_stored: DataProto) -> None:
        """Keeps a result as others would read it: of what lies in the store, this process maps the same memory."""
        own = [name for name in as_stored.column_names() if as_stored.is_remote(name) and not result.is_remote(name)]
        mapped = as_stored.fetched(own)
        light = {name: mapped[name].clone() for name in mapped.tensors if name not in own}
        self._batches[number] = mapped.with_columns(light)

    def keep_error(self, number: int, error: Exception) -> None:
        """Keeps why there is no result."""
        self._errors[number] = error

    def take(self, number: int) -> DataProto:
        """A result, which stays. Raises what the call that should have made it raised, and DataLostError for one that
        this process does not know."""
        if number in self._errors:
            raise self._errors[number]
        if number not in self._batches:
            raise DataLostError("a result that this process should have kept is not there; it may have been restarted")
        return self._batches[number]

    def forget(self, numbers: Iterable[int]) -> None:
        """Lets results go, whether they are here or not."""
        for number in numbers:
            self._batches.pop(number, None)
            self._errors.pop(number, None)
