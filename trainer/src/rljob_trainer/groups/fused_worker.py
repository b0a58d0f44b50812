"""Several roles in one process: a fused worker holds one worker per role as plain fields of a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.register import registration_of
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import DispatchError

WorkerFactory = Callable[[WorkerContext, Mapping[str, Worker]], Worker]
"""Builds the worker of one role; the second argument holds the workers of the roles before it in the same process."""


@dataclass(frozen=True)
class RoleSpec:
    """One role: its name, the class of its worker, and how that is built with its own arguments (`functools.partial` of
    a function, for example), from the context alone by default. Both must pickle."""

    name: str
    worker_class: type[Worker]
    factory: WorkerFactory | None = None


class FusedWorker:
    """The workers of all roles of one process, in the order given; later ones may use earlier ones."""

    def __init__(self, context: WorkerContext, roles: Sequence[RoleSpec]) -> None:
        """Raises DispatchError for two roles of one name and for a factory that builds something else than its role
        says, and whatever a factory raises."""
        self.workers: dict[str, Worker] = {}
        for role in roles:
            if role.name in self.workers:
                raise DispatchError(f"fused worker: two roles are called '{role.name}'")
            worker = role.factory(context, self.workers) if role.factory else role.worker_class(context)
            if not isinstance(worker, role.worker_class):
                raise DispatchError(
                    f"fused worker: role '{role.name}' is said to be a {role.worker_class.__name__}, and its factory "
                    f"builds a {type(worker).__name__}"
                )
            self.workers[role.name] = worker

    def execute(self, role: str, method: str, arguments: tuple[object, ...]) -> object:
        """Calls a registered method of a role's worker. Raises DispatchError when there is none of that name."""
        worker = self._worker(role)
        registration_of(type(worker), method)
        bound: Callable[..., object] = worker.__getattribute__(method)
        return bound(*arguments)

    def mesh_position(self, role: str, mesh: str) -> MeshPosition:
        """Where this process stands in a mesh of a role. Raises what the worker raises, and DispatchError where it
        gives something else."""
        position = self._worker(role).mesh_position(mesh)
        if not isinstance(position, MeshPosition):
            raise DispatchError(
                f"{role}: mesh {mesh}: mesh_position gives a {type(position).__name__}; it must give a MeshPosition"
            )
        return position

    def _worker(self, role: str) -> Worker:
        if role not in self.workers:
            raise DispatchError(f"fused worker: no role '{role}' (there are: {', '.join(self.workers)})")
        return self.workers[role]
