"""A thread that runs a rollout engine, so that its process can do other things while responses are generated.

    calling thread                       the loop's thread
    submit, abort  -- commands -->       applies commands, makes steps
    take           <-- responses --      until no request is unfinished: then the loop is idle

While the loop is idle, the engine belongs to the caller, who may wake it, put it to sleep or replace its weights. All
requests of a `submit` are added before the next step, in their order. If the engine has no other requests, its cache is
cleared first. So after one `submit` to an idle engine, the engine gets the same calls as from `RolloutEngine.generate`,
and on CPUs the responses are bitwise the same.

Conversations of several turns (`environments/host.py`) do not use `take`: the loop gives each response to `on_finished`
after the step in which it has ended, and the next turn is submitted from another thread, with the cache of the earlier
turns.

If several ranks share a copy of the model (tensor parallelism), all of them must apply the same commands between the
same steps. The first of these ranks decides: before each step it broadcasts how many commands are applied by then, and
the others wait until they have received that many. A rank with nothing to do waits for commands of its own caller and
not for other ranks, because a collective has a time limit.

In conversations only the leader knows the next turns. There the leader broadcasts the commands themselves (`shares`),
and the other ranks follow (`follow`) until it releases them (`release`).
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest, RolloutEngine
from rljob_trainer.errors import ResourceError, TrainerError, WorkerError
from rljob_trainer.observability.activity import ACTIVITY

THREAD_NAME = "rollout-engine"
"""The name of the loop's thread, which stack traces show."""
CHECK_SECONDS = 1.0
"""The time between two checks, in a waiting call, whether the loop is stuck."""
DEFAULT_STALL_SECONDS = 600.0
"""Default time limit of a step. It is long because the first step may compile the model."""

Clock = Callable[[], float]
"""Seconds since any fixed moment."""
WhileRunning = Callable[[], AbstractContextManager[object]]
"""Returns a context; the loop's thread uses the engine within it."""
OnFinished = Callable[[list[FinishedSequence]], None]
"""Gets the responses that ended in a step, in the loop's thread. Must return at once."""


@dataclass(frozen=True)
class ModelPeers:
    """The ranks that share a copy of the model."""

    group: dist.ProcessGroup
    """A gloo group that nothing else uses."""
    leader: int
    """The global rank of the first of them."""

    def agreed(self, num_commands: int) -> int:
        """Collective. Returns the number of commands of the leader."""
        number = torch.tensor([num_commands])
        dist.broadcast(number, src=self.leader, group=self.group)
        return int(number)

    def shared(self, commands: list[Command]) -> list[Command]:
        """Collective. Returns the commands of the leader; other ranks pass an empty list."""
        found: list[object] = [commands]
        if self.agreed(len(commands)):
            dist.broadcast_object_list(found, src=self.leader, group=self.group)
        return cast("list[Command]", found[0])


@dataclass(frozen=True)
class _Add:
    requests: tuple[GenerationRequest, ...]
    keeps_cache: bool


@dataclass(frozen=True)
class _Abort:
    request_ids: tuple[str, ...]
    partials: list[FinishedSequence] = field(default_factory=list)
    """Filled when the command is applied."""


@dataclass(frozen=True)
class _Release:
    num_submits: int


Command = _Add | _Abort | _Release
"""What the loop's thread does between two steps."""


class EngineLoop:
    """Runs one engine in a thread while there are unfinished requests. Responses go either to the one caller of `take`,
    or to `on_finished`. `submit` and `abort` may be called from any thread.

    If the thread raises an error, a call that waits raises it at once, and so does every later call: a copy of a
    TrainerError, or for other errors a WorkerError with the traceback. If a step takes longer than `stall_seconds`,
    these calls raise ResourceError. After an error the loop cannot be used any more."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        device: torch.device | None = None,
        peers: ModelPeers | None = None,
        shares: bool = False,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        clock: Clock = time.monotonic,
    ) -> None:
        """`device`: the device of the engine, the CPU by default. `peers`: None if no other rank shares the model.
        `shares`: whether only the leader gets requests, and the other ranks follow it."""
        self.engine = engine
        self.while_running: WhileRunning = nullcontext
        """The owner of random streams and of metrics sets it before the first request."""
        self.on_finished: OnFinished | None = None
        """Set before the first request; None: responses are kept for `take`."""
        self.is_leader = peers is None or peers.leader == dist.get_rank()
        """False: this rank may finish its last step some moments after the leader."""
        self._device = device or torch.device("cpu")
        self._peers = peers
        self._shares = shares and peers is not None
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._thread: threading.Thread | None = None
        # The condition protects everything below.
        self._changed = threading.Condition()
        self._inbox: deque[Command] = deque()
        self._num_received = 0
        self._num_applied = 0
        self._unfinished: set[str] = set()
        self._finished: list[FinishedSequence] = []
        self._num_follows = 0
        """The newest number of `follow`."""
        self._num_released = 0
        """The newest number of `release`."""
        self._is_idle = True
        self._progress_at = 0.0
        """When the thread began with its current step."""
        self._failure: TrainerError | None = None

    @property
    def num_unfinished(self) -> int:
        """The number of requests that have not ended."""
        with self._changed:
            self._raise_if_failed_or_stalled()
            return len(self._unfinished)

    def check(self) -> None:
        """Raises the thread's error, or ResourceError if a step takes too long."""
        with self._changed:
            self._raise_if_failed_or_stalled()

    def submit(self, requests: Iterable[GenerationRequest], *, keeps_cache: bool = False) -> None:
        """Adds all requests before the next step. Their ids must differ from those of unfinished requests.
        `keeps_cache`: does not clear the cache if there are no other requests; for prompts that continue earlier ones,
        with the same weights."""
        added = tuple(requests)
        ids = {request.request_id for request in added}
        with self._changed:
            assert len(ids) == len(added), "two requests have the same id"
            assert not ids & self._unfinished, f"unfinished requests have the ids {sorted(ids & self._unfinished)[:10]}"
            self._send(_Add(added, keeps_cache))
            self._unfinished |= ids

    def take(self, max_seconds: float) -> list[FinishedSequence]:
        """Returns the responses that have finished since the last call, in the order in which they finished. Waits
        `max_seconds`, or until no request is unfinished. It does not return at the first response, so that there are
        fewer calls with more responses each."""
        with self._changed:
            self._wait_for_engine(lambda: not self._unfinished, max_seconds)
            taken, self._finished = self._finished, []
            return taken

    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        """Drops requests before the next step, and waits until this is done. Returns their responses so far. Unknown
        ids are ignored, and so are requests that end before."""
        command = _Abort(tuple(request_ids))
        with self._changed:
            self._send(command)
            number = self._num_received
            self._wait_for_engine(lambda: self._num_applied >= number)
        return command.partials

    def follow(self, num_submits: int) -> None:
        """On the other ranks, if commands are shared: applies the commands of the leader until it releases this
        number. `num_submits`: how often requests were submitted so far, to the leader and to this rank alike."""
        with self._changed:
            self._raise_if_failed_or_stalled()
            self._num_follows = max(self._num_follows, num_submits)
            if self._num_follows > self._num_released:
                self._start()

    def release(self, num_submits: int) -> None:
        """On the leader, when all requests up to this number have ended: the other ranks stop following. Does nothing
        if commands are not shared."""
        if self._shares:
            with self._changed:
                self._send(_Release(num_submits))

    def wait_until_idle(self) -> None:
        """Waits until no request is unfinished and the thread does not use the engine any more. Then the engine belongs
        to the caller."""
        with self._changed:
            self._wait_for_engine(lambda: self._is_idle)

    def _send(self, command: Command) -> None:
        """Needs the lock."""
        self._raise_if_failed_or_stalled()
        self._inbox.append(command)
        self._num_received += 1
        self._changed.notify_all()
        self._start()

    def _start(self) -> None:
        """Needs the lock. Starts the thread if the loop is idle."""
        if self._is_idle:
            self._is_idle = False
            self._progress_at = self._clock()
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            # A thread that is idle would keep the engine in memory for ever.
            self._thread = threading.Thread(target=self._run, args=(stream,), name=THREAD_NAME, daemon=True)
            self._thread.start()

    def _wait_for_engine(self, is_over: Callable[[], bool], max_seconds: float = math.inf) -> None:
        """Needs the lock, and releases it while it waits. Raises the thread's error, or ResourceError if the thread is
        stuck."""
        end = self._clock() + max_seconds
        while True:
            self._raise_if_failed_or_stalled()
            remaining = end - self._clock()
            if is_over() or remaining <= 0:
                return
            self._changed.wait(min(remaining, CHECK_SECONDS))

    def _raise_if_failed_or_stalled(self) -> None:
        """Needs the lock."""
        seconds = self._clock() - self._progress_at
        if self._failure is None and not self._is_idle and seconds > self._stall_seconds:
            self._failure = ResourceError(
                f"spec.training.rollout.stallSeconds: a step of the rollout engine takes longer than "
                f"{self._stall_seconds:g} s (seen: {seconds:.0f} s); if steps may be that slow, increase stallSeconds; "
                f"otherwise the engine hangs here:\n{self._stack()}"
            )
        if self._failure is not None:
            # A copy, because each `raise` would add frames to the traceback of the one error.
            raise copy(self._failure) from self._failure

    def _stack(self) -> str:
        thread = 0 if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    # From here on: methods of the loop's thread.

    def _run(self, stream: torch.cuda.Stream | None) -> None:
        try:
            # Each thread has its own number of OpenMP threads, which would be another one without this line.
            torch.set_num_threads(torch.get_num_threads())
            if stream is not None:
                # On the stream of the caller, the work of both threads is done in the order in which they submit it,
                # and both use the same cached memory.
                torch.cuda.set_device(self._device)
                torch.cuda.set_stream(stream)
            while not self._has_become_idle():
                with self.while_running():
                    self._run_until_empty()
        except BaseException as error:
            with self._changed:
                # If a stuck step ends after all, this does not change the error.
                self._failure = self._failure or as_trainer_error(error)
                self._changed.notify_all()

    def _has_become_idle(self) -> bool:
        with self._changed:
            if self._failure is None and (self._inbox or self._num_follows > self._num_released):
                return False
            if self._failure is None and self._unfinished:
                lost = sorted(self._unfinished)
                self._failure = WorkerError(f"the rollout engine lost {len(lost)} requests, such as {lost[:3]}")
            self._is_idle = self._failure is None
            self._changed.notify_all()
            return True

    def _run_until_empty(self) -> None:
        """Applies commands and makes steps until no request is unfinished."""
        num_steps = num_finished = 0
        while self._failure is None:
            self._apply_commands()
            if not self.engine.has_unfinished():
                if self._num_follows > self._num_released:
                    continue
                return
            finished = self.engine.step()
            num_steps, num_finished = num_steps + 1, num_finished + len(finished)
            with self._changed:
                self._progress_at = self._clock()
                if self.on_finished is None and not self._shares:
                    self._finished += finished
                self._unfinished.difference_update(each.request_id for each in finished)
                if finished and not self._unfinished:
                    self._changed.notify_all()
            if finished and self.on_finished is not None:
                self.on_finished(finished)
            ACTIVITY.report_activity(f"steps of the engine, {num_finished} responses are complete", num_steps)

    def _apply_commands(self) -> None:
        """Applies the commands that were received, with tensor parallelism those that the leader has received."""
        for command in self._next_commands():
            match command:
                case _Add():
                    if not command.keeps_cache and not self.engine.has_unfinished():
                        self.engine.clear_cache()
                    for request in command.requests:
                        self.engine.add(request)
                case _Abort():
                    command.partials.extend(self.engine.abort(command.request_ids))
            with self._changed:
                if isinstance(command, _Abort):
                    self._unfinished.difference_update(each.request_id for each in command.partials)
                if isinstance(command, _Release):
                    self._num_released = max(self._num_released, command.num_submits)
                self._num_applied += 1
                self._progress_at = self._clock()
                self._changed.notify_all()
            if self._failure is not None:
                return

    def _next_commands(self) -> list[Command]:
        """Returns the commands to apply before the next step."""
        with self._changed:
            number = self._num_received - self._num_applied
            if self._shares and not self.is_leader:
                # A follower may wait for long, until an environment has answered.
                self._progress_at = math.inf
        if self._peers is not None and not self._shares:
            number = self._peers.agreed(self._num_received) - self._num_applied
            with self._changed:
                self._changed.wait_for(lambda: len(self._inbox) >= number or self._failure is not None)
        with self._changed:
            commands = [self._inbox.popleft() for _ in range(min(number, len(self._inbox)))]
        if self._peers is not None and self._shares:
            commands = self._peers.shared(commands)
            with self._changed:
                self._progress_at = self._clock()
        return commands


def as_trainer_error(error: BaseException) -> TrainerError:
    """Returns the error, or for other errors than TrainerError a WorkerError with the traceback."""
    if isinstance(error, TrainerError):
        return error
    failed = WorkerError("".join(traceback.format_exception(error)))
    failed.__cause__ = error
    return failed
