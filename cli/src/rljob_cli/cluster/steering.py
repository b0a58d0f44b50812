"""`rljob suspend`, `resume`, `stop`, `retry`, `delete` and `wait`: change existing jobs, and wait for a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from rljob import steering, waiting
from rljob.cluster import Cluster
from rljob.errors import RLJobError
from rljob.polling import Clock
from rljob.steering import Steer
from rljob_api.constants import ExitCode


def steer(
    request: Steer, cluster: Cluster, names: Sequence[str], console: Console, *, wait: bool, clock: Clock | None = None
) -> int:
    """Makes the request for each job, and with `wait` waits for all of them.

    Returns the largest exit code of the jobs: 0; with `wait` also 1 if a job does not reach the requested state (for
    example because it finished), 3 if it was deleted, 130 for Ctrl-C. The error of a single job is raised; if there
    are several, errors are printed, and the other jobs are handled.
    """
    clock = clock or Clock()
    requests: list[steering.Request] = []

    def ask(name: str) -> int:
        sent = request(cluster, name, clock.now())
        for message in sent.messages:
            _say(console, message)
        if sent.outcome_of is not None and not wait:
            _say(console, f"to watch it: rljob status {name}{cluster.flags} --watch")
        requests.append(sent)
        return ExitCode.SUCCESS

    code = _largest_code(names, ask)
    if not wait:
        return code
    waited_for = {sent.job.name: (sent.job, sent.outcome_of) for sent in requests if sent.outcome_of is not None}

    def wait_for(name: str) -> int:
        job, outcome_of = waited_for[name]
        _, outcome = waiting.wait(cluster, job, outcome_of, clock, _reporter(console))
        return _finish(outcome, console)

    try:
        return max(code, _largest_code(list(waited_for), wait_for, is_single=len(names) == 1))
    except KeyboardInterrupt:
        _say(console, "stopped waiting; the request stays in effect")
        return ExitCode.INTERRUPTED


def delete(cluster: Cluster, names: Sequence[str], console: Console, *, wait: bool, clock: Clock | None = None) -> int:
    """Deletes the jobs. With `wait`, waits until the jobs and all their pods are deleted. Returns the largest exit code
    of the jobs, 0 or 130 for Ctrl-C while it waits. Errors are handled as by `steer`."""
    deleted: list[steering.Request] = []

    def remove(name: str) -> int:
        sent = steering.delete(cluster, name)
        for message in sent.messages:
            _say(console, message)
        deleted.append(sent)
        return ExitCode.SUCCESS

    code = _largest_code(names, remove)
    if not wait or not deleted:
        return code
    try:
        for sent in deleted:
            waiting.wait_until_deleted(cluster, sent.job, clock or Clock(), _reporter(console))
    except KeyboardInterrupt:
        console.print("stopped waiting; the deletion continues")
        return ExitCode.INTERRUPTED
    console.print("all its pods are deleted" if len(deleted) == 1 else "all their pods are deleted")
    return code


def wait_for(
    cluster: Cluster,
    name: str,
    state: str,
    console: Console,
    *,
    timeout_seconds: float | None,
    clock: Clock | None = None,
) -> int:
    """Waits until the job has the state. Returns 0, 1 if the job has finished without it, 3 if the job was deleted, 124
    if the time has passed, 130 for Ctrl-C.

    Raises:
        RejectedError: there is no such state.
        JobNotFoundError: there is no such job.
    """
    wanted = waiting.state_named(state)
    try:
        _, outcome = waiting.wait_for_state(
            cluster, name, wanted, clock or Clock(), _reporter(console), timeout_seconds
        )
    except KeyboardInterrupt:
        _say(console, "stopped waiting; the job continues")
        return ExitCode.INTERRUPTED
    return _finish(outcome, console)


def _largest_code(names: Sequence[str], act: Callable[[str], int], *, is_single: bool | None = None) -> int:
    """Acts on every name once and returns the largest exit code. The error of a single name is raised; if there are
    several names, errors are printed."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1 if is_single is None else is_single:
        return max(map(act, distinct), default=ExitCode.SUCCESS)
    code = int(ExitCode.SUCCESS)
    for name in distinct:
        try:
            code = max(code, act(name))
        except RLJobError as error:
            _say(Console(highlight=False, stderr=True), f"error: {error}")
            code = max(code, error.exit_code)
    return code


def _finish(outcome: waiting.Outcome, console: Console) -> int:
    _say(console, outcome.text)
    return int(ExitCode.SUCCESS) if outcome.error is None else outcome.error.exit_code


def _reporter(console: Console) -> waiting.Report:
    return lambda text: console.print(Text(text, "dim"), soft_wrap=True)


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
