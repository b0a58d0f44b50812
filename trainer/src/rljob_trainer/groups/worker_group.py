"""Worker groups: the controller's view of a role, whose methods run on all of its ranks.

A `WorkerGroup` is one role on the processes of a pool. It has the registered methods of the role's worker class, each
taking the whole batch and giving back the whole result.
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
from rljob_trainer.groups.kept_results import ResultArgument
from rljob_trainer.groups.object_store import TRAFFIC, check_travelling, num_batch_bytes
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.groups.worker_side import Returns
from rljob_trainer.pools.resource_pool import ResourcePool
from rljob_trainer.settings import worker_environment

T = TypeVar("T")


class WorkerGroup:
    """One role on a set of processes; has one attribute per registered method of the worker class.

    Calls go to every process in the order in which they are made, those of other roles of the same processes included;
    views of different roles may be called from different threads."""

    def __init__(
        self, processes: WorkerProcesses, role: str, worker_class: type[Worker], ranks: Sequence[int] | None = None
    ) -> None:
        """`ranks` of the processes, all by default; the first of them is rank 0 of this group's calls.

        Raises DispatchError for a registered method whose name a group uses itself."""
        self._processes = processes
        self._role = role
        self._worker_class = worker_class
        self._ranks = tuple(range(len(processes.handles)) if ranks is None else ranks)
        self._positions_by_mesh: dict[str, list[MeshPosition]] = {}
        for name, registration in registrations(worker_class).items():
            if hasattr(self, name):
                raise DispatchError(
                    f"{worker_class.__name__}.{name}: worker groups have something of their own that is called so; "
                    "give the method another name"
                )
            method: Callable[..., object] = partial(self._call, name, registration)
            setattr(self, name, method)

    if not TYPE_CHECKING:
        # Type checkers are to refuse what is not there.
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
        """This group under the type of a Protocol with (some of) its methods, so that type checkers know them.

        Raises DispatchError where the Protocol and the worker class differ (see `check_protocol`)."""
        check_protocol(protocol, self._worker_class)
        return cast(T, self)

    def sub_group(self, start: int, stop: int) -> WorkerGroup:
        """The same role on ranks start..stop-1 of this group. Raises DispatchError for ranks that are not there; its
        calls raise it for a mesh of which the range has a share without the rank that answers for it."""
        if not 0 <= start < stop <= len(self._ranks):
            raise DispatchError(
                f"{self._role}: no ranks {start} to {stop - 1} (there are: 0 to {len(self._ranks) - 1})"
            )
        return WorkerGroup(self._processes, self._role, self._worker_class, self._ranks[start:stop])

    def _call(self, method: str, registration: Registration, /, *arguments: object, **named: object) -> object:
        """Raises DispatchError for arguments that the mode cannot split or that cannot travel, with the method's name;
        then no rank is called. TrainerError of the workers, unless the method does not block."""
        where = f"{self._role}.{method}"
        if named:
            arguments = self._in_order(method, arguments, named)
        positions = self._mesh_positions(registration.mesh)
        try:
            mode = dispatch_mode(registration.dispatch)
            call = self._split(mode, positions, arguments)
            if not isinstance(call, SplitCall):
                raise DispatchError(f"its split must give a SplitCall (got {type(call).__name__})")
            call.check(len(positions))
            if registration.execute is Execute.RANK_ZERO:
                call = call.only_rank_zero()
            for share in call.shares:
                check_travelling([argument for argument in share if not isinstance(argument, ResultArgument)])
        except DispatchError as error:
            raise DispatchError(f"{where}: {registration.dispatch}: {error}") from None
        is_passed_on = mode.passes_on and not call.num_padded_rows and not registration.blocking
        answering = _answering(positions, call) if is_passed_on else ()
        kept = self._processes.kept_call(self._ranks[rank] for rank in answering) if answering else None
        ranks = self._processes.start(
            self._role, method, call, _returns(mode, registration, positions, call), self._ranks, kept
        )

        def gather(results: list[object]) -> object:
            TRAFFIC.received_bytes += num_batch_bytes(results)
            try:
                return mode.gather(positions, call, results)
            except (DataError, DispatchError) as error:
                raise type(error)(f"{where}: {registration.dispatch}: {error}") from None

        if registration.blocking:
            return Pending(ranks, gather).result()
        handles = self._processes.handles
        parts = [ResultArgument(ranks.references[rank], kept, handles[self._ranks[rank]]) for rank in answering if kept]
        return Pending(ranks, gather, tuple(parts))

    def _split(self, mode: DispatchMode, positions: list[MeshPosition], arguments: Arguments) -> SplitCall:
        """Results of other calls that are not waited for are passed on by reference where they are split alike."""
        num_data_ranks = positions[0].num_data_ranks
        if mode.passes_on and any(isinstance(argument, Pending) for argument in arguments):
            shares = [_shares_of(argument, num_data_ranks) for argument in arguments]
            if all(share is not None for share in shares):
                columns = [share for share in shares if share is not None]
                by_rank = tuple(tuple(column[part] for column in columns) for part in range(num_data_ranks))
                return SplitCall(by_rank, {rank: position.data_rank for rank, position in enumerate(positions)})
        waited = tuple(argument.result() if isinstance(argument, Pending) else argument for argument in arguments)
        return mode.split(positions, waited)

    def _in_order(self, method: str, arguments: Arguments, named: Mapping[str, object]) -> Arguments:
        """Named arguments at their places. Raises TypeError as Python does for a call that does not fit."""
        signature = inspect.signature(vars(self._worker_class).get(method) or getattr(self._worker_class, method))
        bound = signature.bind(None, *arguments, **named)
        names = list(signature.parameters)
        last = max(names.index(name) for name in bound.arguments)
        # Only the gaps: a default after the last one given is for the worker, and no mode has to split it.
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in names[1 : last + 1])

    def _mesh_positions(self, mesh: str) -> list[MeshPosition]:
        """Computed once per mesh from what all ranks of the role have said when they were built."""
        if mesh not in self._positions_by_mesh:
            whole = self._processes.mesh_positions(self._role, mesh)
            check_positions(f"{self._role}: mesh {mesh}", whole)
            self._positions_by_mesh[mesh] = positions_of(f"{self._role}: mesh {mesh}", whole, self._ranks)
        return self._positions_by_mesh[mesh]


def spawn(processes: WorkerProcesses) -> dict[str, WorkerGroup]:
    """A view per role of processes that have been built, in the order of the roles."""
    return {role.name: WorkerGroup(processes, role.name, role.worker_class) for role in processes.roles}


@contextmanager
def built_groups(
    pool: ResourcePool, settings: BuildSettings, roles: Sequence[RoleSpec]
) -> Iterator[dict[str, WorkerGroup]]:
    """Starts a process in every slot of a pool, builds all roles in each, and ends them afterwards. By role.

    Raises what a worker raises while it is built, WorkerDiedError, ResourceError."""
    processes = start_processes(pool, worker_environment(settings.device_type, settings.num_threads))
    try:
        processes.build(pool.slots(), settings, roles)
        yield spawn(processes)
    finally:
        processes.close()


def _returns(
    mode: DispatchMode, registration: Registration, positions: list[MeshPosition], call: SplitCall
) -> dict[int, Returns]:
    """Peers that do not answer for their share send nothing, in the modes that split by data rank."""
    kept = Returns.STORED if mode.keeps_data else Returns.VALUE
    if not mode.by_data_rank or registration.execute is Execute.RANK_ZERO:
        return dict.fromkeys(call.share_of_rank, kept)
    return {rank: kept if positions[rank].is_collected else Returns.NOTHING for rank in call.share_of_rank}


def _answering(positions: list[MeshPosition], call: SplitCall) -> tuple[int, ...]:
    """The rank that answers for each data rank."""
    ranks = [rank for rank in call.share_of_rank if positions[rank].is_collected]
    return tuple(sorted(ranks, key=lambda rank: positions[rank].data_rank))


def _shares_of(argument: object, num_data_ranks: int) -> list[object] | None:
    """One argument by data rank, None where that takes knowing its rows."""
    if isinstance(argument, Pending):
        return list(argument.parts) if len(argument.parts) == num_data_ranks else None
    return None if isinstance(argument, DataProto) else [argument] * num_data_ranks
