"""The worker process's side of a call: reads the arguments, runs a method of the fused worker, and stores the
result."""

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
from rljob_trainer.engines.host_ledger import HOST_LEDGER, HostAccount
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
    """What a worker process reports about itself before it is built."""

    address: str
    """Address of its node."""
    node_id: str
    """Ray's id of its node."""
    process_id: int
    free_port: int
    """A port of its node that no process used when this was reported."""
    num_cores: int
    """CPU cores that it may use; the other worker processes of the node share them."""
    device_number: int
    """Index of its assigned GPU among the visible ones (see `devices`); 0 without a GPU."""
    memory_kills: MemoryKills | None = None
    pod: str | None = None
    """Name of the Kubernetes pod; None outside Kubernetes."""
    node_name: str | None = None
    """Name of the Kubernetes node; None outside Kubernetes."""


@dataclass(frozen=True)
class GroupRecord:
    """What another program must know to attach to worker processes. Rank 0 keeps it."""

    roles: tuple[RoleSpec, ...]
    infos: tuple[ProcessInfo, ...]
    """One per rank."""
    log_folder: Path | None
    group_ids: tuple[str, ...] = ()
    """Ids of the placement groups that the processes run in. A program that has attached to the processes and ends them
    releases these groups."""
    positions: Mapping[tuple[str, str], Sequence[MeshPosition | TrainerError]] = field(default_factory=dict)
    """(role, mesh) -> for each rank its position, or the error that computing it raised."""

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
    """Nothing is returned, because another rank with the same share returns the result."""


TASK_PREFIX = "RayWorker."
"""The name of the actor's class, with which the title of a worker process begins."""
MAX_INTEGER_BITS = 64
MAX_ERROR_BYTES = 1 << 20
"""A larger pickled error is replaced by a WorkerError with its text."""
MAX_ERROR_CHARACTERS = 20_000
"""The middle of a longer error text is left out."""


def task_name(role: str, method: str) -> str:
    """Returns the name of a call in Ray's dashboard and in `ray timeline`. Ray also makes it the title of the process
    during the call. By the title's beginning, TASK_PREFIX, the stop hook of a pod finds the worker processes."""
    return f"{TASK_PREFIX}{role}.{method}"


def is_plain(argument: object) -> bool:
    """Whether the argument is sent as JSON, which represents it exactly: bool, integer of at most 64 bits, float,
    string or None."""
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
    """The key under which the process caches the result; None: the result is not cached."""
    checks_lengths: bool = False
    """Whether the worker must compare the lengths of its arguments. True if some are results of other calls for which
    the controller has not waited, so that it could not compare them."""

    @property
    def needs_only_its_name(self) -> bool:
        """Whether the worker needs only role and method, which are in the name of the call. Then Ray sends no argument,
        which would take more than 10 % of the time of a call."""
        return not self.arguments and self.returns is Returns.VALUE and self.keep_as is None

    def serialized(self) -> bytes | Call:
        """Returns the form that Ray sends fastest: JSON bytes if all arguments are plain values or cached results, else
        the call itself."""
        if not all(is_plain(argument) or isinstance(argument, CachedArgument) for argument in self.arguments):
            return self
        # A list in the JSON stands for a cached result, because no plain value is a list.
        arguments = [[each.key] if isinstance(each, CachedArgument) else each for each in self.arguments]
        header = [self.role, self.method, self.returns.value, self.keep_as, self.checks_lengths]
        return json.dumps([*header, *arguments]).encode()

    @staticmethod
    def deserialized(call: bytes | Call) -> Call:
        """Reverses `serialized`."""
        if isinstance(call, Call):
            return call
        role, method, returns, keep_as, checks_lengths, *arguments = json.loads(call)
        restored = tuple(CachedArgument(*each) if isinstance(each, list) else each for each in arguments)
        return Call(role, method, restored, Returns(returns), keep_as, checks_lengths)


class WorkerSide:
    """The implementation of `ray_worker.RayWorker`'s methods. Ray runs them one at a time, in the order of the
    calls."""

    def __init__(self) -> None:
        self.fused: FusedWorker | None = None
        self.record: GroupRecord | None = None
        """The record of all worker processes of the pool; only rank 0 has it."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Runs `async` methods; None before the first one."""
        self.cache = ResultCache()

    def info(self) -> ProcessInfo:
        """Returns where this process runs, and its resources (see ProcessInfo)."""
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
        """Returns the files that this process does not see (see `shared_folders`)."""
        return UnseenFiles(ray.util.get_node_ip_address(), unseen_here(files))

    def host_account(self) -> HostAccount:
        """Returns the host memory that this process keeps (see `host_ledger`)."""
        return HOST_LEDGER.account()

    def build(self, context: WorkerContext, roles: Sequence[RoleSpec], log_file: Path | None) -> None:
        """Joins the process group and builds the workers of all roles. From here on, the process writes its output to
        `log_file`, if that is not None."""
        if log_file is not None:
            redirect_output(log_file)
            ACTIVITY.write_beside(log_file)
        with picklable_errors():
            if context.device_type == "cuda":
                # Before `join_process_group` selects the process's own GPU, CUDA would use the one of a neighbour.
                is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
                assert not is_used, "a library has used CUDA while it was imported"
            join_process_group(context)
            self.fused = FusedWorker(context, roles)
            if context.device_type == "cpu":
                # Frees the memory that was only needed while loading the models.
                HOST_MEMORY.return_free_memory()

    def mesh_positions(self, wanted: Sequence[tuple[str, str]]) -> list[MeshPosition | TrainerError]:
        """Returns for each (role, mesh) the position of this process, or the error that computing it raised."""
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
        """Reads the arguments, calls the method, and returns its result as `Call.returns` says; an `async` method runs
        until it finishes. First drops the cached results of the `forgotten` keys.

        Raises DispatchError if there is no such method, or if it has changed a column of a batch in place, because
        other processes share the memory; DataLostError; and the method's own error, as WorkerError if it cannot be
        pickled."""
        self.cache.forget(forgotten)
        arrived = Call.deserialized(call)
        with SPANS.span(f"{arrived.role}.{arrived.method}"), picklable_errors():
            try:
                return self._execute(arrived)
            except Exception as error:
                if arrived.keep_as is not None:
                    # A copy, because the error's traceback would keep the data of the call alive.
                    self.cache.keep_error(arrived.keep_as, copy(_picklable(error)))
                raise

    def execute_by_name(self) -> object:
        """Like `execute`, for a method without arguments. Ray's task name contains role and method (see
        `task_name`)."""
        role, _, method = ray.get_runtime_context().get_task_name().removeprefix(TASK_PREFIX).rpartition(".")
        with SPANS.span(f"{role}.{method}"), picklable_errors():
            return self._execute(Call(role, method, (), Returns.VALUE))

    def take_spans(self) -> list[Record]:
        """Returns what this process has recorded since the last `take_spans`; see SpanRecorder.take."""
        return SPANS.take()

    def drop_spans(self) -> None:
        """Drops what this process has recorded."""
        SPANS.take()

    def _execute(self, call: Call) -> object:
        role, method, returns = call.role, call.method, call.returns
        with SPANS.span("read arguments"):
            arguments = [self._read(argument) for argument in call.arguments]
        if call.checks_lengths:
            check_lengths(f"{role}.{method}", arguments)
        versions = [argument.tensor_versions() if isinstance(argument, DataProto) else None for argument in arguments]
        result = self._built().execute(role, method, tuple(arguments))
        if inspect.iscoroutine(result):
            self.loop = self.loop or asyncio.new_event_loop()
            result = self.loop.run_until_complete(result)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise DispatchError(
                f"{role}.{method}: returned a generator, which cannot be pickled; return a list or a DataProto"
            )
        for argument, before in zip(arguments, versions, strict=True):
            if isinstance(argument, DataProto) and argument.tensor_versions() != before:
                now = argument.tensor_versions()
                changed = ", ".join(name for name, version in (before or {}).items() if now[name] != version)
                raise DispatchError(
                    f"{role}.{method}: changed columns of its batch in place ({changed}), but other processes share "
                    "their memory; change a clone of each column"
                )
        if returns is Returns.NOTHING:
            return None
        if returns is Returns.VALUE:
            return result
        if not isinstance(result, DataProto):
            raise DispatchError(f"{role}.{method}: must return a DataProto (got {type(result).__name__})")
        with SPANS.span("store result"):
            as_stored = stored(result)
            if call.keep_as is not None:
                self.cache.keep(call.keep_as, result, as_stored)
        return as_stored

    def close(self) -> None:
        """Leaves the process group, so that the other ranks do not report a lost connection when this process ends."""
        leave_process_group()

    def _read(self, argument: object) -> object:
        """Returns an argument in the form that the method gets: placeholders are replaced by their batches, and all
        columns of a batch are read into this process."""
        if isinstance(argument, CachedArgument):
            argument = self.cache.get(argument.key)
        if isinstance(argument, StoredArgument):
            argument = get_batches([argument.reference])[0]
        return argument.fetched() if isinstance(argument, DataProto) and argument.has_remote else argument

    def _built(self) -> FusedWorker:
        assert self.fused is not None, "call build first"
        return self.fused


@contextmanager
def picklable_errors() -> Iterator[None]:
    """If the block raises an error that the controller could not unpickle, or one that is too large, raises a
    WorkerError with its text instead. Other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        picklable = _picklable(error)
        if picklable is error:
            raise
        raise picklable from None


def _picklable(error: Exception) -> Exception:
    """Returns the error itself; or a WorkerError with its traceback, if the error is too large or cannot be unpickled,
    or if memory ran out and it is no TrainerError. Ray would report an error that cannot be unpickled as the death of
    this process.

    Unpickling calls the error's class with the arguments that the class passed to its base class, which may be other
    ones than it needs. It also loses the error's `__cause__`. So if memory ran out, `known_cause` records it: the
    attribute of a TrainerError is kept."""
    text = "".join(traceback.format_exception(error))
    cause = memory_cause(error)
    if isinstance(error, TrainerError):
        error.known_cause = error.known_cause or cause
    if cause is None or isinstance(error, TrainerError):
        try:
            pickled = ray.cloudpickle.dumps(error)
            if len(pickled) <= MAX_ERROR_BYTES:
                ray.cloudpickle.loads(pickled)
                return error
        except Exception:
            log.debug("an error cannot be pickled", exc_info=True)
    else:
        text = f"{error!r}\n{text}"
    if len(text) > MAX_ERROR_CHARACTERS:
        text = f"{text[: MAX_ERROR_CHARACTERS // 2]}\n...\n{text[-MAX_ERROR_CHARACTERS // 2 :]}"
    failed = WorkerError(text)
    failed.known_cause = error.known_cause if isinstance(error, TrainerError) else cause
    return failed


def memory_cause(error: BaseException | None) -> ErrorCause | None:
    """Returns which memory ran out, if the error or one in its chain of causes and contexts is an out-of-memory error;
    else None."""
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
