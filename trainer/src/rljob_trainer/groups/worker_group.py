"""Worker groups: the controller's view of a role, whose methods run on all of its ranks.

A `WorkerGroup` is one role on the processes of a pool. It has the registered methods of the role's worker class. A
method's dispatch mode (`dispatch.modes`) decides what it takes and returns; by default the whole batch and the whole
result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition, check_positions, positions_of
from rljob_trainer.dispatch.modes import DispatchMode, Execute, dispatch_mode
from rljob_trainer.dispatch.register import Registration, check_protocol, registrations
from rljob_trainer.dispatch.split_gather import Arguments, SplitCall
from rljob_trainer.dispatch.worker import Worker
from rljob_trainer.errors import DataError, DispatchError
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.object_store import TRAFFIC, check_picklable, num_batch_bytes
from rljob_trainer.groups.result_cache import ResultArgument
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.groups.worker_side import Returns
from rljob_trainer.pools.resource_pool import ResourcePool
from rljob_trainer.settings import worker_environment

T = TypeVar("T")


class WorkerGroup:
    """One role on all or some processes of a pool, with one attribute per registered method of the worker class.

    Each process executes one call at a time, in the order in which the calls were made, including calls to its other
    roles. Groups of different roles may be called from different threads."""

    def __init__(
        self, processes: WorkerProcesses, role: str, worker_class: type[Worker], ranks: Sequence[int] | None = None
    ) -> None:
        """`ranks`: the ranks of the processes that belong to this group, all by default. In the group they are numbered
        again from 0, in this order.

        Raises DispatchError for a registered method whose name is an attribute of WorkerGroup itself."""
        self._processes = processes
        self._role = role
        self._worker_class = worker_class
        self._ranks = tuple(range(len(processes.handles)) if ranks is None else ranks)
        self._positions_by_mesh: dict[str, list[MeshPosition]] = {}
        for name, registration in registrations(worker_class).items():
            if hasattr(self, name):
                raise DispatchError(
                    f"{worker_class.__name__}.{name}: WorkerGroup itself has an attribute of this name; rename the "
                    "method"
                )
            method: Callable[..., object] = partial(self._call, name, registration)
            setattr(self, name, method)

    if not TYPE_CHECKING:
        # Hidden from type checkers, so that they reject unknown attributes.
        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            names = ", ".join(registrations(self._worker_class)) or "none"
            raise AttributeError(
                f"{self._role}: {self._worker_class.__name__} has no registered method {name!r} (there are: {names}); "
                "mark it with @register"
            )

    def __repr__(self) -> str:
        ranks = f"ranks {', '.join(map(str, self._ranks))}"
        return f"<WorkerGroup {self._role}: {self._worker_class.__name__}, {ranks} of {len(self._processes.handles)}>"

    def seen_as(self, protocol: type[T]) -> T:
        """Returns this group with the type of a Protocol that has some or all of its methods, for type checkers.

        Raises DispatchError if the Protocol and the worker class differ (see `check_protocol`)."""
        check_protocol(protocol, self._worker_class)
        return cast(T, self)

    def sub_group(self, start: int, stop: int) -> WorkerGroup:
        """Returns a group of the same role with ranks start to stop - 1 of this group. Raises DispatchError for ranks
        that do not exist, and for an empty range. Calls of the returned group raise DispatchError if, for some data
        rank of the mesh, the range lacks the rank that returns the result."""
        if not 0 <= start < stop <= len(self._ranks):
            raise DispatchError(
                f"{self._role}: no ranks {start} to {stop - 1} (there are: 0 to {len(self._ranks) - 1}); choose a "
                f"start of 0 or more, and a greater stop of at most {len(self._ranks)}"
            )
        return WorkerGroup(self._processes, self._role, self._worker_class, self._ranks[start:stop])

    def _call(self, method: str, registration: Registration, /, *arguments: object, **named: object) -> object:
        """Splits the arguments and calls the ranks. A blocking method returns the gathered result, any other a Pending.

        Raises DispatchError with the method's name before any rank is called, if the mode cannot split the arguments or
        they cannot be pickled; TypeError if arguments are passed by name and do not match the parameters;
        WorkerDiedError. A blocking method also raises the errors of `Pending.result`."""
        where = f"{self._role}.{method}"
        if named:
            arguments = self._in_order(method, arguments, named)
        positions = self._mesh_positions(registration.mesh)
        try:
            mode = dispatch_mode(registration.dispatch)
            call = self._split(mode, positions, arguments)
            if not isinstance(call, SplitCall):
                raise DispatchError(f"the mode's split function must return a SplitCall (got {type(call).__name__})")
            call.check(len(positions))
            if registration.execute is Execute.RANK_ZERO:
                call = call.only_rank_zero()
            for share in call.shares:
                check_picklable([argument for argument in share if not isinstance(argument, ResultArgument)])
        except DispatchError as error:
            raise DispatchError(f"{where}: {registration.dispatch}: {error}") from None
        # Whether another call can get each rank's result as an argument, before all ranks have finished.
        can_be_passed_on = mode.can_chain and not call.num_padded_rows and not registration.blocking
        returning = _returning_ranks(positions, call) if can_be_passed_on else ()
        cached = self._processes.cached_call(self._ranks[rank] for rank in returning) if returning else None
        started = self._processes.start(
            self._role, method, call, _returns(mode, registration, positions, call), self._ranks, cached
        )

        def gather(results: list[object]) -> object:
            TRAFFIC.received_bytes += num_batch_bytes(results)
            try:
                return mode.gather(positions, call, results)
            except (DataError, DispatchError) as error:
                raise type(error)(f"{where}: {registration.dispatch}: {error}") from None

        if registration.blocking:
            return Pending(started, gather).result()
        handles = self._processes.handles
        parts = [
            ResultArgument(started.references[rank], cached, handles[self._ranks[rank]]) for rank in returning if cached
        ]
        return Pending(started, gather, tuple(parts))

    def _split(self, mode: DispatchMode, positions: list[MeshPosition], arguments: Arguments) -> SplitCall:
        """Splits the arguments. A pending result of another call that has one part per data rank is passed on by
        reference, without waiting. If this is not possible for all arguments, waits for all pending results first."""
        num_data_ranks = positions[0].num_data_ranks
        if mode.can_chain and any(isinstance(argument, Pending) for argument in arguments):
            shares = [_shares_of(argument, num_data_ranks) for argument in arguments]
            if all(share is not None for share in shares):
                columns = [share for share in shares if share is not None]
                by_rank = tuple(tuple(column[part] for column in columns) for part in range(num_data_ranks))
                return SplitCall(by_rank, {rank: position.data_rank for rank, position in enumerate(positions)})
        known = tuple(argument.result() if isinstance(argument, Pending) else argument for argument in arguments)
        return mode.split(positions, known)

    def _in_order(self, method: str, arguments: Arguments, named: Mapping[str, object]) -> Arguments:
        """Returns the arguments in the order of the method's parameters. `named`: the arguments that were passed by
        name. Raises TypeError, as Python does, if they do not match the parameters."""
        signature = inspect.signature(vars(self._worker_class).get(method) or getattr(self._worker_class, method))
        bound = signature.bind(None, *arguments, **named)
        names = list(signature.parameters)
        last = max(names.index(name) for name in bound.arguments)
        # Defaults only fill gaps between arguments that were passed. The worker itself fills in the defaults after the
        # last one, so that no mode has to split them.
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in names[1 : last + 1])

    def _mesh_positions(self, mesh: str) -> list[MeshPosition]:
        """Returns the position of each rank of this group in a mesh of the role. Computed once per mesh, from the
        positions that the processes reported when they were built."""
        if mesh not in self._positions_by_mesh:
            of_all_ranks = self._processes.mesh_positions(self._role, mesh)
            check_positions(f"{self._role}: mesh {mesh}", of_all_ranks)
            self._positions_by_mesh[mesh] = positions_of(f"{self._role}: mesh {mesh}", of_all_ranks, self._ranks)
        return self._positions_by_mesh[mesh]


def spawn(processes: WorkerProcesses) -> dict[str, WorkerGroup]:
    """Returns one group per role, by name, for processes that are already built."""
    return {role.name: WorkerGroup(processes, role.name, role.worker_class) for role in processes.roles}


@contextmanager
def built_groups(
    pool: ResourcePool, settings: BuildSettings, roles: Sequence[RoleSpec]
) -> Iterator[dict[str, WorkerGroup]]:
    """Starts a process in every slot of a pool, builds all roles in each process, and yields the groups by role name.
    Ends the processes afterwards.

    If a worker cannot be built, raises the worker's error: a TrainerError unchanged, any other error as WorkerError.
    Also raises WorkerDiedError and ResourceError."""
    processes = start_processes(pool, worker_environment(settings.device_type, settings.num_threads))
    try:
        processes.build(pool.slots(), settings, roles)
        yield spawn(processes)
    finally:
        processes.close()


def _returns(
    mode: DispatchMode, registration: Registration, positions: list[MeshPosition], call: SplitCall
) -> dict[int, Returns]:
    """Returns for each rank how it returns its result. In modes that split by data rank, only one rank per share
    returns the result; the other ranks with this share return nothing."""
    form = Returns.STORED if mode.keeps_data else Returns.VALUE
    if not mode.by_data_rank or registration.execute is Execute.RANK_ZERO:
        return dict.fromkeys(call.share_of_rank, form)
    return {rank: form if positions[rank].is_collected else Returns.NOTHING for rank in call.share_of_rank}


def _returning_ranks(positions: list[MeshPosition], call: SplitCall) -> tuple[int, ...]:
    """Returns for each data rank the rank that returns its result."""
    ranks = [rank for rank in call.share_of_rank if positions[rank].is_collected]
    return tuple(sorted(ranks, key=lambda rank: positions[rank].data_rank))


def _shares_of(argument: object, num_data_ranks: int) -> list[object] | None:
    """Returns the share of each data rank of one argument; None if the share cannot be known without a batch's data."""
    if isinstance(argument, Pending):
        return list(argument.parts) if len(argument.parts) == num_data_ranks else None
    return None if isinstance(argument, DataProto) else [argument] * num_data_ranks
