"""Worker groups: the controller's view of a role, whose methods run on all of its ranks.

`WorkerProcesses` are the processes of one pool. `RoleGroup` is one role on them: it has the registered methods of the
role's worker class, each taking the whole batch and giving back the whole result.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_trainer.cluster.fused_worker import RoleSpec
from rljob_trainer.cluster.ray_worker import ProcessInfo, RayWorker
from rljob_trainer.cluster.resource_pool import ResourcePool
from rljob_trainer.dispatch.modes import MeshPosition, gather_results, split_arguments
from rljob_trainer.dispatch.register import Registration, registrations
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import TrainerError, WorkerDiedError, WorkerError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 10.0
FAILURE_GRACE_SECONDS = 5.0
"""How long the other ranks have to end after the first has failed: some cannot, because they wait for it."""


class WorkerProcesses:
    """One process per slot of a pool. Starting them returns at once; `build` waits."""

    def __init__(self, pool: ResourcePool, environment: dict[str, str]) -> None:
        self.pool = pool
        settings = pool.settings
        actor_class = ray.remote(RayWorker)
        self.handles: list[ActorHandle] = [
            actor_class.options(
                num_cpus=settings.num_cpus_per_device,
                num_gpus=1 if settings.use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    slot.group, placement_group_bundle_index=slot.bundle_index
                ),
                runtime_env={"env_vars": environment},
            ).remote()
            for slot in pool.slots()
        ]
        self.infos: list[ProcessInfo] = []
        self.is_built = False
        self.log_folder: Path | None = None

    def build(
        self, device_type: str, num_threads: int | None, roles: Sequence[RoleSpec], log_folder: Path | None
    ) -> None:
        """Builds all roles in all processes, each with so many CPU threads, or with its share of its node's cores.

        Raises what a worker raised, or WorkerDiedError."""
        self.log_folder = log_folder
        self.infos = [_expect_info(info) for info in self.call_all([("info", ())] * len(self.handles))]
        slots = self.pool.slots()
        calls: list[tuple[str, tuple[object, ...]]] = []
        for slot in slots:
            context = WorkerContext(
                rank=slot.rank,
                world_size=len(slots),
                local_rank=slot.local_rank,
                node_rank=slot.node_rank,
                master_address=self.infos[0].address,
                master_port=self.infos[0].free_port,
                device_type=device_type,
                num_threads=num_threads or self._share_of_cores(slot.rank),
            )
            calls.append(("build", (context, tuple(roles), self._log_file(slot.rank))))
        self.call_all(calls)
        self.is_built = True

    def call_all(
        self, calls: Sequence[tuple[str, tuple[object, ...]]], ranks: Sequence[int] | None = None
    ) -> list[object]:
        """Calls a method with its arguments on every rank (or on `ranks`) and waits for all.

        When a rank fails, the rest get `FAILURE_GRACE_SECONDS` to end. Raised is the cause rather than what followed
        from it: a rank that died (its peers then fail in their collectives, often sooner than the death is known),
        else one of our own errors, else the first failure."""
        targets = list(range(len(self.handles))) if ranks is None else list(ranks)
        references = [
            getattr(self.handles[rank], method).remote(*arguments)
            for rank, (method, arguments) in zip(targets, calls, strict=True)
        ]
        results: dict[int, object] = {}
        errors: list[TrainerError] = []
        deadline: float | None = None
        pending = dict(zip(references, targets, strict=True))
        while pending:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
            if not ready:
                break
            rank = pending.pop(ready[0])
            try:
                results[rank] = ray.get(ready[0])
            except RayTaskError as error:
                errors.append(self._failed(rank, error))
            except RayError as error:
                raise self._died(rank, error) from None
            if errors and deadline is None:
                deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        if errors:
            raise min(errors, key=lambda error: isinstance(error, WorkerError))
        return [results[rank] for rank in targets]

    def close(self) -> None:
        """Ends all processes: asked first where they have been built, then killed. Never raises."""
        if self.is_built:
            try:
                ray.get([handle.close.remote() for handle in self.handles], timeout=CLOSE_TIMEOUT_SECONDS)
            except RayError:
                log.debug("workers did not close in time; they are killed")
        for handle in self.handles:
            ray.kill(handle)
        self.pool.release()

    def _died(self, rank: int, error: RayError) -> WorkerDiedError:
        place = "before it was built"
        if self.infos:
            place = f"process {self.infos[rank].process_id} on {self.infos[rank].address}"
        where = f"; its last words are in {self._log_file(rank)}" if self.log_folder else ""
        return WorkerDiedError(f"worker rank {rank} ({place}) died: {_cause_of_death(error)}{where}")

    def _share_of_cores(self, rank: int) -> int:
        return max(1, self.infos[rank].num_cores // self.pool.settings.num_devices_per_node)

    def _log_file(self, rank: int) -> Path | None:
        return self.log_folder / f"worker-{rank}.log" if self.log_folder else None

    def _failed(self, rank: int, error: RayTaskError) -> TrainerError:
        """Our own errors come back as they were raised; others become WorkerError with the worker's traceback."""
        if isinstance(error.cause, TrainerError):
            return error.cause
        return WorkerError(f"worker rank {rank}: {error.cause!r}\n{error}")


class RoleGroup:
    """One role on a set of processes; has one attribute per registered method of the worker class."""

    def __init__(self, processes: WorkerProcesses, role: str, worker_class: type[Worker]) -> None:
        self.processes = processes
        self.role = role
        self.positions: dict[str, list[MeshPosition]] = {}
        for name, registration in registrations(worker_class).items():
            method: Callable[..., object] = partial(self._call, name, registration)
            setattr(self, name, method)

    def _call(self, method: str, registration: Registration, *arguments: object) -> object:
        positions = self._positions(registration.mesh)
        call = split_arguments(registration.dispatch, positions, arguments)
        results = self.processes.call_all(
            [("execute", (self.role, method, share)) for share in call.arguments], call.ranks
        )
        return gather_results(registration.dispatch, positions, call, results)

    def _positions(self, mesh: str) -> list[MeshPosition]:
        """Asked once per mesh and kept."""
        if mesh not in self.positions:
            calls = [("mesh_position", (self.role, mesh))] * len(self.processes.handles)
            self.positions[mesh] = [_expect_position(value) for value in self.processes.call_all(calls)]
        return self.positions[mesh]


def _cause_of_death(error: RayError) -> str:
    """Ray's text without its identifiers; for a process that just ended, what that most often means."""
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.*?)(?= There are some potential root causes|$)", text)
    if detail is None:
        return re.sub(r"^.*?(?=The actor is dead because|The actor died because)", "", text)
    if "connection error" not in detail[1]:
        return detail[1]
    return (
        "its process ended without a word; the kernel kills processes when memory runs out (see dmesg), "
        "and native code can crash"
    )


def _expect_info(value: object) -> ProcessInfo:
    assert isinstance(value, ProcessInfo)
    return value


def _expect_position(value: object) -> MeshPosition:
    assert isinstance(value, MeshPosition)
    return value
