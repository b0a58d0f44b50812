"""What the commands raise on purpose."""

from __future__ import annotations

from rljob_api.contract import ExitCode


class CliError(Exception):
    """A command cannot do what was asked; the text says why and what to do instead."""

    def __init__(self, message: str, exit_code: int = ExitCode.CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class MappingError(CliError):
    """The job does not fit on this machine's devices."""


class RunFolderError(CliError):
    """The run's folder cannot be used."""


class TrainerStartError(CliError):
    """The trainer's process cannot be started."""
