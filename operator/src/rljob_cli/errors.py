"""What the commands raise on purpose."""

from __future__ import annotations

from rljob_api.constants import ExitCode

NOT_FOUND_EXIT_CODE = 3


class CliError(Exception):
    """A command cannot do what was asked; the text says why and what to do instead."""

    def __init__(self, message: str, exit_code: int = ExitCode.CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LocalPlanError(CliError):
    """The job does not fit on this machine's devices."""


class RunFolderError(CliError):
    """The run's folder cannot be used."""


class TrainerStartError(CliError):
    """The trainer's process cannot be started."""


class ClusterError(CliError):
    """A cluster cannot be used, or its API server refused a request."""


class NotAllowedError(ClusterError):
    """Whoever asks lacks a right."""


class ClusterUnreachableError(ClusterError):
    """No answer from the API server, or one that a later try may not get."""

    def __init__(self, cluster: str, reason: str) -> None:
        super().__init__(
            f"{cluster}: no answer from the API server ({reason}); try again, check the network, or name another"
            " cluster with --context",
            ExitCode.INFRASTRUCTURE,
        )
        self.reason = reason


class JobNotFoundError(ClusterError):
    """There is no job of this name."""

    def __init__(self, name: str, flags: str = "") -> None:
        super().__init__(
            f"RLJob {name}: there is none in this namespace; `rljob list{flags}` shows which there are,"
            " --namespace names another one",
            NOT_FOUND_EXIT_CODE,
        )


class JobExistsError(ClusterError):
    """There is a job of this name already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"RLJob {name}: exists already; give another name")
