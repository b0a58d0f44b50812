"""Fixture of the numerical tests: this process as the only rank of a process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rljob_testing.training.gloo_ranks import process_group_of_one
from rljob_trainer.dispatch.worker import WorkerContext


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerContext]:
    """The worker of a group of one, shared by all tests of a module."""
    with process_group_of_one(tmp_path_factory.mktemp("group")) as context:
        yield context
