"""The processes of one pool: started, built, called, watched and ended together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_trainer.cluster.calls import Place, Ranks
from rljob_trainer.cluster.fused_worker import RoleSpec
from rljob_trainer.cluster.object_store import sent_arguments
from rljob_trainer.cluster.ray_worker import ProcessInfo, RayWorker, Returns
from rljob_trainer.cluster.resource_pool import ResourcePool
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.split_gather import SplitCall
from rljob_trainer.dispatch.worker import WorkerContext

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_SECONDS = 10.0


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
        self.roles: tuple[RoleSpec, ...] = ()
        self.log_folder: Path | None = None

    def build(
        self, device_type: str, num_threads: int | None, roles: Sequence[RoleSpec], log_folder: Path | None
    ) -> None:
        """Builds all roles in all processes, each with so many CPU threads, or with its share of its node's cores.

        Raises what a worker raised, or WorkerDiedError."""
        self.log_folder = log_folder
        infos = self._on_all("start of the workers", [handle.info.remote() for handle in self.handles])
        self.infos = [_expect(ProcessInfo, info) for info in infos]
        slots = self.pool.slots()
        references = []
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
            handle = self.handles[slot.rank]
            references.append(handle.build.remote(context, tuple(roles), self._log_file(slot.rank)))
        self._on_all("build", references)
        self.roles = tuple(roles)

    def start(self, role: str, method: str, call: SplitCall, returns: Mapping[int, Returns]) -> Ranks:
        """Calls a role's method on the ranks of a split call; what each returns is said by rank."""
        sent = [sent_arguments(share) for share in call.shares]
        references = {
            rank: self.handles[rank].execute.remote(role, method, sent[share], returns[rank])
            for rank, share in call.share_of_rank.items()
        }
        return Ranks(f"{role}.{method}", references, self.place_of)

    def mesh_positions(self, role: str, mesh: str) -> list[MeshPosition]:
        """Where each rank stands in a mesh of a role. Raises what a worker raises."""
        references = [handle.mesh_position.remote(role, mesh) for handle in self.handles]
        return [_expect(MeshPosition, value) for value in self._on_all(f"mesh {mesh} of {role}", references)]

    def place_of(self, rank: int) -> Place:
        """Where a rank runs, and where its last words are."""
        if not self.infos:
            return Place("before it was built")
        info = self.infos[rank]
        more = f"; its last words are in {self._log_file(rank)}" if self.log_folder else ""
        return Place(f"process {info.process_id} on {info.address}", more)

    def close(self) -> None:
        """Ends all processes: asked first where they have been built, then killed. Never raises."""
        if self.roles:
            try:
                ray.get([handle.close.remote() for handle in self.handles], timeout=CLOSE_TIMEOUT_SECONDS)
            except RayError:
                log.debug("workers did not close in time; they are killed")
        for handle in self.handles:
            ray.kill(handle)
        self.pool.release()

    def _on_all(self, what: str, references: list[ray.ObjectRef]) -> list[object]:
        return Ranks(what, dict(enumerate(references)), self.place_of).results()

    def _share_of_cores(self, rank: int) -> int:
        return max(1, self.infos[rank].num_cores // self.pool.settings.num_devices_per_node)

    def _log_file(self, rank: int) -> Path | None:
        return self.log_folder / f"worker-{rank}.log" if self.log_folder else None


def _expect(kind: type[T], value: object) -> T:
    assert isinstance(value, kind)
    return value
