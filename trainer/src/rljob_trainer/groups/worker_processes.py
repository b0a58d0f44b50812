"""The processes of one pool: started, built, called, watched and ended together."""

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
from rljob_trainer.groups.death import Place, cause_of_death
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.kept_results import KeptCall, ResultArgument
from rljob_trainer.groups.liveness import LivenessWatch
from rljob_trainer.groups.object_store import sent_arguments
from rljob_trainer.groups.ray_session import check_connected
from rljob_trainer.groups.ray_worker import RayWorker
from rljob_trainer.groups.shared_folders import UnseenFiles
from rljob_trainer.groups.worker_side import Call, GroupRecord, ProcessInfo, Returns, task_name
from rljob_trainer.observability.spans import Record
from rljob_trainer.pools.reservation import release_by_id
from rljob_trainer.pools.resource_pool import ResourcePool, Slot

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 10.0
START_SECONDS = 60.0
"""How long processes may take to start and load their libraries, at least; longer where the pool may wait longer."""
NAMESPACE = "rljob"
"""Of actors that are found by name."""


@dataclass(frozen=True)
class BuildSettings:
    """What all processes are built with. `num_threads` are CPU threads of each, its share of its node's cores when
    None; what each prints goes to a file in `log_folder` if there is one."""

    device_type: str
    num_threads: int | None = None
    log_folder: Path | None = None
    others: tuple[Slot, ...] = ()
    """Of processes beside these, which share the cores of their nodes."""


class WorkerProcesses:
    """One process per slot of a pool: `start_processes`, then `build`; or `attach_processes` to those of somebody
    else."""

    def __init__(
        self,
        handles: list[ActorHandle],
        record: GroupRecord | None = None,
        group_ids: Sequence[str] = (),
        start_seconds: float | None = None,
    ) -> None:
        """`record` of processes that somebody else has built; `group_ids` of their placement groups otherwise, and how
        long all of them may take to start."""
        self.handles = handles
        self.is_attached = record is not None
        self.record = record or GroupRecord((), (), None, tuple(group_ids))
        self.watch = LivenessWatch(handles, self._death_of) if record else None
        self.start_seconds = start_seconds
        self.while_waiting: Callable[[], None] | None = None
        """Called now and then by who waits for a call, in its thread."""
        self._executes: dict[tuple[int, str, str], tuple[ActorMethod, ActorMethod]] = {}
        self._forgotten: list[deque[str]] = [deque() for _ in handles]
        self._sending = threading.Lock()
        """Held while a call goes to its ranks: with another one in between, the ranks of two collectives would mix."""

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """In the order in which they were built; none before."""
        return self.record.roles

    def unseen(self, files: Sequence[Path]) -> list[UnseenFiles]:
        """Which of the files each process does not see. Raises WorkerDiedError, and ResourceError as `build` does."""
        told = self._started([handle.unseen.remote(files) for handle in self.handles])
        return [_expect(UnseenFiles, each) for each in told]

    def build(self, slots: Sequence[Slot], settings: BuildSettings, roles: Sequence[RoleSpec]) -> None:
        """Builds all roles in all processes.

        Raises what a worker raised, WorkerDiedError, or ResourceError for processes that do not start in time."""
        called = self._started([handle.info.remote() for handle in self.handles])
        infos = tuple(_expect(ProcessInfo, info) for info in called)
        # Known from here on for messages about those that die while they are built.
        self.record = replace(self.record, infos=infos, log_folder=settings.log_folder)
        everybody = (*slots, *settings.others)
        num_on_node = [sum(other.node_id == slot.node_id for other in everybody) for slot in slots]
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
        told = self._on_all("build", [handle.mesh_positions.remote(meshes) for handle in self.handles])
        by_rank = [cast("list[MeshPosition | TrainerError]", each) for each in told]
        positions = {mesh: tuple(of_rank[place] for of_rank in by_rank) for place, mesh in enumerate(meshes)}
        self.record = replace(self.record, roles=tuple(roles), positions=positions)
        self._on_all("build", [self.handles[0].keep_record.remote(self.record)])
        self.watch = LivenessWatch(self.handles, self._death_of)

    def kept_call(self, ranks: Iterable[int]) -> KeptCall:
        """For a call whose results these ranks shall keep at hand."""
        return KeptCall([self._forgotten[rank] for rank in ranks])

    def start(
        self,
        role: str,
        method: str,
        call: SplitCall,
        returns: Mapping[int, Returns],
        ranks: Sequence[int],
        kept: KeptCall | None = None,
    ) -> Ranks:
        """Calls a role's method on the ranks of a split call, which counts within `ranks`; what each returns is said,
        and whether those that return a stored batch keep it.

        Raises WorkerDiedError where a process is known to be gone."""
        check_connected(f"{role}.{method}")
        self.raise_if_dead()
        sent = [sent_arguments(share) for share in call.shares]
        calls: dict[tuple[object, ...], Call] = {}
        kind_of_rank: dict[int, tuple[object, ...]] = {}
        for rank, share in call.share_of_rank.items():
            handle = self.handles[ranks[rank]]
            # Alike for all ranks of a share unless one of them made what the others read.
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
        return Ranks(f"{role}.{method}", references, lambda rank: self.place_of(ranks[rank]), self.raise_if_dead)

    def mesh_positions(self, role: str, mesh: str) -> list[MeshPosition]:
        """Where each rank stands in a mesh that a method of the role names. Raises what a worker has raised."""
        positions = []
        for told in self.record.positions.get((role, mesh), ()):
            if isinstance(told, TrainerError):
                raise told
            positions.append(told)
        return positions

    def raise_if_dead(self) -> None:
        """Raises WorkerDiedError for a process that has ended, whether or not anybody waits for it. Whoever waits for a
        call asks every second."""
        if self.while_waiting is not None:
            self.while_waiting()
        if self.watch is not None:
            self.watch.raise_if_dead()

    def take_spans(self) -> list[tuple[str, list[Record]]]:
        """The address of each rank, and what it did since the last time. Raises WorkerDiedError."""
        spans = self._on_all("spans of the workers", [handle.take_spans.remote() for handle in self.handles])
        return [(info.address, _expect(list, taken)) for info, taken in zip(self.record.infos, spans, strict=True)]

    def place_of(self, rank: int) -> Place:
        """Where a rank runs, and where its last words are."""
        if not self.record.infos:
            return Place()
        info = self.record.infos[rank]
        roles = tuple(role.name for role in self.roles)
        return Place(
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
        """Ends all processes: asked first where they have been built, then killed. Never raises.

        Whoever has attached to them gives their reservation back, too: its owner may be gone."""
        if self.watch is not None:
            self.watch.close()
        if not ray.is_initialized():
            return
        if self.roles:
            try:
                ray.get([handle.close.remote() for handle in self.handles], timeout=CLOSE_TIMEOUT_SECONDS)
            except RayError:
                log.debug("workers did not close in time; they are killed")
        for handle in self.handles:
            ray.kill(handle)
        if self.is_attached:
            release_by_id(self.record.group_ids)

    def _remote(self, rank: int, call: Call) -> ray.ObjectRef:
        """Sends a call to a rank, in the form that is the least work, with what the rank need not keep any longer."""
        forgotten = _emptied(self._forgotten[rank])
        key = (rank, call.role, call.method)
        if key not in self._executes:
            handle, name = self.handles[rank], task_name(call.role, call.method)
            self._executes[key] = handle.execute.options(name=name), handle.execute_by_name.options(name=name)
        execute, execute_by_name = self._executes[key]
        if forgotten:
            return execute.remote(call.travelling(), forgotten)
        return execute_by_name.remote() if call.is_told_by_name else execute.remote(call.travelling())

    def _death_of(self, rank: int, error: RayError) -> WorkerDiedError:
        place = self.place_of(rank)
        died = WorkerDiedError(f"worker rank {rank} ({place}) died: {cause_of_death(error, place)}{place.more}")
        died.worker = place.failed_worker(rank)
        return died

    def _started(self, references: list[ray.ObjectRef]) -> list[object]:
        what = "start of the workers"
        try:
            ranks = Ranks(what, dict(enumerate(references)), self.place_of, self.raise_if_dead)
            return ranks.results(self.start_seconds)
        except CallTimeoutError:
            _, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            raise ResourceError(
                f"{what}: {len(waiting)} of {len(references)} processes have not begun within "
                f"{self.start_seconds:g} s; their places may be taken by others, or the pool released"
            ) from None

    def _on_all(self, what: str, references: list[ray.ObjectRef]) -> list[object]:
        return Ranks(what, dict(enumerate(references)), self.place_of, self.raise_if_dead).results()


def start_processes(pool: ResourcePool, environment: Mapping[str, str], name: str | None = None) -> WorkerProcesses:
    """Starts a process in every slot and returns at once. Whoever gives a name can leave them running and attach to
    them by it later; else they end with this process.

    Raises ResourceError for a name where the pool does not outlive this process, for one that other processes have, and
    for a pool that has been released."""
    if name and not pool.settings.is_detached:
        raise ResourceError(
            f"workers {name}: pool {pool.settings.name} ends with this process, and they with it; reserve it with "
            "is_detached, or give no name"
        )
    for group in dict.fromkeys(slot.group.id for slot in pool.slots()):
        if placement_group_table(PlacementGroup(group))["state"] == "REMOVED":
            raise ResourceError(f"pool {pool.settings.name}: has been released; reserve it again")
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
            f"workers {name}: cannot be started ({' '.join(str(error).split()):.200}); if others have that name, "
            "attach to them, or choose another one"
        ) from error
    return WorkerProcesses(
        handles, group_ids=pool.group_ids, start_seconds=max(pool.settings.timeout_seconds, START_SECONDS)
    )


def attach_processes(name: str, timeout_seconds: float = 60.0) -> WorkerProcesses:
    """Processes that were started under a name and built. Raises ResourceError when there are none, and when the first
    of them has been busy with another call for all that time."""
    try:
        first = ray.get_actor(_actor_name(name, 0), NAMESPACE)
        record = ray.get(first.kept_record.remote(), timeout=timeout_seconds)
        if not isinstance(record, GroupRecord):
            raise ResourceError(f"workers {name}: they have not been built yet; attach when they are")
        others = [ray.get_actor(_actor_name(name, rank), NAMESPACE) for rank in range(1, len(record.infos))]
    except GetTimeoutError as error:
        raise ResourceError(
            f"workers {name}: the first of them has been busy for {timeout_seconds:g} s; wait for its call to end"
        ) from error
    except (ValueError, RayError) as error:
        raise ResourceError(
            f"workers {name}: not all of them are there ({' '.join(str(error).split()):.200}); start them anew"
        ) from error
    return WorkerProcesses([first, *others], record)


def _emptied(keys: deque[str]) -> list[str]:
    """What is in it, which leaves it: others may add to it meanwhile."""
    return [keys.popleft() for _ in range(len(keys))]


def _actor_name(name: str, rank: int) -> str:
    return f"{name}-{rank}"


def _expect(kind: type[T], value: object) -> T:
    assert isinstance(value, kind)
    return value
