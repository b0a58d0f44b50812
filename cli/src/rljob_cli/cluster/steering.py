"""`rljob suspend`, `resume`, `stop`, `retry` and `delete`: change an existing job.

`delete` deletes the job. The other commands change `spec.suspend` or an annotation of the job; this is a request that
the operator applies. If the job is already in the requested state, or was already asked, they only print this. With
`wait`, a command waits until the job has the requested state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from rljob_api.conditions import Reason
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, ExitCode
from rljob_api.v1alpha1.run_policy import Cleanup
from rljob_api.v1alpha1.status import AttemptState
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.job_state import (
    attempt_state,
    attempt_under_way,
    ending,
    is_running,
    is_to_be_retried,
    moment,
    newest_attempt,
    phase,
    reason,
    resume_point,
    retry_asked_at,
    stop_asked_at,
    stop_is_pending,
    storage_uri,
)
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.cluster.watching import POLL_SECONDS, Clock, poll_job
from rljob_cli.errors import NOT_FOUND_EXIT_CODE, CliError, JobNotFoundError
from rljob_cli.plain_text import age, duration_text, one_line, shortened, time_text


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a request: a message for the user, and the exit code."""

    text: str
    exit_code: int = ExitCode.SUCCESS


@dataclass(frozen=True)
class Steering:
    """The commands for one job. Every public method returns an exit code: 0; with `wait` also 1 if the job does not
    reach the requested state (for example because it finished), 3 if it was deleted, 130 for Ctrl-C. The methods raise
    JobNotFoundError, JobChangedError and other subclasses of ClusterError, and CliError if the request is not possible
    in the job's state."""

    cluster: Cluster
    name: str
    console: Console
    wait: bool = False
    clock: Clock = field(default_factory=Clock)

    def suspend(self) -> int:
        """Asks the operator to save a checkpoint and delete the job's pods."""
        job = self._job()
        end = ending(job.status)
        if end is not None:
            raise CliError(f"{job.where}: has finished ({end.kind}, {end.reason}), so it cannot be suspended")
        if job.wants_suspend and job.status.suspended_at is not None:
            since = age(moment(job.status.suspended_at), self.clock.now())
            self._say(f"{job.where} is already suspended (for {since}); {self._command('resume')} resumes it")
            return ExitCode.SUCCESS
        if job.wants_suspend:
            self._say(f"{job.where} is already being suspended")
        else:
            job = self.cluster.change_spec(job, {"suspend": True})
            self._say(f"{job.where} will be suspended: {_how_the_attempt_ends(job)}")
            self._say(f"{self._command('resume')} resumes it from its newest checkpoint")
        return self._until(job, _suspended)

    def resume(self) -> int:
        """Asks the operator to resume a suspended job."""
        job = self._job()
        if not job.wants_suspend:
            self._say(f"{job.where} is not suspended ({_state_text(job)})")
            return ExitCode.SUCCESS
        job = self.cluster.change_spec(job, {"suspend": False})
        end = ending(job.status)
        if end is not None:
            more = "" if end.is_complete else f"; {self._command('retry')} resumes it from its newest checkpoint"
            self._say(f"{job.where} is no longer suspended, but it has finished ({end.kind}, {end.reason}){more}")
            return ExitCode.SUCCESS
        self._say(f"{job.where} will resume with a new attempt {resume_point(job)}")
        # Until the operator has observed the change, the status is that of the suspended job.
        generation = job.metadata.generation
        return self._until(job, lambda seen: _runs(seen) if seen.status.observed_generation >= generation else None)

    def stop(self) -> int:
        """Asks the operator to stop the job with a checkpoint, so that it becomes Failed. Returns 0 also if the job
        finishes in another way."""
        job = self._job()
        end, will_be_retried = ending(job.status), is_to_be_retried(job)
        if end is not None and not will_be_retried:
            self._say(f"{job.where} has already finished ({end.kind}, {end.reason})")
            return ExitCode.SUCCESS
        asked_at, attempt = stop_asked_at(job), attempt_under_way(job)
        if asked_at is not None and stop_is_pending(job):
            self._say(f"{job.where} was already asked to stop, at {shortened(one_line(asked_at))}")
        elif attempt is not None and attempt.stop is not None and attempt.stop.reason == Reason.STOPPED_BY_USER:
            self._say(f"{job.where} is already being stopped, since {attempt.stop.requested_at}")
        else:
            job = self.cluster.annotate_job(job, ANNOTATION_STOP, _new_value(self.clock.now()))
            how = _how_the_attempt_ends(job, job.run_policy.cleanup)
            self._say(f"{job.where} will be stopped: {how}, and the job is Failed ({Reason.STOPPED_BY_USER})")
            self._say(f"{self._command('retry')} resumes it from its newest checkpoint")
        # Until the operator has applied the retry, the result in the status is the old one.
        return self._until(job, lambda seen: None if will_be_retried and is_to_be_retried(seen) else _ended(seen))

    def retry(self) -> int:
        """Asks the operator to start another attempt now."""
        job = self._job()
        asked_at = retry_asked_at(job)
        # A later stop request replaces the retry request, so another retry request is needed.
        if asked_at is None or (is_to_be_retried(job) and stop_is_pending(job)):
            self._check_that_retry_is_possible(job)
            job = self.cluster.annotate_job(job, ANNOTATION_RETRY, _new_value(self.clock.now()))
            self._say(f"{job.where}: {_what_a_retry_does(job)}")
        else:
            self._say(f"{job.where}: a retry was already requested at {shortened(one_line(asked_at))}")
        former = newest_attempt(job)

        def retried(seen: StoredJob) -> _Outcome | None:
            newest = newest_attempt(seen)
            # Until the operator has applied the retry, the result in the status is the old one.
            if retry_asked_at(seen) is not None:
                return None
            if newest is not None and (former is None or newest.number > former.number):
                return _runs(seen)
            return _ended(seen, ExitCode.APPLICATION)

        return self._until(job, retried)

    def _check_that_retry_is_possible(self, job: StoredJob) -> None:
        """Raises CliError if the operator would not retry the job in its state."""
        where, attempt, end = job.where, attempt_under_way(job), ending(job.status)
        if end is not None and end.is_complete:
            raise CliError(f"{where}: is Complete, so there is nothing to retry; submit a new job to train further")
        if job.wants_suspend:
            raise CliError(f"{where}: is suspended; resume it with {self._command('resume')}")
        if end is not None:
            return
        if stop_asked_at(job) is not None or (attempt is not None and attempt.stop is not None):
            raise CliError(
                f"{where}: is still stopping; retry when {self._command('status')} shows that it has finished"
            )
        if attempt is not None:
            state = f"attempt {attempt.number} is {one_line(attempt_state(attempt))}"
            raise CliError(
                f"{where}: {state}, so there is nothing to retry; stop the job first with {self._command('stop')}"
            )
        if job.status.next_attempt is None:
            raise CliError(f"{where}: no attempt has failed, so there is nothing to retry ({_state_text(job)}); wait")

    def _job(self) -> StoredJob:
        job = self.cluster.job(self.name)
        if job.metadata.deletion_timestamp is not None:
            raise CliError(
                f"{job.where}: is being deleted; afterwards `rljob submit{self.cluster.flags} FILE` can create it again"
            )
        return job

    def _until(self, job: StoredJob, done: Callable[[StoredJob], _Outcome | None]) -> int:
        """With `wait`: waits until `done` returns an outcome, and prints it. Otherwise: prints the command that watches
        the job. Returns the exit code."""
        if not self.wait:
            self._say(f"to watch it: rljob status {self.name}{self.cluster.flags} --watch")
            return ExitCode.SUCCESS
        printed = ""
        try:
            for seen in poll_job(self.cluster, self.name, self.clock, lambda text, _: self._say(text)):
                if seen.metadata.uid != job.metadata.uid:
                    break
                outcome = done(seen)
                if outcome is not None:
                    self._say(outcome.text)
                    return outcome.exit_code
                text = f"waiting: {_state_text(seen)}"
                if text != printed:
                    printed = text
                    self.console.print(Text(text, "dim"), soft_wrap=True)
        except KeyboardInterrupt:
            self._say("stopped waiting; the request stays in effect")
            return ExitCode.INTERRUPTED
        self._say(f"{job.where} was deleted")
        return NOT_FOUND_EXIT_CODE

    def _command(self, command: str) -> str:
        return f"`rljob {command} {self.name}{self.cluster.flags}`"

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def delete(cluster: Cluster, name: str, console: Console, *, wait: bool, clock: Clock | None = None) -> int:
    """Deletes the job. With `wait`, waits until the job and all its pods are deleted. Returns 0, or 130 for Ctrl-C
    while it waits.

    Raises:
        JobNotFoundError: there is no such job.
        JobChangedError: another job has its name now.
    """
    job = cluster.job(name)
    cluster.delete_job(job)
    console.print(Text(f"{job.where} deleted; its pods stop within their grace period"), soft_wrap=True)
    folder = storage_uri(job)
    if folder is not None:
        console.print(Text(f"checkpoints and results are kept in {folder}"), soft_wrap=True)
    if not wait:
        return 0
    try:
        _wait_until_deleted(cluster, job, console, clock or Clock())
    except KeyboardInterrupt:
        console.print("stopped waiting; the deletion continues")
        return ExitCode.INTERRUPTED
    console.print("all its pods are deleted")
    return 0


def _suspended(job: StoredJob) -> _Outcome | None:
    """The outcome once the job is suspended, was resumed again, or has finished; None before."""
    if not job.wants_suspend:
        return _Outcome(f"{job.where} was resumed in the meantime", ExitCode.APPLICATION)
    if job.status.suspended_at is not None:
        return _Outcome(f"{job.where} is suspended, and its pods are deleted; it will resume {resume_point(job)}")
    return _ended(job, ExitCode.APPLICATION)


def _runs(job: StoredJob) -> _Outcome | None:
    """The outcome once the trainer runs or the job has finished; None before."""
    attempt = attempt_under_way(job)
    if attempt is not None and is_running(attempt):
        return _Outcome(f"{job.where}: attempt {attempt.number} is running")
    return _ended(job, ExitCode.APPLICATION)


def _ended(job: StoredJob, exit_code: int = ExitCode.SUCCESS) -> _Outcome | None:
    """The outcome once the job has finished, with this exit code; None before."""
    end = ending(job.status)
    if end is None:
        return None
    text = f"{job.where} has finished: {end.kind}, {end.reason}: {shortened(one_line(end.message))}"
    return _Outcome(text, exit_code)


def _how_the_attempt_ends(job: StoredJob, cleanup: Cleanup = Cleanup.DELETE_CLUSTER) -> str:
    """What happens to the trainer and its cluster after a request to suspend or stop the job."""
    attempt = attempt_under_way(job)
    if attempt is None:
        return "no attempt is running"
    is_deleted = cleanup is Cleanup.DELETE_CLUSTER
    rest = "its RayCluster is deleted" if is_deleted else "its RayCluster is kept (runPolicy.cleanup)"
    if attempt_state(attempt) == AttemptState.PROVISIONING:
        return f"its trainer has not started yet, and {rest}"
    if attempt_state(attempt) == AttemptState.STARTING:
        return f"its trainer is starting and exits without a new checkpoint, then {rest}"
    grace = duration_text(job.run_policy.grace_period_seconds)
    return f"its trainer saves a checkpoint within {grace} (runPolicy.gracePeriodSeconds), then {rest}"


def _what_a_retry_does(job: StoredJob) -> str:
    following, newest = job.status.next_attempt, newest_attempt(job)
    number = f"attempt {newest.number + 1}" if newest else "attempt 1"
    when = f"instead of at {time_text(moment(following.not_before))}, " if following is not None else ""
    return f"{number} starts now, {when}{resume_point(job)}; the retry budgets are reset"


def _state_text(job: StoredJob) -> str:
    """The state of the job on one line."""
    attempt = attempt_under_way(job)
    parts = [phase(job), reason(job), f"attempt {attempt.number} {attempt_state(attempt)}" if attempt else ""]
    return one_line(", ".join(dict.fromkeys(part for part in parts if part)))


def _new_value(now: datetime) -> str:
    """A value that no earlier request has. The operator records the value of the request that it has applied."""
    return now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _wait_until_deleted(cluster: Cluster, job: StoredJob, console: Console, clock: Clock) -> None:
    printed = ""
    while True:
        left = [pod.metadata.name for pod in cluster.pods(job)]
        if not left and _is_deleted(cluster, job):
            return
        text = f"waiting for {', '.join(left) or 'the job'}"
        if text != printed:
            printed = text
            console.print(Text(text, "dim"), soft_wrap=True)
        clock.sleep(POLL_SECONDS)


def _is_deleted(cluster: Cluster, job: StoredJob) -> bool:
    """Whether the job no longer exists. A new job with the same name does not count."""
    try:
        return cluster.job(job.metadata.name).metadata.uid != job.metadata.uid
    except JobNotFoundError:
        return True
