"""Dispatch modes by name: the built-in modes, and a registry for user-defined ones."""

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
    """How arguments are split over the workers, and how their results are gathered for the caller."""

    ONE_TO_ALL = "ONE_TO_ALL"
    """Every worker gets the same arguments; the caller gets a list with one result per worker."""
    ALL_TO_ALL = "ALL_TO_ALL"
    """Every argument and the result are lists with one element per worker."""
    RANK_ZERO = "RANK_ZERO"
    """Only worker 0 runs; the caller gets its result."""
    DP_COMPUTE = "DP_COMPUTE"
    """Every argument and the result are lists with one element per data-parallel rank."""
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    """DataProto arguments are split by data-parallel rank (with padding rows if their number is not divisible), every
    worker gets all other arguments; the caller gets the concatenated results without the padding rows. An argument may
    also be a list with one DataProto per data-parallel rank, of any lengths."""
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    """As DP_COMPUTE_PROTO; the first argument is a function, which every worker gets."""
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    """Arguments as for DP_COMPUTE_PROTO, but without padding rows: the number of rows must be divisible. The result is
    a dictionary of metrics, reduced over the data-parallel ranks."""


class Execute(StrEnum):
    """Which workers run."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"
    """Only worker 0 runs, with its share. In modes that return a list the caller gets a list with its result, in all
    other modes the result itself."""


Split = Callable[[Sequence[MeshPosition], Arguments], SplitCall]
"""(position of every rank of the group, the caller's arguments) -> the arguments of every rank."""
Gather = Callable[[Sequence[MeshPosition], SplitCall, Sequence[object]], object]
"""(position of every rank, the split call, results of the ranks that ran, in the order of the ranks) -> the caller's
result."""


@dataclass(frozen=True)
class DispatchMode:
    """The split and gather functions of a mode.

    `by_data_rank`: only one rank per data rank returns a result; the other ranks with the same share return nothing.
    `keeps_data`: the result of every rank is a DataProto; its columns stay in the object store, except those with one
    number per row, and the caller gets references to them."""

    split: Split
    gather: Gather
    by_data_rank: bool = False
    keeps_data: bool = False

    @property
    def can_chain(self) -> bool:
        """Whether split and gather are inverse: the result is the concatenation of the ranks' results, and the split
        cuts a batch into the same consecutive parts. Then a rank's result of one call can be its argument of the next
        call without gathering."""
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
    """Adds a mode under a new name. Call it in the module of the worker class, before the class. A second call with the
    same arguments has no effect.

    Raises DispatchError if another mode has the name, if the name is empty or not a string, or if `split` or `gather`
    is not a function."""
    if not isinstance(name, str) or not name:
        raise DispatchError(f"register_dispatch_mode: the name of a mode must be a non-empty string (seen: {name!r})")
    if not callable(split) or not callable(gather):
        raise DispatchError(f"register_dispatch_mode: mode {name!r} needs two functions (seen: {split!r}, {gather!r})")
    mode = DispatchMode(split, gather, by_data_rank, keeps_data)
    if name in _BUILT_IN or _added.get(name, mode) != mode:
        raise DispatchError(f"register_dispatch_mode: mode {name!r} already exists; choose another name")
    _added[name] = mode


def dispatch_mode(name: str) -> DispatchMode:
    """Returns the mode of that name.

    Raises DispatchError if this process does not know the name. `register` has checked the name, but perhaps in another
    process: the one that defined the worker class."""
    if not is_dispatch_mode(name):
        raise DispatchError(
            f"unknown dispatch mode {name!r} in this process; add it with register_dispatch_mode in the "
            "module of the worker class"
        )
    return _BUILT_IN[name] if name in _BUILT_IN else _added[name]


def is_dispatch_mode(name: str) -> bool:
    """Whether there is a mode of that name."""
    return name in _BUILT_IN or name in _added


def dispatch_mode_names() -> list[str]:
    """Returns the names of all modes, built-in ones first."""
    return [*map(str, _BUILT_IN), *_added]
