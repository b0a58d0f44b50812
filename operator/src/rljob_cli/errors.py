"""Errors with a message for the user."""

from __future__ import annotations

from rljob_api.constants import ExitCode

NOT_FOUND_EXIT_CODE = 3


class CliError(Exception):
    """A command failed. The message says why and what to do; it is printed without a traceback."""

    def __init__(self, message: str, exit_code: int = ExitCode.CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LocalPlanError(CliError):
    """The job cannot run on this machine's devices, or not with this number of workers."""


class RunFolderError(CliError):
    """The run's folder cannot be used."""


class TrainerStartError(CliError):
    """The trainer's process cannot be started."""


class ClusterError(CliError):
    """A cluster cannot be used, or its API server refused a request."""


class NotAllowedError(ClusterError):
    """The user lacks a permission on the cluster."""


class ClusterUnreachableError(ClusterError):
    """The API server is unreachable or overloaded; a retry may succeed."""

    def __init__(self, cluster: str, reason: str) -> None:
        super().__init__(
            f"{cluster}: the API server is unreachable ({reason}); retry, check the network, or select another"
            " cluster with --context",
            ExitCode.INFRASTRUCTURE,
        )
        self.reason = reason


class JobNotFoundError(ClusterError):
    """There is no job with this name."""

    def __init__(self, name: str, flags: str = "") -> None:
        super().__init__(
            f"RLJob {name}: not found in this namespace; `rljob list{flags}` lists its jobs,"
            " --namespace selects another namespace",
            NOT_FOUND_EXIT_CODE,
        )


class JobExistsError(ClusterError):
    """A job with this name already exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"RLJob {name}: already exists; use another name")
