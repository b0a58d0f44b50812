"""Tries the job's environment before a device is taken: describes its classes and begins rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.environments.description import ClassSpec, EnvironmentDescription
from rljob_trainer.environments.environment_pool import RolloutPlace
from rljob_trainer.environments.environment_process import START_TIMEOUT_SECONDS, EnvironmentProcess
from rljob_trainer.environments.failures import (
    EnvironmentCodeError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    ServiceUnreachableError,
)
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
    tried = tuple(classes)

    async def probe() -> ProbeResult:
        nonlocal tried
        process = EnvironmentProcess(
            classes,
            log_file=log_file,
            variables=variables,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
        )
        try:
            await process.wait_until_loaded()
            descriptions: list[EnvironmentDescription] = []
            for each in classes:
                tried = (each,)
                descriptions.append(await process.describe(each.name))
            openings: list[str | list[ChatMessage] | None] = []
            for number, trial in enumerate(trials):
                tried = tuple(each for each in classes if each.name == trial.name)
                place = RolloutPlace(process, number)
                openings.append(await place.open(trial.name, trial.row, trial.seed))
                await place.close()
        finally:
            process.kill()
        return ProbeResult(tuple(descriptions), tuple(openings))

    try:
        return asyncio.run(probe())
    except EnvironmentTimeoutError as error:
        raise ConfigurationError(
            f"spec.training.environment.timeoutSeconds: {error} ({_shown(tried)}); increase it, or fix the "
            "environment's code"
        ) from error
    except (EnvironmentCodeError, EnvironmentLostError) as error:
        if isinstance(error, EnvironmentLostError) and error.was_killed:
            raise ResourceError(f"{_shown(tried)}: {error}\nthe process was killed; it may be out of memory") from error
        if isinstance(error, ServiceUnreachableError):
            raise ResourceError(f"{_shown(tried)}: {error}\na service cannot be reached; check that it runs") from error
        raise ConfigurationError(f"{_shown(tried)}: {error}\nfix the environment's code") from error


def _shown(classes: Sequence[ClassSpec]) -> str:
    """The fields of the job for these classes, with their paths."""
    return ", ".join(f"{each.where} ({each.path})" for each in classes)
