"""One small Ray cluster for the runs that need not start their own, and the trainer's program in this process."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.ray_cluster import ray_cluster
from rljob_testing.trainer_program import RunTrainer


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster with 3 CPUs and no GPU."""
    with ray_cluster(3, tmp_path_factory.mktemp("ray") / "ray.log") as address:
        yield address


@pytest.fixture
def signal_handlers_kept() -> Iterator[None]:
    """The trainer takes over signals and logging of its process; here that is pytest's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    logger = logging.getLogger("rljob_trainer")
    propagates, log_handlers = logger.propagate, list(logger.handlers)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.propagate, logger.handlers[:] = propagates, log_handlers


@pytest.fixture
def run_trainer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signal_handlers_kept: None,  # noqa: ARG001 - wanted for what it does
) -> RunTrainer:
    """Runs `python -m rljob_trainer` to its end, in this process, as the operator would start it."""

    return RunTrainer(tmp_path, monkeypatch, capsys)
