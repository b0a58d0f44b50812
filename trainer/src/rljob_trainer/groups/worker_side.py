"""The worker's side of a call: reads the arguments, runs a method of the fused worker, and stores the result. There is
one worker process per device."""

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
import torch

from rljob_api.constants import ErrorCause
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.control_groups import num_usable_cores
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.split_gather import check_lengths
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group, leave_process_group
from rljob_trainer.errors import DispatchError, TrainerError, WorkerError
from rljob_trainer.groups.devices import VISIBILITY_VARIABLES, device_number
from rljob_trainer.groups.fused_worker import FusedWorker, RoleSpec
from rljob_trainer.groups.object_store import StoredArgument, get_batches, stored
from rljob_trainer.groups.result_cache import CachedArgument, ResultCache
from rljob_trainer.groups.shared_folders import UnseenFiles, unseen_here
from rljob_trainer.groups.worker_failure import MemoryKills, memory_kills
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.observability.activity import ACTIVITY
from rljob_trainer.observability.spans import SPANS, Record
from rljob_trainer.settings import pod_and_node, variables_named

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessInfo:
    """What a worker process reports about itself: where it runs, a port that was free there, and the CPU cores that the
    workers of its node share."""

    address: str
    node_id: str
    process_id: int
    free_port: int
    num_cores: int
    device_number: int
    """Index of its own GPU among the visible ones; 0 without a GPU."""
    memory_kills: MemoryKills | None = None
    pod: str | None = None
    """Name of the Kubernetes pod; None outside Kubernetes."""
    node_name: str | None = None
    """Name of the Kubernetes node; None outside Kubernetes."""


@dataclass(frozen=True)
class GroupRecord:
    """The data that is needed to attach to the processes of a group; their first rank keeps it."""

    roles: tuple[RoleSpec, ...]
    infos: tuple[ProcessInfo, ...]
    log_folder: Path | None
    group_ids: tuple[str, ...] = ()
    """Ids of the placement groups that the processes run in, so that they can be released."""
    positions: Mapping[tuple[str, str], Sequence[MeshPosition | TrainerError]] = field(default_factory=dict)
    """By role and mesh: the position of each rank, or the error of a rank that has none."""

    def log_file(self, rank: int) -> Path | None:
        """Returns the file that a rank writes its output to; None without a log folder."""
        return self.log_folder / f"worker-{rank}.log" if self.log_folder else None


class Returns(Enum):
    """How a rank returns a method's result."""

    VALUE = auto()
    """The result itself is sent to the caller."""
    STORED = auto()
    """The result is a batch that stays in the object store; the caller gets references (see `object_store.stored`)."""
    NOTHING = auto()
    """Nothing is returned, because a peer returns the result of this share."""


TASK_PREFIX = "RayWorker."
MAX_INTEGER_BITS = 64
MAX_ERROR_BYTES = 1 << 20
MAX_ERROR_TEXT = 20_000
"""An error of more than MAX_ERROR_BYTES is cut to this many characters before it is sent to the controller."""


def task_name(role: str, method: str) -> str:
    """Returns the name of a call in Ray's dashboard and in `ray timeline`. It is also the process title during the
    call. It begins with the class name, by which the stop hook of a pod finds the workers."""
    return f"{TASK_PREFIX}{role}.{method}"


def is_plain(argument: object) -> bool:
    """Whether JSON can represent the argument exactly: bool, integer of at most 64 bits, float, string or None."""
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
    """The key under which the process caches the result; None: it is not cached."""
    is_passed_on: bool = False
    """Whether arguments are results that the controller has not seen, so that the worker must compare their lengths."""

    @property
    def needs_only_its_name(self) -> bool:
        """Whether role and method are all that the worker needs. An argument costs more than 10 % of a Ray call."""
        return not self.arguments and self.returns is Returns.VALUE and self.keep_as is None

    def serialized(self) -> bytes | Call:
        """Returns the cheapest form for Ray: bytes, which are the same for all ranks of a share, if all arguments are
        plain values or cached results; else the call itself."""
        if not all(is_plain(argument) or isinstance(argument, CachedArgument) for argument in self.arguments):
            return self
        # A list in the JSON stands for a cached result, because no plain value is a list.
        arguments = [[each.key] if isinstance(each, CachedArgument) else each for each in self.arguments]
        about = [self.role, self.method, self.returns.value, self.keep_as, self.is_passed_on]
        return json.dumps([*about, *arguments]).encode()

    @staticmethod
    def deserialized(call: bytes | Call) -> Call:
        """Reverses `serialized`."""
        if isinstance(call, Call):
            return call
        role, method, returns, keep_as, is_passed_on, *arguments = json.loads(call)
        taken = tuple(CachedArgument(*each) if isinstance(each, list) else each for each in arguments)
        return Call(role, method, taken, Returns(returns), keep_as, is_passed_on)


class WorkerSide:
    """The implementation of `ray_worker.RayWorker`'s methods. They run one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self.fused: FusedWorker | None = None
        self.record: GroupRecord | None = None
        """The record of the whole group; only rank 0 has it."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.kept = ResultCache()

    def info(self) -> ProcessInfo:
        """Returns where this process runs, and its resources."""
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
        with picklable_errors():
            join_process_group(context)
            self.fused = FusedWorker(context, roles)
            if context.device_type == "cpu":
                # Frees the memory that was only needed while loading the models.
                HOST_MEMORY.return_free_memory()

    def mesh_positions(self, wanted: Sequence[tuple[str, str]]) -> list[MeshPosition | TrainerError]:
        """Returns for each role and mesh the position of this process, or the error of a worker that has none."""
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
        """Reads the arguments, from the object store if they are there, and calls a method; an `async` one runs until
        it finishes. First drops the cached results of the `forgotten` keys.

        Raises DispatchError if the method has changed a column of a batch in place, because the store shares it with
        other processes; DataLostError; and the method's own error, as WorkerError if it cannot be pickled."""
        self.kept.forget(forgotten)
        arrived = Call.deserialized(call)
        with SPANS.span(f"{arrived.role}.{arrived.method}"), picklable_errors():
            try:
                return self._execute(arrived)
            except Exception as error:
                if arrived.keep_as is not None:
                    # A copy has no traceback, which would keep the data of the call alive.
                    self.kept.keep_error(arrived.keep_as, copy(_picklable(error)))
                raise

    def execute_by_name(self) -> object:
        """Like `execute`, for a method without arguments. Ray's task name contains role and method (see
        `task_name`)."""
        role, _, method = ray.get_runtime_context().get_task_name().removeprefix(TASK_PREFIX).rpartition(".")
        with SPANS.span(f"{role}.{method}"), picklable_errors():
            return self._execute(Call(role, method, (), Returns.VALUE))

    def take_spans(self) -> list[Record]:
        """Returns the spans of this process since the last call."""
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
            raise DispatchError(
                f"{role}.{method}: returned a generator, which cannot be pickled; return a list or a DataProto"
            )
        for argument, before in zip(taken, versions, strict=True):
            if isinstance(argument, DataProto) and argument.tensor_versions() != before:
                now = argument.tensor_versions()
                changed = ", ".join(name for name, version in (before or {}).items() if now[name] != version)
                raise DispatchError(
                    f"{role}.{method}: changed columns of its batch in place ({changed}), but other processes share "
                    "them; clone them first"
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
        """Leaves the process group, so that the other ranks do not see a lost connection."""
        leave_process_group()

    def _taken(self, argument: object) -> object:
        """Returns an argument as the method gets it: a batch with all its columns in this process."""
        if isinstance(argument, CachedArgument):
            argument = self.kept.take(argument.key)
        if isinstance(argument, StoredArgument):
            argument = get_batches([argument.reference])[0]
        return argument.fetched() if isinstance(argument, DataProto) and argument.has_remote else argument

    def _built(self) -> FusedWorker:
        assert self.fused is not None, "call build first"
        return self.fused


@contextmanager
def picklable_errors() -> Iterator[None]:
    """If the block raises an error that the controller could not unpickle, converts it to a WorkerError. Other errors
    pass unchanged."""
    try:
        yield
    except Exception as error:
        picklable = _picklable(error)
        if picklable is error:
            raise
        raise picklable from None


def _picklable(error: Exception) -> Exception:
    """Returns the error itself, or a WorkerError with its traceback if it is too large or cannot be unpickled. Ray
    would report an error that cannot be unpickled as the death of this process.

    Unpickling calls the error's class with the arguments that the class passed to its base class; they may not fit. It
    also loses the error's `__cause__`. So if memory ran out, this is first recorded in a TrainerError."""
    text = "".join(traceback.format_exception(error))
    cause = memory_cause(error)
    if isinstance(error, TrainerError):
        error.known_cause = error.known_cause or cause
    if cause is None or isinstance(error, TrainerError):
        try:
            carried = ray.cloudpickle.dumps(error)
            if len(carried) <= MAX_ERROR_BYTES:
                ray.cloudpickle.loads(carried)
                return error
        except Exception:
            log.debug("an error cannot be pickled", exc_info=True)
    else:
        text = f"{error!r}\n{text}"
    if len(text) > MAX_ERROR_TEXT:
        text = f"{text[: MAX_ERROR_TEXT // 2]}\n...\n{text[-MAX_ERROR_TEXT // 2 :]}"
    failed = WorkerError(text)
    failed.known_cause = error.known_cause if isinstance(error, TrainerError) else cause
    return failed


def memory_cause(error: BaseException | None) -> ErrorCause | None:
    """Returns which memory ran out, if the error, its cause or its context is an out-of-memory error; else None."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError):
            return ErrorCause.DEVICE_MEMORY
        if isinstance(error, MemoryError):
            return ErrorCause.HOST_MEMORY
        error = error.__cause__ or error.__context__
    return None


def redirect_output(log_file: Path) -> None:
    """Appends all output of this process to a file, including the output of native libraries."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
