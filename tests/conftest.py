"""Settings of all tests: an option, signals, and Hypothesis profiles."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-pages`, an option of the tests of pages."""
    help_text = "write what commands print now into the pages that show them, instead of failing"
    parser.addoption("--update-pages", action="store_true", help=help_text)


MEMORY_FOLDER = Path("/dev/shm")
MIN_FREE_BYTES = 8 * 2**30
"""The folders of a whole run have less than a GiB; pytest keeps those of three runs."""


def pytest_configure() -> None:
    """Makes Ctrl-C reach the tests and their child processes. A shell lets its background processes ignore SIGINT, and
    child processes inherit that. Lets `tmp_path` be in memory: on a disk, checkpoints wait for thousands of `fsync`."""
    if has_memory_folder():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_FOLDER))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def has_memory_folder() -> bool:
    """Whether there is a file system in memory with enough space, whose files can be executed."""
    if not os.access(MEMORY_FOLDER, os.W_OK) or os.statvfs(MEMORY_FOLDER).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(MEMORY_FOLDER).free >= MIN_FREE_BYTES


# The time of an example depends more on the machine than on the code: no deadline.
settings.register_profile("rljob", deadline=None, derandomize=False)
# `make test` uses this profile, so that every change is tested with the same examples.
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.load_profile("rljob")
