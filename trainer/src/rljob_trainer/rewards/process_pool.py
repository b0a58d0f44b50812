"""Scoring in parallel processes with a hard time limit for each call. A call scores one response, or several if the
scorer takes a batch or a group.

One thread owns the processes. It sends calls in chunks that get smaller towards the end, reads results as they
arrive, and kills the process group of a scorer that exceeds the limit. The process that replaces it makes the same
call again, alone, because the machine or an earlier call may have caused the failure. If that fails, too, only the
responses of this call have no score. The rest of the chunk goes to other processes. A crash (exit, signal) is handled
in the same way. A SIGKILL is probably caused by a lack of memory and not by the response, so the first SIGKILL of a
call is retried in addition to its first timeout or crash.

A process with an asynchronous scorer makes many calls at the same time, and cancels those that exceed the limit. If its
event loop does not run for that long, or if the process ends, its calls are made again one after the other.

If a service that the scorer calls is unreachable, the call is made again after pauses of 1, 2 and 4 seconds. In these
pauses the processes make other calls.

No scoring process outlives the process of the pool, however the latter ends (see `child_program`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from rljob_trainer.errors import ConfigurationError, ResourceError, RewardError, TrainerError
from rljob_trainer.observability.activity import ACTIVITY
from rljob_trainer.processes.time_limit import TimeLimit
from rljob_trainer.rewards.base import CallSettings, RewardOutcome, RewardRequest, RewardStatus, ScorerSpec, Takes
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.pool_slots import (
    Batch,
    QueuedCall,
    QueuedResponse,
    Slot,
    calls_for,
    next_calls,
    outcome_of,
    request_frame,
)
from rljob_trainer.rewards.scoring_child import ScoringChild

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 300.0
DEATH_CHECK_SECONDS = 0.1
"""The interval of checks for dead processes. Reading from the connection does not show that a process has died if a
child that it forked keeps the connection open."""
UNREACHABLE_PAUSES = (1.0, 2.0, 4.0)
"""Pauses in seconds before the second, third and fourth attempt if a service is unreachable. Longer pauses would delay
the whole step."""
ONE_BY_ONE = CallSettings()


class ScorerPool:
    """Scores batches of responses; usable from any thread."""

    def __init__(
        self,
        spec: ScorerSpec,
        *,
        name: str,
        num_processes: int,
        first_number: int = 0,
        timeout_seconds: float,
        log_folder: Path,
        environment: Mapping[str, str],
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
        calls: CallSettings = ONE_BY_ONE,
        probes_service: bool = False,
    ) -> None:
        """Starts the processes without waiting for them. The output of scorers goes to
        `log_folder`/reward-<name>-<n>.log, where n counts from `first_number`. `probes_service`: whether a process is
        ready only after it has tried the service that the scorer calls."""
        self._spec = spec
        self._name = name
        self._num_processes = num_processes
        self._first_number = first_number
        self._timeout_seconds = timeout_seconds
        self._calls = calls
        self._probes_service = probes_service
        self._start_timeout_seconds = start_timeout_seconds
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._arrived: list[QueuedCall] = []
        """Calls from `submit` that the thread has not taken over yet; guarded by `_lock`."""
        self._is_closing = False
        self._error: TrainerError | None = None
        self._ready: Future[None] = Future()
        self._pending: deque[QueuedCall] = deque()
        """Calls that wait for a process."""
        self._paused: list[QueuedCall] = []
        """Calls that wait for their next attempt, because a service was unreachable."""
        self._slots: list[Slot] = []
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        log_folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Blocks until one process has loaded the scorer.

        Raises ConfigurationError if the scorer cannot be loaded, RewardError if the process exits while it loads the
        scorer, or hangs while it loads a user's function, and ResourceError if the process is killed, or hangs while
        it loads a built-in scorer, or if its service cannot be reached."""
        self._ready.result()

    def submit(
        self, requests: Sequence[RewardRequest], groups: Sequence[int] | None = None
    ) -> Future[list[RewardOutcome]]:
        """Starts scoring without waiting; the future's result is one outcome per request, in order. Cancelling the
        future drops the responses that were not yet sent to a process. `groups`: the group of each response, for a
        scorer that takes groups.

        The future raises a TrainerError if the pool fails or is closed before all responses are scored. A response that
        cannot be scored has an outcome without a score; this is not an error. Raises RewardError for a row that cannot
        be sent to a process, and the pool's error if the pool has failed already.
        """
        batch = Batch(Future(), [None] * len(requests), len(requests))
        responses = [QueuedResponse(batch, index, request_frame(request)) for index, request in enumerate(requests)]
        if not responses:
            batch.future.set_result([])
            return batch.future
        if self._calls.takes is not Takes.GROUP:
            groups = None
        else:
            assert groups is not None, "a scorer that takes groups needs the group of each response"
        with self._lock:
            if self._error is not None:
                raise self._error
            self._arrived += calls_for(responses, groups)
        os.write(self._wake_writer, b"\0")
        return batch.future

    def close(self) -> None:
        """Kills the processes. Unfinished batches fail with RewardError. May be called repeatedly."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def process_ids(self) -> list[int]:
        """The process ids of the current processes."""
        return [slot.child.pid for slot in self._slots]

    # Everything below runs in the pool's thread.

    def _run(self) -> None:
        try:
            self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
            for number in range(self._first_number, self._first_number + self._num_processes):
                self._slots.append(self._start(number))
            while not self._is_closing:
                self._run_once()
            self._fail(RewardError("the reward's processes were closed before all responses were scored"))
        except TrainerError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ResourceError(f"{self._spec.where}: a scoring process could not be started: {error}"))
        except Exception as error:
            self._fail(RewardError(f"the reward's process pool failed: {type(error).__name__}: {error}"))
        finally:
            for slot in self._slots:
                slot.child.kill()
            self._selector.close()

    def _run_once(self) -> None:
        """Waits for an event, then reads results, checks deadlines, and sends work, in this order."""
        seconds_to_wait, began = self._seconds_to_wait(), time.monotonic()
        events = self._selector.select(seconds_to_wait)
        now = time.monotonic()
        if seconds_to_wait is not None:
            for slot in self._slots:
                slot.time_limit.extend_after_standstill(now - began - seconds_to_wait)
        for key, _ in events:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
        with self._lock:
            self._pending.extend(self._arrived)
            self._arrived = []
        self._pending.extend(each for each in self._paused if each.ready_at <= now)
        self._paused = [each for each in self._paused if each.ready_at > now]
        for slot in list(self._slots):
            self._read(slot)
            if slot.child.has_ended():
                self._read(slot)
            if slot.is_garbled or slot.child.has_ended():
                self._replace(slot, RewardStatus.DIED)
            elif _has_exceeded_limit(slot, now):
                self._replace(slot, RewardStatus.TIMEOUT)
        for slot in self._slots:
            self._send_work(slot)
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.child.has_unsent else 0)
            self._selector.modify(slot.child.connection, mask, slot)

    def _seconds_to_wait(self) -> float | None:
        times = [slot.time_limit.next_check for slot in self._slots if slot.is_busy]
        times += [call.ready_at for call in self._paused]
        if not times:
            return None
        return min(DEATH_CHECK_SECONDS, max(0.0, min(times) - time.monotonic()))

    def _start(self, number: int) -> Slot:
        child = ScoringChild(
            self._spec,
            self._log_folder / f"reward-{self._name}-{number}.log",
            self._environment,
            self._timeout_seconds,
            probes_service=self._probes_service,
        )
        slot = Slot(child, number, TimeLimit(self._start_timeout_seconds, time.monotonic(), None))
        self._selector.register(child.connection, selectors.EVENT_READ, slot)
        return slot

    def _read(self, slot: Slot) -> None:
        shows_progress = False
        for number, message in slot.child.receive_results():
            match number, message:
                case int(), [*results] if number == 0 or slot.is_async:
                    outcomes = [outcome_of(each) for each in results]
                    call = slot.calls.pop(number)
                    received = [each for each in outcomes if each is not None]
                    if len(received) != len(call.responses) or len(outcomes) != len(received):
                        slot.calls.insert(number, call)
                        slot.is_garbled = True
                        return
                    self._finish_or_retry(call, received)
                case None, {"ready": True, "is_async": bool() as is_async}:
                    slot.is_ready, slot.is_async = True, is_async
                    if not self._ready.done():
                        self._ready.set_result(None)
                case None, {"alive": True} if slot.is_async:
                    pass
                case None, {"refused": str() as text, "is_temporary": bool() as is_temporary}:
                    raise ResourceError(text) if is_temporary else ConfigurationError(text)
                case _:
                    slot.is_garbled = True
                    return
            shows_progress = True
        if shows_progress:
            self._start_time_limit(slot)

    def _replace(self, slot: Slot, status: RewardStatus) -> None:
        """Kills the slot's process, decides what happens to the call that it was making, and starts another process.
        `status`: TIMEOUT or DIED."""
        self._selector.unregister(slot.child.connection)
        slot.child.kill()
        self._slots.remove(slot)
        if slot.retried is not None:
            # It was not sent yet. `_fail` looks for unfinished calls in `_pending`.
            self._pending.appendleft(slot.retried)
        if not slot.is_ready:
            raise self._not_loaded(slot, status)
        retried = None
        if slot.is_async and len(slot.calls) > 1:
            for call in slot.calls:
                call.is_alone = True
        elif slot.calls:
            retried = self._retried(slot, status)
        self._pending.extendleft(reversed(slot.calls))
        if retried is not None:
            retried.is_alone = True
            self._pending.appendleft(retried)
        replacement = self._start(slot.number)
        replacement.retried = None if retried is None else self._pending.popleft()
        self._slots.append(replacement)

    def _retried(self, slot: Slot, status: RewardStatus) -> QueuedCall | None:
        """Returns the call that a killed process was making if it gets another attempt: after its first SIGKILL, and
        after its first timeout or other end of the process. Otherwise finishes it and returns None."""
        call = slot.calls.pop(0)
        if status is RewardStatus.DIED and not slot.is_garbled and slot.child.was_killed():
            if not call.has_killed:
                call.has_killed = True
                log.warning(
                    "reward %s: a scoring process was killed (signal SIGKILL), probably out of memory; another process "
                    "scores its response",
                    self._name,
                )
                return call
            status = RewardStatus.KILLED
        elif not call.has_failed:
            call.has_failed = True
            return call
        detail, seconds = _end_of(slot), 0.0
        if status is RewardStatus.TIMEOUT:
            detail, seconds = f"ran longer than {self._timeout_seconds:g} s and was killed", self._timeout_seconds
        self._finish(call, [RewardOutcome(None, status, detail, seconds)] * len(call.responses))
        return None

    def _not_loaded(self, slot: Slot, status: RewardStatus) -> TrainerError:
        """The error of a process that has ended or was killed before it had loaded the scorer."""
        has_hung = status is RewardStatus.TIMEOUT
        what = f"did not load within {self._start_timeout_seconds:g} s" if has_hung else _end_of(slot)
        text = f"{self._spec.where}: {self._spec.name} {what}"
        is_function = isinstance(self._spec, FunctionScorer)
        if slot.child.was_killed():
            return ResourceError(f"{text}\nthe process was killed while it loaded; it may be out of memory")
        if has_hung and not is_function:
            return ResourceError(f"{text}\nthe process was killed; the machine may be too busy or out of memory")
        return RewardError(
            f"{text}\n{'fix the code that runs when it is imported' if is_function else 'check the installation'}"
        )

    def _send_work(self, slot: Slot) -> None:
        """Sends the next calls, if the process is ready for them. A call that the previous process was making comes
        first, and alone."""
        if slot.child.has_unsent:
            slot.child.flush()
        if not slot.is_ready or not (slot.retried or self._pending):
            return
        was_idle = not slot.calls
        if slot.retried is not None:
            calls, slot.retried = [slot.retried], None
        else:
            self._pending = deque(each for each in self._pending if not each.is_cancelled)
            calls = next_calls(slot, self._pending, self._calls, self._num_processes)
        if not calls:
            return
        slot.calls += calls
        if was_idle:
            self._start_time_limit(slot)
        slot.child.send_calls([call.frame for call in calls])

    def _start_time_limit(self, slot: Slot) -> None:
        """Starts the time limit of the slot's first call."""
        slot.time_limit = TimeLimit(self._timeout_seconds, time.monotonic(), slot.child.core_use())

    def _finish_or_retry(self, call: QueuedCall, outcomes: Sequence[RewardOutcome]) -> None:
        """Finishes a call that has a reply, unless a service was unreachable or the call was cancelled at the time
        limit, and there are attempts left."""
        status, num_pauses = outcomes[0].status, len(UNREACHABLE_PAUSES) * self._calls.retries_unreachable
        if status is RewardStatus.UNREACHABLE and call.num_unreachable < num_pauses:
            call.ready_at = time.monotonic() + UNREACHABLE_PAUSES[call.num_unreachable]
            call.num_unreachable += 1
            self._paused.append(call)
        elif status is RewardStatus.TIMEOUT and not call.has_failed:
            call.has_failed = True
            self._pending.appendleft(call)
        else:
            self._finish(call, outcomes)

    def _finish(self, call: QueuedCall, outcomes: Sequence[RewardOutcome]) -> None:
        for response, outcome in zip(call.responses, outcomes, strict=True):
            batch = response.batch
            batch.outcomes[response.index] = outcome
            batch.num_missing -= 1
            num_scored = len(batch.outcomes) - batch.num_missing
            ACTIVITY.report_activity("responses have scores", num_scored, len(batch.outcomes))
            if batch.num_missing == 0 and batch.future.set_running_or_notify_cancel():
                batch.future.set_result([done for done in batch.outcomes if done is not None])

    def _fail(self, error: TrainerError) -> None:
        with self._lock:
            self._error = error
            unfinished = [*self._arrived, *self._pending, *self._paused]
            unfinished += [each for slot in self._slots for each in (*slot.calls, slot.retried) if each is not None]
        if not self._ready.done():
            self._ready.set_exception(error)
        responses = [each for call in unfinished for each in call.responses]
        for future in {id(each.batch): each.batch.future for each in responses}.values():
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(error)


def _has_exceeded_limit(slot: Slot, now: float) -> bool:
    if not slot.is_busy or now <= slot.time_limit.next_check:
        return False
    return not slot.time_limit.gets_more_time(slot.child.core_use(), now)


def _end_of(slot: Slot) -> str:
    """Why a process ended, for messages; call it after `kill`."""
    if slot.is_garbled:
        return "wrote into the connection that carries its scores, so its process was killed"
    return slot.child.describe_end()
