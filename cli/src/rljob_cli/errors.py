"""Errors with a message for the user."""

from __future__ import annotations

from rljob_api.constants import ExitCode

NOT_FOUND_EXIT_CODE = 3
"""Exit code of a command whose job does not exist or was deleted."""


class CliError(Exception):
    """A command failed. The message says why and what to do; it is printed without a traceback."""

    def __init__(self, message: str, exit_code: int = ExitCode.CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LocalPlanError(CliError):
    """The job cannot run with the devices of this machine, or with the number of workers in --workers."""


class RunFolderError(CliError):
    """The run's folder cannot be used."""


class TrainerStartError(CliError):
    """The trainer's process cannot be started."""


class ClusterError(CliError):
    """A cluster cannot be used, or its API server rejected a request."""


class NotAllowedError(ClusterError):
    """The user lacks a permission on the cluster."""


class ObjectNotFoundError(ClusterError):
    """An object that a request names does not exist."""


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
    """There is no job with this name. `flags`: options that the suggested command needs for the same cluster and
    namespace."""

    def __init__(self, name: str, flags: str = "") -> None:
        super().__init__(
            f"RLJob {name}: not found in this namespace; `rljob list{flags}` lists the jobs of the namespace,"
            " --namespace selects another one",
            NOT_FOUND_EXIT_CODE,
        )


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
