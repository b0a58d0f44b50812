"""Fixtures: each test here runs on the CPU, as far as it can, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.gpu.device import DEVICE_TYPES, DeviceContext, joined, missing_device
from rljob_trainer.dispatch.worker import WorkerContext


@pytest.fixture(scope="module", params=DEVICE_TYPES)
def context(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerContext]:
    """This process as the only rank, on each kind of device."""
    reason = missing_device(request.param)
    if reason:
        pytest.skip(reason)
    with joined(request.param, tmp_path_factory.mktemp("group")) as found:
        yield found


@pytest.fixture
def case(context: WorkerContext, tmp_path: Path) -> DeviceContext:
    """What one test gets."""
    return DeviceContext(context, tmp_path)
