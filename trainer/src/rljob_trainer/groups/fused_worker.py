"""A fused worker: several roles in one process, with one worker object per role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.register import registration_of
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import DispatchError

WorkerFactory = Callable[[WorkerContext, Mapping[str, Worker]], Worker]
"""Builds the worker of one role. The second argument has the workers that the process has already built, by role
name."""


@dataclass(frozen=True)
class RoleSpec:
    """One role. Class and factory must be picklable."""

    name: str
    worker_class: type[Worker]
    factory: WorkerFactory | None = None
    """Builds the worker, for a class that needs more arguments than the context. None: the class is called with the
    context alone."""


class FusedWorker:
    """The workers of all roles of one process. They are built in the order of `roles`; the factory of a role gets the
    workers of the roles before it."""

    def __init__(self, context: WorkerContext, roles: Sequence[RoleSpec]) -> None:
        """Raises DispatchError for a duplicate role name, and for a factory that returns anything but a worker of the
        role's class. Errors of factories are raised unchanged."""
        self.workers: dict[str, Worker] = {}
        for role in roles:
            if role.name in self.workers:
                raise DispatchError(f"fused worker: two roles have the name '{role.name}'; give each role its own name")
            worker = role.factory(context, self.workers) if role.factory else role.worker_class(context)
            if not isinstance(worker, role.worker_class):
                raise DispatchError(
                    f"fused worker: role '{role.name}' has the worker class {role.worker_class.__name__}, but its "
                    f"factory builds a {type(worker).__name__}; let the factory return a worker of this class"
                )
            self.workers[role.name] = worker

    def execute(self, role: str, method: str, arguments: tuple[object, ...]) -> object:
        """Calls a registered method of a role's worker. Raises DispatchError if the role does not exist, or if its
        worker has no such method; the method's own errors are raised unchanged."""
        worker = self._worker(role)
        registration_of(type(worker), method)
        bound: Callable[..., object] = worker.__getattribute__(method)
        return bound(*arguments)

    def mesh_position(self, role: str, mesh: str) -> MeshPosition:
        """Returns this process's position in a mesh of a role. Errors of the worker are raised unchanged. Raises
        DispatchError if the worker does not return a MeshPosition."""
        position = self._worker(role).mesh_position(mesh)
        if not isinstance(position, MeshPosition):
            raise DispatchError(
                f"{role}: mesh {mesh}: mesh_position returns a {type(position).__name__}; it must return a MeshPosition"
            )
        return position

    def _worker(self, role: str) -> Worker:
        if role not in self.workers:
            raise DispatchError(
                f"fused worker: no role '{role}' (there are: {', '.join(self.workers)}); use one of these"
            )
        return self.workers[role]
