"""Exceptions of the client. The command line prints the same messages."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.constants import ExitCode
from rljob_api.errors import Problem

NOT_FOUND_EXIT_CODE = 3
"""Exit code of a command whose job does not exist or was deleted."""
TIMEOUT_EXIT_CODE = 124
"""Exit code of a command whose `--timeout` has passed. The program `timeout` has the same code."""


class RLJobError(Exception):
    """Base class. The message says what is wrong and what to do.

    `exit_code`: exit code of the command line for this error."""

    def __init__(self, message: str, exit_code: int = ExitCode.CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RejectedError(RLJobError):
    """The job is invalid, or a request is not possible in the state of the job. Nothing was changed.

    `problems`: each fault of the job with its field; empty if the message is not about fields."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class NoLogError(RLJobError):
    """There is no log (yet), or it was deleted with its pod; the message then says where a copy is."""


class ResultsError(RLJobError):
    """Results cannot be copied."""


class JobFinishedError(RLJobError):
    """The job does not reach the state that was waited for: it has finished, or somebody has resumed it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.APPLICATION)


class WaitTimeoutError(RLJobError, TimeoutError):
    """The job has not reached the state within the time limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, TIMEOUT_EXIT_CODE)


class ClusterError(RLJobError):
    """A request to a cluster failed, or a cluster cannot be used."""


class NotAllowedError(ClusterError):
    """The user lacks a permission on the cluster."""


class ObjectNotFoundError(ClusterError):
    """A Kubernetes object does not exist."""


class ClusterUnreachableError(ClusterError):
    """The API server is unreachable, overloaded, or has an internal error; a retry may succeed."""

    def __init__(self, cluster: str, reason: str) -> None:
        super().__init__(
            f"{cluster}: no usable response from the API server ({reason}); retry, check the network, or select another"
            " cluster with --context",
            ExitCode.INFRASTRUCTURE,
        )
        self.reason = reason
        """The cause, such as `connection refused`, without the cluster and without advice."""


class ConflictError(ClusterError):
    """The object on the API server is not the version for which the request was made."""


class JobNotFoundError(ClusterError):
    """There is no job with this name, or it was deleted."""

    def __init__(self, message: str) -> None:
        super().__init__(message, NOT_FOUND_EXIT_CODE)


class JobChangedError(ClusterError):
    """Somebody changed, deleted or replaced the job after the command had read it. `where`: the job, such as `RLJob
    team-a/my-job`."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: somebody else changed, deleted or replaced this job while the command was running, so nothing"
            " was done; see its current state with `rljob status`, then run the command again"
        )


class JobExistsError(ClusterError):
    """A job with this name already exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"RLJob {name}: already exists; use another name")


def no_such_job(name: str, flags: str = "") -> JobNotFoundError:
    """The error for a name that no job has. `flags`: options that the suggested command needs for the same cluster and
    namespace."""
    return JobNotFoundError(
        f"RLJob {name}: not found in this namespace; `rljob list{flags}` lists the jobs of the namespace, --namespace"
        " selects another one"
    )


def deleted_meanwhile(where: str) -> JobNotFoundError:
    """The error for a job that was deleted while it was watched. `where`: the job, such as `RLJob team-a/my-job`."""
    return JobNotFoundError(f"{where} was deleted")
