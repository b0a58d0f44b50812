"""What runs in the process of a worker, one per device: a fused worker, its arguments and its results."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from pathlib import Path

import ray

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.control_groups import num_usable_cores
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.split_gather import check_lengths
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group, leave_process_group
from rljob_trainer.errors import DispatchError, TrainerError, WorkerError
from rljob_trainer.groups.death import MemoryKills, memory_kills
from rljob_trainer.groups.devices import VISIBILITY_VARIABLES, device_number
from rljob_trainer.groups.fused_worker import FusedWorker, RoleSpec
from rljob_trainer.groups.kept_results import KeptArgument, KeptResults
from rljob_trainer.groups.object_store import StoredArgument, get_batches, stored
from rljob_trainer.groups.shared_folders import UnseenFiles, unseen_here
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.observability.activity import ACTIVITY
from rljob_trainer.observability.spans import SPANS, Record
from rljob_trainer.settings import pod_and_node, variables_named

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker process runs, a port that was free there a moment ago, and the cores that the workers of its node
    share."""

    address: str
    node_id: str
    process_id: int
    free_port: int
    num_cores: int
    device_number: int
    """Of its own GPU among those that it sees; 0 without one."""
    memory_kills: MemoryKills | None = None
    pod: str | None = None
    node_name: str | None = None
    """Of Kubernetes, as the pod is; None elsewhere."""


@dataclass(frozen=True)
class GroupRecord:
    """What is known of the processes of a group: kept by its first rank for whoever attaches later."""

    roles: tuple[RoleSpec, ...]
    infos: tuple[ProcessInfo, ...]
    log_folder: Path | None
    group_ids: tuple[str, ...] = ()
    """Placement groups that the processes run in, for whoever ends them."""
    positions: Mapping[tuple[str, str], Sequence[MeshPosition | TrainerError]] = field(default_factory=dict)
    """By role and mesh: where each rank stands, or why it does not know."""

    def log_file(self, rank: int) -> Path | None:
        """Where a rank's output goes."""
        return self.log_folder / f"worker-{rank}.log" if self.log_folder else None


class Returns(Enum):
    """What becomes of a method's result."""

    VALUE = auto()
    """It goes to the caller."""
    STORED = auto()
    """A batch: it stays in the object store, and the caller gets references (see `object_store.stored`)."""
    NOTHING = auto()
    """A peer answers for this rank."""


TASK_PREFIX = "RayWorker."
MAX_INTEGER_BITS = 64
MAX_ERROR_BYTES = 1 << 20
MAX_ERROR_TEXT = 20_000
"""Characters of an error that travels, where all of it would be larger than that."""


def task_name(role: str, method: str) -> str:
    """What Ray's dashboard and `ray timeline` call it. It is what the process is called meanwhile, too, and begins with
    the class, by which the stop hook of a pod knows its workers."""
    return f"{TASK_PREFIX}{role}.{method}"


def is_plain(argument: object) -> bool:
    """Whether JSON carries it as it is: numbers, of 64 bits or less, texts, None."""
    if isinstance(argument, int) and type(argument) is int:
        return argument.bit_length() <= MAX_INTEGER_BITS
    return type(argument) in (bool, float, str, type(None))


@dataclass(frozen=True)
class Call:
    """One call of a role's method on one rank."""

    role: str
    method: str
    arguments: tuple[object, ...]
    returns: Returns
    keep_as: str | None = None
    """The key under which the process keeps what the method returns, if it does."""
    is_passed_on: bool = False
    """Whether arguments are results that the controller has not seen: nobody has compared their numbers of rows."""

    @property
    def is_told_by_name(self) -> bool:
        """Whether role and method say everything. An argument costs Ray more than a tenth of the whole call."""
        return not self.arguments and self.returns is Returns.VALUE and self.keep_as is None

    def travelling(self) -> bytes | Call:
        """The form in which Ray carries it with the least work: a call with nothing but numbers, texts and results that
        are there already as bytes, which serve all ranks that get the same."""
        if not all(is_plain(argument) or isinstance(argument, KeptArgument) for argument in self.arguments):
            return self
        # What is a list here is a kept result: no plain value is one.
        arguments = [[each.key] if isinstance(each, KeptArgument) else each for each in self.arguments]
        about = [self.role, self.method, self.returns.value, self.keep_as, self.is_passed_on]
        return json.dumps([*about, *arguments]).encode()

    @staticmethod
    def arrived(call: bytes | Call) -> Call:
        """What `travelling` made into bytes."""
        if isinstance(call, Call):
            return call
        role, method, returns, keep_as, is_passed_on, *arguments = json.loads(call)
        taken = tuple(KeptArgument(*each) if isinstance(each, list) else each for each in arguments)
        return Call(role, method, taken, Returns(returns), keep_as, is_passed_on)


class WorkerSide:
    """What is behind `ray_worker.RayWorker`, whose methods these are. They run one at a time, in the order of the
    calls."""

    def __init__(self) -> None:
        self.fused: FusedWorker | None = None
        self.record: GroupRecord | None = None
        """What is known of the whole group; rank 0 keeps it."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.kept = KeptResults()

    def info(self) -> ProcessInfo:
        """Where this process runs."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
        context = ray.get_runtime_context()
        number = device_number(context.get_accelerator_ids(), variables_named(chain(*VISIBILITY_VARIABLES.values())))
        node_id = context.get_node_id()
        pod, node_name = pod_and_node()
        return ProcessInfo(
            address, node_id, os.getpid(), port, num_usable_cores(), number, memory_kills(), pod, node_name
        )

    def unseen(self, files: Sequence[Path]) -> UnseenFiles:
        """See `shared_folders`."""
        return UnseenFiles(ray.util.get_node_ip_address(), unseen_here(files))

    def build(self, context: WorkerContext, roles: Sequence[RoleSpec], log_file: Path | None) -> None:
        """Joins the process group and builds the workers of all roles. Output goes to `log_file` from here on."""
        if log_file is not None:
            redirect_output(log_file)
            ACTIVITY.write_beside(log_file)
        with errors_that_travel():
            join_process_group(context)
            self.fused = FusedWorker(context, roles)
            if context.device_type == "cpu":
                # Of loading.
                HOST_MEMORY.give_back()

    def mesh_positions(self, wanted: Sequence[tuple[str, str]]) -> list[MeshPosition | TrainerError]:
        """Of each role and mesh: where this process stands, or the error of a worker that does not know."""
        positions: list[MeshPosition | TrainerError] = []
        for role, mesh in wanted:
            try:
                positions.append(self._built().mesh_position(role, mesh))
            except TrainerError as error:
                positions.append(error)
            except Exception as error:
                positions.append(DispatchError(f"{role}: mesh {mesh}: {error!r}"))
        return positions

    def execute(self, call: bytes | Call, forgotten: Sequence[str] = ()) -> object:
        """Calls a method, an `async` one to its end, on arguments that may lie in the object store. Kept results of the
        `forgotten` keys are let go first.

        Raises DispatchError when the method has changed a column of a batch in place: what lies in the store is shared
        with others; DataLostError; what the method raises, as WorkerError where that could not travel."""
        self.kept.forget(forgotten)
        arrived = Call.arrived(call)
        with SPANS.span(f"{arrived.role}.{arrived.method}"), errors_that_travel():
            try:
                return self._execute(arrived)
            except Exception as error:
                if arrived.keep_as is not None:
                    # Without its traceback, which holds the data of the call.
                    self.kept.keep_error(arrived.keep_as, copy(_travelling(error)))
                raise

    def execute_by_name(self) -> object:
        """As `execute`, of a method without arguments, which the name of the task says: see `task_name`."""
        role, _, method = ray.get_runtime_context().get_task_name().removeprefix(TASK_PREFIX).rpartition(".")
        with SPANS.span(f"{role}.{method}"), errors_that_travel():
            return self._execute(Call(role, method, (), Returns.VALUE))

    def take_spans(self) -> list[Record]:
        """What this process did since the last time."""
        return SPANS.take()

    def _execute(self, call: Call) -> object:
        role, method, returns = call.role, call.method, call.returns
        with SPANS.span("read arguments"):
            taken = [self._taken(argument) for argument in call.arguments]
        if call.is_passed_on:
            check_lengths(f"{role}.{method}", taken)
        versions = [argument.tensor_versions() if isinstance(argument, DataProto) else None for argument in taken]
        result = self._built().execute(role, method, tuple(taken))
        if inspect.iscoroutine(result):
            self.loop = self.loop or asyncio.new_event_loop()
            result = self.loop.run_until_complete(result)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise DispatchError(f"{role}.{method}: a generator cannot travel; return a list or a DataProto")
        for argument, before in zip(taken, versions, strict=True):
            if isinstance(argument, DataProto) and argument.tensor_versions() != before:
                now = argument.tensor_versions()
                changed = ", ".join(name for name, version in (before or {}).items() if now[name] != version)
                raise DispatchError(
                    f"{role}.{method}: changed columns of its batch in place ({changed}), which others share; clone "
                    "them first"
                )
        if returns is Returns.NOTHING:
            return None
        if returns is Returns.VALUE:
            return result
        if not isinstance(result, DataProto):
            raise DispatchError(f"{role}.{method}: must return a DataProto (got {type(result).__name__})")
        with SPANS.span("store result"):
            answer = stored(result)
            if call.keep_as is not None:
                self.kept.keep(call.keep_as, result, answer)
        return answer

    def close(self) -> None:
        """Leaves the process group, so that the other ranks see an orderly end."""
        leave_process_group()

    def _taken(self, argument: object) -> object:
        """An argument as the method gets it: everything of a batch in this process."""
        if isinstance(argument, KeptArgument):
            argument = self.kept.take(argument.key)
        if isinstance(argument, StoredArgument):
            argument = get_batches([argument.reference])[0]
        return argument.fetched() if isinstance(argument, DataProto) and argument.has_remote else argument

    def _built(self) -> FusedWorker:
        assert self.fused is not None, "build first"
        return self.fused


@contextmanager
def errors_that_travel() -> Iterator[None]:
    """Errors leave the block as they are or, where the controller could not read them, as WorkerError."""
    try:
        yield
    except Exception as error:
        travelling = _travelling(error)
        if travelling is error:
            raise
        raise travelling from None


def _travelling(error: Exception) -> Exception:
    """The error, or a WorkerError with its text where the controller could not read it: Ray would take that for the
    death of this process. An error pickles by the arguments that it gave to its base class."""
    try:
        carried = ray.cloudpickle.dumps(error)
        if len(carried) <= MAX_ERROR_BYTES:
            ray.cloudpickle.loads(carried)
            return error
    except Exception:
        log.debug("an error that cannot travel", exc_info=True)
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_ERROR_TEXT:
        text = f"{text[: MAX_ERROR_TEXT // 2]}\n...\n{text[-MAX_ERROR_TEXT // 2 :]}"
    return WorkerError(text)


def redirect_output(log_file: Path) -> None:
    """Sends everything that this process prints, native libraries included, to the end of a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
