"""The worker processes of one pool: starts, builds, calls, monitors and ends them together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import ray
from ray.actor import ActorHandle, ActorMethod
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.register import registrations
from rljob_trainer.dispatch.split_gather import SplitCall
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.host_ledger import HostAccount
from rljob_trainer.errors import CallTimeoutError, ResourceError, TrainerError, WorkerDiedError
from rljob_trainer.groups.calls import StartedCall
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.liveness import LivenessWatch
from rljob_trainer.groups.nsys import new_session, under_nsys
from rljob_trainer.groups.object_store import sent_arguments
from rljob_trainer.groups.ray_session import check_connected
from rljob_trainer.groups.ray_worker import RayWorker
from rljob_trainer.groups.result_cache import CachedCall, ResultArgument
from rljob_trainer.groups.shared_folders import UnseenFiles
from rljob_trainer.groups.worker_failure import WorkerLocation, failure_cause
from rljob_trainer.groups.worker_side import Call, GroupRecord, ProcessInfo, Returns, task_name
from rljob_trainer.observability.spans import Record
from rljob_trainer.pools.reservation import release_by_id
from rljob_trainer.pools.resource_pool import ResourcePool, Slot
from rljob_trainer.settings import NSYS_SESSION_VARIABLE

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 10.0
"""How long `close` waits for the processes before it kills them."""
MIN_START_SECONDS = 60.0
"""The least timeout for all processes to start and load their libraries. A pool with a longer timeout has that
timeout."""
NAMESPACE = "rljob"
"""Ray namespace of actors that are found by name."""


@dataclass(frozen=True)
class BuildSettings:
    """Settings for building the processes of a pool."""

    device_type: str
    """`cpu` or `cuda`."""
    num_threads: int | None = None
    """CPU threads of each process. None: the cores of a node, divided by the number of processes on it."""
    log_folder: Path | None = None
    """The folder in which each process writes its output to a file; None: output is not redirected."""
    others: tuple[Slot, ...] = ()
    """Slots of the job's other pools; their processes may share the nodes' cores with the processes of this pool."""


class WorkerProcesses:
    """One process per slot of a pool. `start_processes` starts them, then `build` must be called; `attach_processes`
    connects to processes that another program has started and built."""

    def __init__(
        self,
        handles: list[ActorHandle],
        record: GroupRecord | None = None,
        group_ids: Sequence[str] = (),
        start_seconds: float | None = None,
    ) -> None:
        """`handles`: the Ray actors, by rank. For processes that another program has built, pass their `record`. For
        new processes pass `group_ids`, the ids of their placement groups, and `start_seconds`, the timeout until all of
        them have started (None: no timeout)."""
        self.handles = handles
        self.is_attached = record is not None
        self.record = record or GroupRecord((), (), None, tuple(group_ids))
        self.watch = LivenessWatch(handles, self._death_of) if record else None
        self.start_seconds = start_seconds
        self.while_waiting: Callable[[], None] | None = None
        """A function that a thread calls about every second while it waits for a call, and before it starts one."""
        self._executes: dict[tuple[int, str, str], tuple[ActorMethod, ActorMethod]] = {}
        """(rank, role, method) -> the actor's methods `execute` and `execute_by_name`, with the call's name as
        option."""
        self._forgotten: list[deque[str]] = [deque() for _ in handles]
        """By rank: the keys of cached results that its next call will let it drop."""
        self._sending = threading.Lock()
        """Held while a call is sent to its ranks. If two calls were sent at the same time, their order could differ
        between ranks, and their collectives would deadlock."""

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """The roles in the order in which they were built; empty before `build`."""
        return self.record.roles

    def unseen(self, files: Sequence[Path]) -> list[UnseenFiles]:
        """Returns for each process the files that it does not see. Raises WorkerDiedError, and ResourceError if
        processes do not start in time."""
        results = self._started([handle.unseen.remote(files) for handle in self.handles])
        return [_expect(UnseenFiles, each) for each in results]

    def build(self, slots: Sequence[Slot], settings: BuildSettings, roles: Sequence[RoleSpec]) -> None:
        """Builds all roles in all processes, one process per slot.

        If a worker cannot be built, raises the worker's error: a TrainerError unchanged, any other error as
        WorkerError. Also raises WorkerDiedError, and ResourceError if processes do not start in time."""
        results = self._started([handle.info.remote() for handle in self.handles])
        infos = tuple(_expect(ProcessInfo, info) for info in results)
        # Stored before the roles are built, so that an error can name a process that dies while it builds them.
        self.record = replace(self.record, infos=infos, log_folder=settings.log_folder)
        all_slots = (*slots, *settings.others)
        num_on_node = [sum(other.node_id == slot.node_id for other in all_slots) for slot in slots]
        references = []
        for slot in slots:
            num_cores = max(1, infos[slot.rank].num_cores // num_on_node[slot.rank])
            context = WorkerContext(
                rank=slot.rank,
                world_size=len(slots),
                local_rank=slot.local_rank,
                node_rank=slot.node_rank,
                master_address=infos[0].address,
                master_port=infos[0].free_port,
                device_type=settings.device_type,
                num_threads=settings.num_threads or num_cores,
                device_number=infos[slot.rank].device_number,
            )
            log_file = self.record.log_file(slot.rank)
            references.append(self.handles[slot.rank].build.remote(context, tuple(roles), log_file))
        self._on_all("build", references)
        meshes = sorted(
            {(role.name, each.mesh) for role in roles for each in registrations(role.worker_class).values()}
        )
        results = self._on_all("build", [handle.mesh_positions.remote(meshes) for handle in self.handles])
        by_rank = [cast("list[MeshPosition | TrainerError]", each) for each in results]
        positions = {mesh: tuple(of_rank[index] for of_rank in by_rank) for index, mesh in enumerate(meshes)}
        self.record = replace(self.record, roles=tuple(roles), positions=positions)
        self._on_all("build", [self.handles[0].keep_record.remote(self.record)])
        self.watch = LivenessWatch(self.handles, self._death_of)

    def host_accounts(self) -> list[HostAccount]:
        """Returns the host memory that each built process keeps. Raises WorkerDiedError."""
        results = self._on_all("host memory of the workers", [each.host_account.remote() for each in self.handles])
        return [_expect(HostAccount, each) for each in results]

    def cached_call(self, ranks: Iterable[int]) -> CachedCall:
        """Returns a handle for a new call whose results these ranks will cache."""
        return CachedCall([self._forgotten[rank] for rank in ranks])

    def start(
        self,
        role: str,
        method: str,
        call: SplitCall,
        returns: Mapping[int, Returns],
        ranks: Sequence[int],
        cached: CachedCall | None = None,
    ) -> StartedCall:
        """Sends a call of a role's method to its ranks and returns without waiting for the results.

        `ranks`: the ranks of the calling group among all processes, in its order. The ranks in `call` and `returns` are
        indices of this list. `returns`: how each rank returns its result. `cached`: if set, ranks that store their
        result also cache it, under this handle's key.

        Raises WorkerDiedError if a process is known to be dead."""
        check_connected(f"{role}.{method}")
        self.raise_if_dead()
        sent = [sent_arguments(share) for share in call.shares]
        calls: dict[tuple[object, ...], Call] = {}
        kind_of_rank: dict[int, tuple[object, ...]] = {}
        for rank, share in call.share_of_rank.items():
            handle = self.handles[ranks[rank]]
            # All ranks of a share get the same Call, unless an argument is a result of an earlier call: the rank that
            # has computed this result reads it from its cache, the others read it from the store.
            has_results = any(isinstance(each, ResultArgument) for each in sent[share])
            kind = (share, returns[rank], rank if has_results else None)
            if kind not in calls:
                arguments = tuple(
                    each.for_process(handle) if isinstance(each, ResultArgument) else each for each in sent[share]
                )
                keep_as = cached.key if cached and returns[rank] is Returns.STORED else None
                calls[kind] = Call(role, method, arguments, returns[rank], keep_as, has_results)
            kind_of_rank[rank] = kind
        with self._sending:
            references = {rank: self._remote(ranks[rank], calls[kind]) for rank, kind in kind_of_rank.items()}
        return StartedCall(
            f"{role}.{method}", references, lambda rank: self.location_of(ranks[rank]), self.raise_if_dead
        )

    def mesh_positions(self, role: str, mesh: str) -> list[MeshPosition]:
        """Returns the position of each rank in a mesh that a method of the role names. If a worker could not compute
        its position, raises the worker's error."""
        positions = []
        for reported in self.record.positions.get((role, mesh), ()):
            if isinstance(reported, TrainerError):
                raise reported
            positions.append(reported)
        return positions

    def raise_if_dead(self) -> None:
        """Calls `while_waiting`, and raises WorkerDiedError if any process has died, even if no call waits for this
        process. Waiting calls do this every second."""
        if self.while_waiting is not None:
            self.while_waiting()
        if self.watch is not None:
            self.watch.raise_if_dead()

    def drop_spans(self) -> None:
        """Drops what the processes have recorded, without waiting for them: it is done before their next call."""
        for handle in self.handles:
            handle.drop_spans.remote()

    def take_spans(self) -> list[tuple[str, list[Record]]]:
        """Returns for each rank its node's address and what it has recorded since the last call. Raises
        WorkerDiedError."""
        spans = self._on_all("spans of the workers", [handle.take_spans.remote() for handle in self.handles])
        return [(info.address, _expect(list, taken)) for info, taken in zip(self.record.infos, spans, strict=True)]

    def location_of(self, rank: int) -> WorkerLocation:
        """Returns where a rank runs; an empty location before the processes have reported theirs."""
        if not self.record.infos:
            return WorkerLocation()
        info = self.record.infos[rank]
        roles = tuple(role.name for role in self.roles)
        return WorkerLocation(
            process=info.process_id,
            address=info.address,
            roles=roles,
            log_file=self.record.log_file(rank),
            node_id=info.node_id,
            memory_kills=info.memory_kills,
            pod=info.pod,
            node_name=info.node_name,
        )

    def close(self) -> None:
        """Ends the watch and all processes: asks the processes to close if they are built, then kills them. Without a
        connection to Ray, only ends the watch.

        After `attach_processes` it also releases the placement groups of the processes, because the program that
        reserved them may no longer exist."""
        if self.watch is not None:
            self.watch.close()
        if not ray.is_initialized():
            return
        if self.roles:
            try:
                ray.get([handle.close.remote() for handle in self.handles], timeout=CLOSE_TIMEOUT_SECONDS)
            except RayError:
                log.debug("not all workers have closed; killing them")
        for handle in self.handles:
            ray.kill(handle)
        if self.is_attached:
            release_by_id(self.record.group_ids)

    def _remote(self, rank: int, call: Call) -> ray.ObjectRef:
        """Sends a call to a rank, in the form that costs least, with the keys of cached results that the rank can
        drop."""
        forgotten = _emptied(self._forgotten[rank])
        key = (rank, call.role, call.method)
        if key not in self._executes:
            handle, name = self.handles[rank], task_name(call.role, call.method)
            self._executes[key] = handle.execute.options(name=name), handle.execute_by_name.options(name=name)
        execute, execute_by_name = self._executes[key]
        if forgotten:
            return execute.remote(call.serialized(), forgotten)
        return execute_by_name.remote() if call.needs_only_its_name else execute.remote(call.serialized())

    def _death_of(self, rank: int, error: RayError) -> WorkerDiedError:
        location = self.location_of(rank)
        cause = failure_cause(error, location)
        died = WorkerDiedError(f"worker rank {rank} ({location}) died: {cause}{location.log_hint}")
        died.known_cause = cause.known_cause
        died.worker = location.failed_worker(rank)
        return died

    def _started(self, references: list[ray.ObjectRef]) -> list[object]:
        what = "start of the workers"
        try:
            started = StartedCall(what, dict(enumerate(references)), self.location_of, self.raise_if_dead)
            return started.results(self.start_seconds)
        except CallTimeoutError:
            _, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            raise ResourceError(
                f"{what}: {len(waiting)} of {len(references)} processes have not started within "
                f"{self.start_seconds:g} s; check whether other processes use the pool's resources, or whether the "
                "pool was released"
            ) from None

    def _on_all(self, what: str, references: list[ray.ObjectRef]) -> list[object]:
        return StartedCall(what, dict(enumerate(references)), self.location_of, self.raise_if_dead).results()


def start_processes(
    pool: ResourcePool,
    environment: Mapping[str, str],
    name: str | None = None,
    *,
    sees_all_gpus: bool = False,
    nsys_ranks: Collection[int] = (),
) -> WorkerProcesses:
    """Starts a process in every slot of the pool and returns without waiting for them. With a `name` they continue when
    this process ends, and `attach_processes` finds them; without a name they end with this process.

    `environment`: variables that the processes set before they import their libraries. `sees_all_gpus`: see
    RayWorker. `nsys_ranks`: ranks that are started under nsys, which must be installed on their nodes.

    Raises ResourceError if the pool was released, if the name is taken, or if there is a name but the pool ends with
    this process."""
    if name and not pool.settings.is_detached:
        raise ResourceError(
            f"workers {name}: workers with a name continue when this process ends, but pool {pool.settings.name} "
            "ends with it; reserve the pool with is_detached, or pass no name"
        )
    for group in dict.fromkeys(slot.group.id for slot in pool.slots()):
        if placement_group_table(PlacementGroup(group))["state"] == "REMOVED":
            raise ResourceError(f"pool {pool.settings.name}: was released; reserve it again")
    resources = pool.process_resources
    actor_class = ray.remote(RayWorker)
    name_options: list[dict[str, str]] = [
        {"name": _actor_name(name, slot.rank), "namespace": NAMESPACE, "lifetime": "detached"} if name else {}
        for slot in pool.slots()
    ]
    handles: list[ActorHandle] = []
    try:
        for slot in pool.slots():
            session = new_session() if slot.rank in nsys_ranks else None
            placed = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle_index)
            options = actor_class.options(
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                memory=resources.memory_bytes or None,
                resources=dict(resources.custom_resources) or None,
                scheduling_strategy=placed,
                runtime_env=under_nsys(session) if session else None,
                **name_options[slot.rank],
            )
            variables = dict(environment) | ({NSYS_SESSION_VARIABLE: session} if session else {})
            handles.append(options.remote(variables, sees_all_gpus=sees_all_gpus))
    except ValueError as error:
        for handle in handles:
            ray.kill(handle)
        raise ResourceError(
            f"workers {name}: cannot be started ({' '.join(str(error).split()):.200}); if workers of this name exist, "
            "attach to them, or choose another name"
        ) from error
    return WorkerProcesses(
        handles, group_ids=pool.group_ids, start_seconds=max(pool.settings.timeout_seconds, MIN_START_SECONDS)
    )


def attach_processes(name: str, timeout_seconds: float = 60.0) -> WorkerProcesses:
    """Connects to processes that another program has started under a name and built. Raises ResourceError if they do
    not exist or are not built, or if rank 0 is busy for `timeout_seconds`."""
    try:
        first = ray.get_actor(_actor_name(name, 0), NAMESPACE)
        record = ray.get(first.kept_record.remote(), timeout=timeout_seconds)
        if not isinstance(record, GroupRecord):
            raise ResourceError(f"workers {name}: not built yet; attach after they are built")
        others = [ray.get_actor(_actor_name(name, rank), NAMESPACE) for rank in range(1, len(record.infos))]
    except GetTimeoutError as error:
        raise ResourceError(
            f"workers {name}: rank 0 has been busy with another call for {timeout_seconds:g} s; wait until the call "
            "ends, or pass a longer timeout"
        ) from error
    except (ValueError, RayError) as error:
        raise ResourceError(
            f"workers {name}: not all of them exist ({' '.join(str(error).split()):.200}); start them again"
        ) from error
    return WorkerProcesses([first, *others], record)


def _emptied(keys: deque[str]) -> list[str]:
    """Removes and returns the current keys. Other threads may add keys at the same time."""
    return [keys.popleft() for _ in range(len(keys))]


def _actor_name(name: str, rank: int) -> str:
    return f"{name}-{rank}"


def _expect(kind: type[T], value: object) -> T:
    assert isinstance(value, kind)
    return value
