"""The Ray actor of a worker process. It does little itself, so that it can set environment variables before torch is
imported.

The variables are an argument of the actor, and not part of a runtime environment, because Ray uses its prestarted
processes only for actors without a runtime environment. Nothing that reads the variables is imported before they are
set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from rljob_trainer.groups.devices import CUDA_VARIABLE, visible_devices
from rljob_trainer.settings import run_folder_or_none, set_environment, set_variable, variables_named
from rljob_trainer.stack_traces import StackFile

if TYPE_CHECKING:
    from rljob_trainer.dispatch.mesh import MeshPosition
    from rljob_trainer.dispatch.worker import WorkerContext
    from rljob_trainer.engines.host_ledger import HostAccount
    from rljob_trainer.errors import TrainerError
    from rljob_trainer.groups.fused_worker import RoleSpec
    from rljob_trainer.groups.shared_folders import UnseenFiles
    from rljob_trainer.groups.worker_side import Call, GroupRecord, ProcessInfo
    from rljob_trainer.observability.spans import Record

log = logging.getLogger(__name__)


class RayWorker:
    """The class of the actor; `start_processes` creates one per worker process. It delegates to a WorkerSide."""

    def __init__(self, environment: Mapping[str, str], *, sees_all_gpus: bool = False) -> None:
        """`environment`: variables that libraries read when they are imported. `sees_all_gpus`: whether the process
        sees all NVIDIA GPUs of its Ray node; else only its own."""
        if sees_all_gpus:
            show_devices_of_node()
        set_environment(environment)
        self.stacks = StackFile(run_folder_or_none() or "", "worker")
        from rljob_trainer.groups.worker_side import WorkerSide

        self.side = WorkerSide()

    def ping(self) -> None:
        """Does nothing. If the process has died, the call fails: so `LivenessWatch` detects deaths."""

    def info(self) -> ProcessInfo:
        """See WorkerSide.info."""
        return self.side.info()

    def unseen(self, files: Sequence[Path]) -> UnseenFiles:
        """See WorkerSide.unseen."""
        return self.side.unseen(files)

    def build(self, context: WorkerContext, roles: Sequence[RoleSpec], log_file: Path | None) -> None:
        """See WorkerSide.build."""
        self.stacks.rename("+".join(role.name for role in roles), context.rank)
        self.side.build(context, roles, log_file)

    def host_account(self) -> HostAccount:
        """See WorkerSide.host_account."""
        return self.side.host_account()

    def keep_record(self, record: GroupRecord) -> None:
        """Stores the record of the whole group, for `attach_processes`."""
        self.side.record = record

    def kept_record(self) -> GroupRecord | None:
        """Returns the record that `keep_record` has stored; None if there is none yet."""
        return self.side.record

    def mesh_positions(self, wanted: Sequence[tuple[str, str]]) -> list[MeshPosition | TrainerError]:
        """See WorkerSide.mesh_positions."""
        return self.side.mesh_positions(wanted)

    def execute(self, call: bytes | Call, forgotten: Sequence[str] = ()) -> object:
        """See WorkerSide.execute."""
        return self.side.execute(call, forgotten)

    def execute_by_name(self) -> object:
        """See WorkerSide.execute_by_name."""
        return self.side.execute_by_name()

    def take_spans(self) -> list[Record]:
        """See WorkerSide.take_spans."""
        return self.side.take_spans()

    def drop_spans(self) -> None:
        """See WorkerSide.drop_spans."""
        self.side.drop_spans()

    def close(self) -> None:
        """See WorkerSide.close."""
        self.side.close()


def show_devices_of_node() -> None:
    """Makes all NVIDIA GPUs visible that the process's Ray node manages (see `visible_devices`). torch must not be
    imported before."""
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    # Ray has no public name for the values at the start. `test_worker_devices.py` fails if this one changes.
    at_start = getattr(ray._private.worker.global_worker, "original_visible_accelerator_ids", None)
    if not assigned or at_start is None:
        if assigned:
            log.warning(
                "Ray %s does not say which GPUs its node manages, so this worker sees only its own", ray.__version__
            )
        return
    set_variable(
        CUDA_VARIABLE,
        visible_devices(assigned, at_start.get("GPU"), variables_named([CUDA_VARIABLE]).get(CUDA_VARIABLE)),
    )
