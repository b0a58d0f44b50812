"""Tries the job's environment before a device is taken: describes its classes and begins rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.environments.description import ClassSpec, EnvironmentDescription
from rljob_trainer.environments.environment_process import START_TIMEOUT_SECONDS, EnvironmentProcess
from rljob_trainer.environments.failures import EnvironmentCodeError, EnvironmentLostError, EnvironmentTimeoutError
from rljob_trainer.errors import ConfigurationError, ResourceError

if TYPE_CHECKING:
    from rljob_trainer.models.tokenizer import ChatMessage


@dataclass(frozen=True)
class Trial:
    """A rollout that is begun and closed at once."""

    name: str
    """Name of the class in the job."""
    row: Mapping[str, object]
    seed: int


@dataclass(frozen=True)
class ProbeResult:
    """What was found."""

    descriptions: tuple[EnvironmentDescription, ...]
    """One per class, in the job's order."""
    openings: tuple[str | list[ChatMessage] | None, ...]
    """One per trial: what its `reset` returned."""


def describe_environments(
    classes: Sequence[ClassSpec],
    *,
    variables: Mapping[str, str],
    log_file: Path,
    timeout_seconds: float,
    trials: Sequence[Trial] = (),
    start_timeout_seconds: float = START_TIMEOUT_SECONDS,
) -> ProbeResult:
    """Starts one environment process, describes all classes, and makes the trials. Call it where no event loop runs.

    Args:
        variables: all environment variables of the process.
        timeout_seconds: the time limit of a call; describing the classes has `start_timeout_seconds`.

    Raises ConfigurationError if a class cannot be used, or if its code fails, hangs or ends the process; ResourceError
    if SIGKILL ends the process, or if a service cannot be reached.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    where = "spec.training.environment"

    async def probe() -> ProbeResult:
        process = EnvironmentProcess(
            classes,
            log_file=log_file,
            variables=variables,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
        )
        try:
            await process.wait_until_loaded()
            descriptions = await process.describe()
            openings: list[str | list[ChatMessage] | None] = []
            for number, trial in enumerate(trials):
                openings.append(await process.open(number, trial.name, trial.row, trial.seed))
                await process.close(number)
        finally:
            process.kill()
        return ProbeResult(descriptions, tuple(openings))

    try:
        return asyncio.run(probe())
    except EnvironmentCodeError as error:
        raise ConfigurationError(f"{where}.classes: {error}\nfix the environment's code") from error
    except EnvironmentTimeoutError as error:
        raise ConfigurationError(
            f"{where}.timeoutSeconds: {error}; increase it, or fix the environment's code"
        ) from error
    except EnvironmentLostError as error:
        if error.was_killed:
            raise ResourceError(f"{where}: {error}\nthe process was killed; it may be out of memory") from error
        raise ConfigurationError(f"{where}.classes: {error}\nfix the environment's code") from error
