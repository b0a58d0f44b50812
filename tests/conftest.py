"""Settings of all tests: an option, signals, garbage collection, parallel processes, and Hypothesis profiles."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer

    from rljob_testing.folder_scheduling import FolderScheduling


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-pages`, an option of the tests of pages."""
    help_text = "write what commands print now into the pages that show them, instead of failing"
    parser.addoption("--update-pages", action="store_true", help=help_text)


def pytest_configure() -> None:
    """Makes Ctrl-C reach the tests and their child processes. A shell lets its background processes ignore SIGINT, and
    child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects tests without garbage collections, and excludes what exists then from later ones: all libraries and
    thousands of tests, none of them garbage. Without this a process spends 3 s more on loading, and each full garbage
    collection of a test takes 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without long tests if only long tests run: otherwise they would load all libraries."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if config.getoption("markexpr") == "long" and is_test and "mark.long" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling | None:
    """Makes parallel processes keep to a folder of tests each."""
    if config.getoption("dist") != "loadfile":
        return None
    from rljob_testing.folder_scheduling import FolderScheduling

    return FolderScheduling(config, log)


# The time of an example depends more on the machine than on the code: no deadline.
settings.register_profile("rljob", deadline=None, derandomize=False)
# `make test` uses this profile, so that every change is tested with the same examples.
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.load_profile("rljob")
