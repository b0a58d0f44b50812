"""The worker processes of one pool: starts, builds, calls, monitors and ends them together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from rljob_trainer.errors import CallTimeoutError, ResourceError, TrainerError, WorkerDiedError
from rljob_trainer.groups.calls import Ranks
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.liveness import LivenessWatch
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

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 10.0
START_SECONDS = 60.0
"""Minimum timeout for processes to start and load their libraries; longer if the pool's timeout is longer."""
NAMESPACE = "rljob"
"""Ray namespace of actors that are found by name."""


@dataclass(frozen=True)
class BuildSettings:
    """Settings for building all processes. `num_threads`: CPU threads of each process; None: an equal share of its
    node's cores. `log_folder`: if set, each process writes its output to a file there."""

    device_type: str
    num_threads: int | None = None
    log_folder: Path | None = None
    others: tuple[Slot, ...] = ()
    """Slots of other processes, which share the cores of the same nodes."""


class WorkerProcesses:
    """One process per slot of a pool. Created by `start_processes` and then `build`, or by `attach_processes` for
    processes that another program has built."""

    def __init__(
        self,
        handles: list[ActorHandle],
        record: GroupRecord | None = None,
        group_ids: Sequence[str] = (),
        start_seconds: float | None = None,
    ) -> None:
        """For processes that another program has built, pass their `record`. Otherwise pass `group_ids`, the ids of
        their placement groups, and `start_seconds`, the timeout until all of them have started."""
        self.handles = handles
        self.is_attached = record is not None
        self.record = record or GroupRecord((), (), None, tuple(group_ids))
        self.watch = LivenessWatch(handles, self._death_of) if record else None
        self.start_seconds = start_seconds
        self.while_waiting: Callable[[], None] | None = None
        """Called about every second while a call is waited for, in the waiting thread."""
        self._executes: dict[tuple[int, str, str], tuple[ActorMethod, ActorMethod]] = {}
        self._forgotten: list[deque[str]] = [deque() for _ in handles]
        self._sending = threading.Lock()
        """Held while a call is sent to its ranks. If two calls were sent at the same time, their order could differ
        between ranks, and their collectives would deadlock."""

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """The roles in the order in which they were built; empty before `build`."""
        return self.record.roles

    def unseen(self, files: Sequence[Path]) -> list[UnseenFiles]:
        """Returns for each process the files that it does not see. Raises WorkerDiedError, and ResourceError as `build`
        does."""
        results = self._started([handle.unseen.remote(files) for handle in self.handles])
        return [_expect(UnseenFiles, each) for each in results]

    def build(self, slots: Sequence[Slot], settings: BuildSettings, roles: Sequence[RoleSpec]) -> None:
        """Builds all roles in all processes.

        Errors of workers are raised unchanged. Also raises WorkerDiedError, and ResourceError if processes do not start
        in time."""
        results = self._started([handle.info.remote() for handle in self.handles])
        infos = tuple(_expect(ProcessInfo, info) for info in results)
        # Stored before building, so that messages about processes that die during it can name them.
        self.record = replace(self.record, infos=infos, log_folder=settings.log_folder)
        all_slots = (*slots, *settings.others)
        num_on_node = [sum(other.node_id == slot.node_id for other in all_slots) for slot in slots]
        references = []
        for slot in slots:
            cores = max(1, infos[slot.rank].num_cores // num_on_node[slot.rank])
            context = WorkerContext(
                rank=slot.rank,
                world_size=len(slots),
                local_rank=slot.local_rank,
                node_rank=slot.node_rank,
                master_address=infos[0].address,
                master_port=infos[0].free_port,
                device_type=settings.device_type,
                num_threads=settings.num_threads or cores,
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

    def cached_call(self, ranks: Iterable[int]) -> CachedCall:
        """Returns the handle for a call whose results these ranks cache."""
        return CachedCall([self._forgotten[rank] for rank in ranks])

    def start(
        self,
        role: str,
        method: str,
        call: SplitCall,
        returns: Mapping[int, Returns],
        ranks: Sequence[int],
        kept: CachedCall | None = None,
    ) -> Ranks:
        """Sends a call of a role's method to its ranks and returns without waiting for the results.

        The ranks of `call` and `returns` are indices of `ranks`. `returns`: how each rank returns its result. `kept`:
        if set, ranks that store their result also cache it.

        Raises WorkerDiedError if a process is known to be dead."""
        check_connected(f"{role}.{method}")
        self.raise_if_dead()
        sent = [sent_arguments(share) for share in call.shares]
        calls: dict[tuple[object, ...], Call] = {}
        kind_of_rank: dict[int, tuple[object, ...]] = {}
        for rank, share in call.share_of_rank.items():
            handle = self.handles[ranks[rank]]
            # All ranks of a share get the same call, unless an argument is a cached result of one of them, which the
            # others must read from the store.
            has_results = any(isinstance(each, ResultArgument) for each in sent[share])
            kind = (share, returns[rank], rank if has_results else None)
            if kind not in calls:
                arguments = tuple(
                    each.for_process(handle) if isinstance(each, ResultArgument) else each for each in sent[share]
                )
                keep_as = kept.key if kept and returns[rank] is Returns.STORED else None
                calls[kind] = Call(role, method, arguments, returns[rank], keep_as, has_results)
            kind_of_rank[rank] = kind
        with self._sending:
            references = {rank: self._remote(ranks[rank], calls[kind]) for rank, kind in kind_of_rank.items()}
        return Ranks(f"{role}.{method}", references, lambda rank: self.location_of(ranks[rank]), self.raise_if_dead)

    def mesh_positions(self, role: str, mesh: str) -> list[MeshPosition]:
        """Returns the position of each rank in a mesh that a method of the role names. Raises the error of a worker
        that has no position."""
        positions = []
        for reported in self.record.positions.get((role, mesh), ()):
            if isinstance(reported, TrainerError):
                raise reported
            positions.append(reported)
        return positions

    def raise_if_dead(self) -> None:
        """Raises WorkerDiedError if any process has died, even if no call waits for that process. Waiting calls check
        this every second."""
        if self.while_waiting is not None:
            self.while_waiting()
        if self.watch is not None:
            self.watch.raise_if_dead()

    def take_spans(self) -> list[tuple[str, list[Record]]]:
        """Returns for each rank its node's address and its spans since the last call. Raises WorkerDiedError."""
        spans = self._on_all("spans of the workers", [handle.take_spans.remote() for handle in self.handles])
        return [(info.address, _expect(list, taken)) for info, taken in zip(self.record.infos, spans, strict=True)]

    def location_of(self, rank: int) -> WorkerLocation:
        """Returns where a rank runs, and its log file."""
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
        """Ends all processes: first asks built ones to close, then kills all. Never raises.

        After `attach_processes` it also releases the processes' reservation, because the program that made it may no
        longer exist."""
        if self.watch is not None:
            self.watch.close()
        if not ray.is_initialized():
            return
        if self.roles:
            try:
                ray.get([handle.close.remote() for handle in self.handles], timeout=CLOSE_TIMEOUT_SECONDS)
            except RayError:
                log.debug("workers did not close in time; killing them")
        for handle in self.handles:
            ray.kill(handle)
        if self.is_attached:
            release_by_id(self.record.group_ids)

    def _remote(self, rank: int, call: Call) -> ray.ObjectRef:
        """Sends a call to a rank in the cheapest form, together with the keys of cached results that it can drop."""
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
            ranks = Ranks(what, dict(enumerate(references)), self.location_of, self.raise_if_dead)
            return ranks.results(self.start_seconds)
        except CallTimeoutError:
            _, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            raise ResourceError(
                f"{what}: {len(waiting)} of {len(references)} processes have not started within "
                f"{self.start_seconds:g} s; check whether other processes use the pool's resources, or whether the "
                "pool was released"
            ) from None

    def _on_all(self, what: str, references: list[ray.ObjectRef]) -> list[object]:
        return Ranks(what, dict(enumerate(references)), self.location_of, self.raise_if_dead).results()


def start_processes(pool: ResourcePool, environment: Mapping[str, str], name: str | None = None) -> WorkerProcesses:
    """Starts a process in every slot and returns without waiting. With a `name` the processes outlive this one, and
    `attach_processes` finds them; without a name they end with this process.

    Raises ResourceError if the pool was released, if the name is taken, or if there is a name but the pool ends with
    this process."""
    if name and not pool.settings.is_detached:
        raise ResourceError(
            f"workers {name}: named workers must outlive this process, but pool {pool.settings.name} ends with it; "
            "reserve the pool with is_detached, or give no name"
        )
    for group in dict.fromkeys(slot.group.id for slot in pool.slots()):
        if placement_group_table(PlacementGroup(group))["state"] == "REMOVED":
            raise ResourceError(f"pool {pool.settings.name}: was released; reserve it again")
    resources = pool.process_resources
    actor_class = ray.remote(RayWorker)
    found_by: list[dict[str, str]] = [
        {"name": _actor_name(name, slot.rank), "namespace": NAMESPACE, "lifetime": "detached"} if name else {}
        for slot in pool.slots()
    ]
    handles: list[ActorHandle] = []
    try:
        for slot in pool.slots():
            placed = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle_index)
            options = actor_class.options(
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                memory=resources.memory_bytes or None,
                resources=dict(resources.custom_resources) or None,
                scheduling_strategy=placed,
                **found_by[slot.rank],
            )
            handles.append(options.remote(dict(environment)))
    except ValueError as error:
        for handle in handles:
            ray.kill(handle)
        raise ResourceError(
            f"workers {name}: cannot be started ({' '.join(str(error).split()):.200}); if workers of this name exist, "
            "attach to them, or choose another name"
        ) from error
    return WorkerProcesses(
        handles, group_ids=pool.group_ids, start_seconds=max(pool.settings.timeout_seconds, START_SECONDS)
    )


def attach_processes(name: str, timeout_seconds: float = 60.0) -> WorkerProcesses:
    """Connects to processes that were started under a name and built. Raises ResourceError if they do not exist or are
    not built, or if the first one is busy for `timeout_seconds`."""
    try:
        first = ray.get_actor(_actor_name(name, 0), NAMESPACE)
        record = ray.get(first.kept_record.remote(), timeout=timeout_seconds)
        if not isinstance(record, GroupRecord):
            raise ResourceError(f"workers {name}: not built yet; attach after they are built")
        others = [ray.get_actor(_actor_name(name, rank), NAMESPACE) for rank in range(1, len(record.infos))]
    except GetTimeoutError as error:
        raise ResourceError(
            f"workers {name}: the first one has been busy with another call for {timeout_seconds:g} s; wait until the "
            "call ends"
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
