"""The Ray actor around a fused worker: one process per device."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from rljob_trainer.cluster.fused_worker import FusedWorker, RoleSpec
from rljob_trainer.cpu_limit import num_usable_cores
from rljob_trainer.dispatch.modes import MeshPosition
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group, leave_process_group


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker process runs, a port that was free there a moment ago, and the cores that the workers of its node
    share."""

    address: str
    node_id: str
    process_id: int
    free_port: int
    num_cores: int


class RayWorker:
    """Made into an actor by the worker group. Methods run one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self.fused: FusedWorker | None = None

    def info(self) -> ProcessInfo:
        """Where this process runs."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
        return ProcessInfo(address, ray.get_runtime_context().get_node_id(), os.getpid(), port, num_usable_cores())

    def build(self, context: WorkerContext, roles: Sequence[RoleSpec], log_file: Path | None) -> None:
        """Joins the process group and builds the workers of all roles. Output goes to `log_file` from here on."""
        if log_file is not None:
            redirect_output(log_file)
        join_process_group(context)
        self.fused = FusedWorker(context, roles)

    def mesh_position(self, role: str, mesh: str) -> MeshPosition:
        """See FusedWorker.mesh_position."""
        assert self.fused is not None, "build first"
        return self.fused.mesh_position(role, mesh)

    def execute(self, role: str, method: str, arguments: tuple[object, ...]) -> object:
        """See FusedWorker.execute."""
        assert self.fused is not None, "build first"
        return self.fused.execute(role, method, arguments)

    def close(self) -> None:
        """Leaves the process group, so that the other ranks see an orderly end."""
        leave_process_group()


def redirect_output(log_file: Path) -> None:
    """Sends everything that this process prints, native libraries included, to the end of a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
