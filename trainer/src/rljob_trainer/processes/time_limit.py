"""The time limit of one call of user code in another process. Time without a CPU core does not count."""

from __future__ import annotations

from rljob_trainer.processes.child_process import CoreUse

CHECK_SECONDS = 0.1
"""Seconds until the next check of a process that may have waited for a core."""
STANDSTILL_SECONDS = 1.0
"""If a wait of the parent takes this much longer than requested, the whole machine was suspended, including the
process."""
UNCOUNTED_SECONDS = 0.05
"""A wait for a core extends the deadline only if it is longer than this."""


class TimeLimit:
    """The deadline of one call. All times are monotonic times of the parent."""

    def __init__(self, seconds: float, now: float, use: CoreUse | None) -> None:
        """The call begins `now`. `use` is the process's CPU use now; None if the process has just started."""
        self._seconds = seconds
        self._began = now
        self._deadline = now + seconds
        self._use_at_beginning = use or CoreUse(0.0, 0.0, False)
        self._seconds_without_core = 0.0
        """Seconds in which the process waited for a core; `_deadline` was already extended by them."""
        self._use_seen: CoreUse | None = None
        """CPU use when `_deadline` was last reached."""
        self._use_seen_at = now
        """Time of the first check that found `_use_seen`."""
        self._is_in_doubt = False
        """True if the process was runnable at `_deadline`. It may have waited for a core; this is known when it has
        run."""
        self._check_again_at = 0.0
        """Time, after `_deadline`, of the next check of a process that is in doubt."""
        self._seconds_stood_still = 0.0
        """Seconds in which the machine was suspended; `_deadline` was already extended by them."""

    @property
    def next_check(self) -> float:
        """Time at which to call `gets_more_time`."""
        return max(self._deadline, self._check_again_at) if self._is_in_doubt else self._deadline

    def extend_after_standstill(self, seconds: float) -> None:
        """Extends the deadline if a wait of the parent took `seconds` longer than requested, because the machine was
        suspended.

        A delay of the parent alone looks the same, so the deadline is not extended again after its extensions have
        reached the time limit."""
        if seconds > STANDSTILL_SECONDS and self._seconds_stood_still < self._seconds:
            self._deadline += seconds
            self._seconds_stood_still += seconds
            self._use_seen_at += seconds

    def postpone(self, seconds: float) -> None:
        """Extends the deadline by a time in which the process worked only for other calls."""
        self._deadline += seconds

    def gets_more_time(self, use: CoreUse | None, now: float) -> bool:
        """Extends the deadline by the time that the process waited for a core, so that no call fails because the
        machine is busy. Returns False if the call has exceeded its limit. `use` is the process's CPU use now.

        Example: the limit is 10 s. After 10 s the process has run for 6 s and waited for a core for 4 s, so the
        deadline moves to 14 s. After 10 s in which it slept, there is no extension.
        The kernel counts a wait only when it is over. So a process that is runnable at the deadline may have waited for
        some time, or may just have woken up. It is checked again after CHECK_SECONDS: then it is still waiting, or the
        kernel has counted the wait."""
        if use is None:
            return False
        has_changed = use != self._use_seen
        if has_changed:
            self._use_seen, self._use_seen_at = use, now
        counted = use.seconds_waited - self._use_at_beginning.seconds_waited
        more = counted + (now - self._use_seen_at if use.is_runnable else 0.0) - self._seconds_without_core
        if more > UNCOUNTED_SECONDS:
            # The kernel may also count a suspension as waiting.
            self._deadline = min(self._deadline + more, now + self._seconds)
            self._seconds_without_core += more
            if self._deadline > now:
                self._is_in_doubt = False
                return True
        seconds_run = use.seconds_run - self._use_at_beginning.seconds_run
        uncounted = now - self._began - self._seconds_stood_still - seconds_run - counted
        if not use.is_runnable or uncounted <= UNCOUNTED_SECONDS or (self._is_in_doubt and has_changed):
            return False
        self._is_in_doubt = True
        self._check_again_at = now + CHECK_SECONDS
        return True
