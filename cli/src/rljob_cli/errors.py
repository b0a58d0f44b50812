"""Errors of the command line itself. Those of commands for a cluster are in `rljob.errors`."""

from __future__ import annotations

from rljob.errors import RLJobError


class CliError(RLJobError):
    """A command failed. The message says why and what to do; it is printed without a traceback."""


class LocalPlanError(CliError):
    """The job cannot run with the devices of this machine, or with the number of workers in --workers."""


class RunFolderError(CliError):
    """The run's folder cannot be used."""


class TrainerStartError(CliError):
    """The trainer's process cannot be started."""
