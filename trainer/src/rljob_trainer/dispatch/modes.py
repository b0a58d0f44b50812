"""Dispatch modes by name: the built-in ones, and those that users add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from rljob_trainer.dispatch import split_gather
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.split_gather import Arguments, SplitCall
from rljob_trainer.errors import DispatchError


class Dispatch(StrEnum):
    """How arguments reach the workers and what the caller gets back."""

    ONE_TO_ALL = "ONE_TO_ALL"
    """Every worker gets the same arguments; the caller gets a list with one result per worker."""
    ALL_TO_ALL = "ALL_TO_ALL"
    """Every argument is a list with one element per worker; so is the result."""
    RANK_ZERO = "RANK_ZERO"
    """Only worker 0 runs; the caller gets its result."""
    DP_COMPUTE = "DP_COMPUTE"
    """Every argument is a list with one element per data-parallel rank; so is the result."""
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    """DataProto arguments are split by data-parallel rank, others are copied; the result is put together again."""
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    """As DP_COMPUTE_PROTO; the first argument is a function, which every worker gets."""
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    """Arguments as DP_COMPUTE_PROTO; the result is a dictionary of metrics, reduced over the workers."""


class Execute(StrEnum):
    """Which workers run."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"
    """Only worker 0, with its share; the caller gets a list of one result, or its result in the modes that put results
    together."""


Split = Callable[[Sequence[MeshPosition], Arguments], SplitCall]
"""(position of every rank of the group, the caller's arguments) -> what every rank gets."""
Gather = Callable[[Sequence[MeshPosition], SplitCall, Sequence[object]], object]
"""(position of every rank, what the split gave, results of the ranks that ran in the order of their ranks) -> what the
caller gets."""


@dataclass(frozen=True)
class DispatchMode:
    """Both ways of a mode.

    `by_data_rank`: gathering asks only the ranks that answer for a data rank; the others send nothing. `keeps_data`,
    with it: the columns of the workers' batches stay in the object store, and the caller gets references to them."""

    split: Split
    gather: Gather
    by_data_rank: bool = False
    keeps_data: bool = False

    @property
    def passes_on(self) -> bool:
        """Whether the results of the ranks, one after the other, are the whole, and a batch is split into its parts one
        after the other: so what one call has made is what the next one would be given."""
        splits = (split_gather.split_batches, split_gather.split_batches_for_function)
        return self.keeps_data and self.split in splits and self.gather == split_gather.gather_batches


_BUILT_IN: Mapping[str, DispatchMode] = MappingProxyType(
    {
        Dispatch.ONE_TO_ALL: DispatchMode(split_gather.split_one_to_all, split_gather.gather_list),
        Dispatch.ALL_TO_ALL: DispatchMode(split_gather.split_all_to_all, split_gather.gather_list),
        Dispatch.RANK_ZERO: DispatchMode(split_gather.split_rank_zero, split_gather.gather_only),
        Dispatch.DP_COMPUTE: DispatchMode(split_gather.split_lists, split_gather.gather_data_ranks, by_data_rank=True),
        Dispatch.DP_COMPUTE_PROTO: DispatchMode(
            split_gather.split_batches, split_gather.gather_batches, by_data_rank=True, keeps_data=True
        ),
        Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode(
            split_gather.split_batches_for_function, split_gather.gather_batches, by_data_rank=True, keeps_data=True
        ),
        Dispatch.DP_COMPUTE_METRIC: DispatchMode(
            split_gather.split_batches_evenly, split_gather.gather_metrics, by_data_rank=True
        ),
    }
)
_added: dict[str, DispatchMode] = {}


def register_dispatch_mode(
    name: str, split: Split, gather: Gather, *, by_data_rank: bool = False, keeps_data: bool = False
) -> None:
    """Adds a mode under a new name; call it where the worker class is defined, before the class.

    Raises DispatchError for a name that another mode has, and for what is no function."""
    if not isinstance(name, str) or not name:
        raise DispatchError(f"register_dispatch_mode: a mode has a text for its name (seen: {name!r})")
    if not callable(split) or not callable(gather):
        raise DispatchError(f"register_dispatch_mode: mode {name!r} needs two functions (seen: {split!r}, {gather!r})")
    mode = DispatchMode(split, gather, by_data_rank, keeps_data)
    if name in _BUILT_IN or _added.get(name, mode) != mode:
        raise DispatchError(f"register_dispatch_mode: there is a mode {name!r} already; choose another name")
    _added[name] = mode


def dispatch_mode(name: str) -> DispatchMode:
    """The mode of that name. Raises DispatchError for one that is not known here: `register` has checked it where the
    class was defined, which may be another program."""
    if not is_dispatch_mode(name):
        raise DispatchError(f"no dispatch mode is called {name!r} in this process; register_dispatch_mode adds it")
    return _BUILT_IN[name] if name in _BUILT_IN else _added[name]


def is_dispatch_mode(name: str) -> bool:
    """Whether there is a mode of that name."""
    return name in _BUILT_IN or name in _added


def dispatch_mode_names() -> list[str]:
    """All modes, built-in ones first."""
    return [*map(str, _BUILT_IN), *_added]
