"""Scoring in parallel processes with a hard time limit for each response.

One thread owns the processes. It sends responses in chunks that get smaller towards the end, reads results as they
arrive, and kills the process group of a scorer that exceeds the limit. The process that replaces it scores the same
response again, alone, because the machine or an earlier response may have caused the failure. If that fails, too, only
this response has no score. The rest of the chunk goes to other processes. A crash (exit, signal) is handled in the same
way. A SIGKILL is probably due to a lack of memory and not to the response, so it has an attempt of its own.

If a service that the scorer calls is unreachable, the response is scored again after pauses of 1, 2 and 4 seconds. In
these pauses the processes score other responses.

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
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, ScorerSpec
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.pool_slots import Batch, QueuedResponse, Slot, request_frame
from rljob_trainer.rewards.scoring_child import ScoringChild

log = logging.getLogger(__name__)

MAX_CHUNK = 64
"""The maximum number of responses that are sent to a process together."""
START_TIMEOUT_SECONDS = 300.0
DEATH_CHECK_SECONDS = 0.1
"""The interval of checks for dead processes: if a forked child keeps the connection open, reading does not notice."""
UNREACHABLE_PAUSES = (1.0, 2.0, 4.0)
"""Seconds before the further attempts if a service is unreachable. Longer ones would hold up the whole step."""


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
    ) -> None:
        """Starts the processes without waiting for them. The output of scorers goes to
        `log_folder`/reward-<name>-<n>.log, where n counts from `first_number`."""
        self._spec = spec
        self._name = name
        self._num_processes = num_processes
        self._first_number = first_number
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._arrived: list[QueuedResponse] = []
        """Responses from `submit` that the thread has not taken over yet; guarded by `_lock`."""
        self._is_closing = False
        self._error: TrainerError | None = None
        self._ready: Future[None] = Future()
        self._pending: deque[QueuedResponse] = deque()
        """Responses that wait for a process."""
        self._paused: list[QueuedResponse] = []
        """Responses that wait for their next attempt, because a service was unreachable."""
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
        it loads a built-in scorer."""
        self._ready.result()

    def submit(self, requests: Sequence[RewardRequest]) -> Future[list[RewardOutcome]]:
        """Starts scoring without waiting; the future's result is one outcome per request, in order. To cancel it drops
        the responses that no process has got.

        The future raises a TrainerError if the pool fails or is closed before all responses are scored. A response that
        cannot be scored is an outcome, not an error. Raises RewardError for a row that cannot be sent to a process, and
        the pool's error if the pool has failed already.
        """
        batch = Batch(Future(), [None] * len(requests), len(requests))
        responses = [QueuedResponse(batch, index, request_frame(request)) for index, request in enumerate(requests)]
        if not responses:
            batch.future.set_result([])
            return batch.future
        with self._lock:
            if self._error is not None:
                raise self._error
            self._arrived += responses
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
        times += [response.ready_at for response in self._paused]
        if not times:
            return None
        return min(DEATH_CHECK_SECONDS, max(0.0, min(times) - time.monotonic()))

    def _start(self, number: int) -> Slot:
        child = ScoringChild(self._spec, self._log_folder / f"reward-{self._name}-{number}.log", self._environment)
        slot = Slot(child, number, TimeLimit(self._start_timeout_seconds, time.monotonic(), None))
        self._selector.register(child.connection, selectors.EVENT_READ, slot)
        return slot

    def _read(self, slot: Slot) -> None:
        num_before = len(slot.responses)
        for message in slot.child.receive_results():
            match message:
                case [
                    "OK" | "ERROR" | "UNREACHABLE" as status,
                    int() | float() | None as score,
                    str() as detail,
                    int() | float() as seconds,
                    str() | None as found,
                ] if slot.responses:
                    outcome = RewardOutcome(score, RewardStatus(status), detail, seconds, found)
                    self._finish_or_pause(slot.responses.popleft(), outcome)
                case {"ready": True}:
                    slot.is_ready = True
                    if not self._ready.done():
                        self._ready.set_result(None)
                case {"refused": str() as text}:
                    raise ConfigurationError(text)
                case _:
                    slot.is_garbled = True
                    return
        if len(slot.responses) < num_before:
            self._start_time_limit(slot)

    def _replace(self, slot: Slot, status: RewardStatus) -> None:
        """Kills the slot's process, decides what happens to the response that it was scoring, and starts another
        process. `status`: TIMEOUT or DIED."""
        self._selector.unregister(slot.child.connection)
        slot.child.kill()
        self._slots.remove(slot)
        if slot.retried is not None:
            # It was not sent yet. In `_pending`, `_fail` finds it.
            self._pending.appendleft(slot.retried)
        if not slot.is_ready:
            raise self._not_loaded(slot, status)
        retried = self._retried(slot, status) if slot.responses else None
        self._pending.extendleft(reversed(slot.responses))
        if retried is not None:
            self._pending.appendleft(retried)
        replacement = self._start(slot.number)
        replacement.retried = None if retried is None else self._pending.popleft()
        self._slots.append(replacement)

    def _retried(self, slot: Slot, status: RewardStatus) -> QueuedResponse | None:
        """Returns the response that a killed process was scoring if it gets another attempt: after its first SIGKILL,
        and after its first timeout or other end of the process. Otherwise finishes it and returns None."""
        response = slot.responses.popleft()
        if status is RewardStatus.DIED and not slot.is_garbled and slot.child.was_killed():
            if not response.has_killed:
                response.has_killed = True
                log.warning(
                    "reward %s: a scoring process was killed (signal SIGKILL), probably out of memory; another process "
                    "scores its response",
                    self._name,
                )
                return response
            status = RewardStatus.KILLED
        elif not response.has_failed:
            response.has_failed = True
            return response
        detail, seconds = _end_of(slot), 0.0
        if status is RewardStatus.TIMEOUT:
            detail, seconds = f"ran longer than {self._timeout_seconds:g} s and was killed", self._timeout_seconds
        self._finish(response, RewardOutcome(None, status, detail, seconds))
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
        """Sends the next chunk of responses, if the process is ready and has scored the last chunk. A response that is
        tried again is a chunk of its own, and the first."""
        if slot.child.has_unsent:
            slot.child.flush()
        if not slot.is_ready or slot.responses or not (slot.retried or self._pending):
            return
        if slot.retried is not None:
            slot.responses.append(slot.retried)
            slot.retried = None
        else:
            self._pending = deque(each for each in self._pending if not each.batch.future.cancelled())
            chunk = min(MAX_CHUNK, -(-len(self._pending) // (2 * self._num_processes)))
            slot.responses.extend(self._pending.popleft() for _ in range(chunk))
        self._start_time_limit(slot)
        slot.child.send(*(response.frame for response in slot.responses))

    def _start_time_limit(self, slot: Slot) -> None:
        """Starts the time limit of the slot's first response."""
        slot.time_limit = TimeLimit(self._timeout_seconds, time.monotonic(), slot.child.core_use())

    def _finish_or_pause(self, response: QueuedResponse, outcome: RewardOutcome) -> None:
        """Finishes a response that has a reply, unless a service was unreachable and there are attempts left."""
        is_unreachable = outcome.status is RewardStatus.UNREACHABLE
        if is_unreachable and response.num_unreachable < len(UNREACHABLE_PAUSES):
            response.ready_at = time.monotonic() + UNREACHABLE_PAUSES[response.num_unreachable]
            response.num_unreachable += 1
            self._paused.append(response)
        else:
            self._finish(response, outcome)

    def _finish(self, response: QueuedResponse, outcome: RewardOutcome) -> None:
        batch = response.batch
        batch.outcomes[response.index] = outcome
        batch.num_missing -= 1
        ACTIVITY.report_activity("responses have scores", len(batch.outcomes) - batch.num_missing, len(batch.outcomes))
        if batch.num_missing == 0 and batch.future.set_running_or_notify_cancel():
            batch.future.set_result([done for done in batch.outcomes if done is not None])

    def _fail(self, error: TrainerError) -> None:
        with self._lock:
            self._error = error
            unfinished = [*self._arrived, *self._pending, *self._paused]
            unfinished += [each for slot in self._slots for each in (*slot.responses, slot.retried) if each is not None]
        if not self._ready.done():
            self._ready.set_exception(error)
        for future in {id(each.batch): each.batch.future for each in unfinished}.values():
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
