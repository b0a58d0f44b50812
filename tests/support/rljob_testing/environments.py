"""Environments of tests: a module of user code in a folder, and processes that run its classes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from rljob_trainer.environments.description import ClassSpec
from rljob_trainer.environments.environment_pool import EnvironmentProcesses
from rljob_trainer.environments.probe import ProbeResult, Trial, describe_environments
from rljob_trainer.models.tokenizer import ToolCall
from rljob_trainer.rewards.scorer_environment import scorer_environment

MODULE = "games"
WHERE = "spec.training.environment.classes"
Result = TypeVar("Result")


def class_specs(*names: str, arguments: Mapping[str, object] | None = None) -> list[ClassSpec]:
    """Classes of the module, each with its own name in the job."""
    return [
        ClassSpec(name, f"{MODULE}:{name}", dict(arguments or {}), f"{WHERE}[{index}]")
        for index, name in enumerate(names)
    ]


def write_module(folder: Path, code: str) -> None:
    """Writes the user's module."""
    (folder / f"{MODULE}.py").write_text(code)


@asynccontextmanager
async def processes_for(
    folder: Path,
    *names: str,
    rollouts_per_process: int = 1,
    max_rollouts: int = 1,
    timeout_seconds: float = 60.0,
) -> AsyncIterator[EnvironmentProcesses]:
    """Processes for classes of the module in `folder`."""
    processes = EnvironmentProcesses(
        class_specs(*names),
        log_folder=folder / "logs",
        variables=scorer_environment(os.environ, [], [folder]),
        timeout_seconds=timeout_seconds,
        rollouts_per_process=rollouts_per_process,
        max_rollouts=max_rollouts,
    )
    try:
        yield processes
    finally:
        await processes.close()


def process_ids(processes: EnvironmentProcesses) -> list[int]:
    """The ids of the processes that accept calls."""
    return [each.process.pid for each in processes._processes if each.process.is_usable]


def probe(
    folder: Path, *specs: ClassSpec, trials: tuple[Trial, ...] = (), timeout_seconds: float = 60.0
) -> ProbeResult:
    """Describes classes of the module in `folder`."""
    return describe_environments(
        specs,
        variables=scorer_environment(os.environ, [], [folder]),
        log_file=folder / "logs" / "environment-probe.log",
        timeout_seconds=timeout_seconds,
        trials=trials,
    )


def run(test: Coroutine[None, None, Result]) -> Result:
    """Runs a test that hangs for at most two minutes."""
    return asyncio.run(asyncio.wait_for(test, 120))


def call(name: str, **arguments: object) -> ToolCall:
    """A call of a tool by the model."""
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
