"""A host with a scripted engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing.environments import class_specs, probe, process_ids, write_module
from rljob_testing.models import chat_models
from rljob_testing.training.scripted_engine import Script, ScriptedEngine
from rljob_testing.training.scripted_rollouts import CLASSES, END, LIMITS, SECONDS, Described, Running, Start, is_zombie
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.environments.host import EnvironmentHost
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.rewards.scorer_environment import scorer_environment


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Described:
    folder = tmp_path_factory.mktemp("environments")
    write_module(folder, CLASSES)
    template = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
    chat_models.save(
        folder / "model",
        template,
        eos_token=END,
        are_special=False,
        response_template=chat_models.HERMES_RESPONSES,
    )
    found = probe(folder, *class_specs("Game", "Calculator", "Chat")).descriptions
    return Described(folder, {each.name: each for each in found})


@pytest.fixture
def folder(described: Described) -> Path:
    for name in ("hangs", "died"):
        (described.folder / name).unlink(missing_ok=True)
    return described.folder


@pytest.fixture
def start(described: Described, folder: Path) -> Iterator[Start]:
    hosts = list[EnvironmentHost]()

    def begin(
        script: Script,
        *names: str,
        max_open: int = 8,
        rollouts_per_process: int = 1,
        timeout_seconds: float = 60.0,
        **limits: object,
    ) -> Running:
        names = names or ("Game",)
        settings = EnvironmentSettings(
            classes=tuple(class_specs(*names)),
            descriptions=tuple(described.by_name[name] for name in names),
            limits=replace(LIMITS, **limits),  # type: ignore[arg-type]
            max_open=max_open,
            rollouts_per_process=rollouts_per_process,
            timeout_seconds=timeout_seconds,
            tool_parser=None,
            starts_new_rows=False,
            model_folder=folder / "model",
            log_folder=folder / "logs",
            variables=scorer_environment(os.environ, [], [folder]),
        )
        engine = ScriptedEngine(folder / "model", script)
        loop = EngineLoop(engine, stall_seconds=SECONDS)
        hosts.append(EnvironmentHost(loop, settings, 0))
        return Running(hosts[-1], engine, loop)

    yield begin
    for host in hosts:
        used = process_ids(host._processes)
        host.close()
        assert not asyncio.all_tasks(host._asyncio_loop)
        assert not [each for each in used if Path(f"/proc/{each}").exists() and not is_zombie(each)]
