"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option for the tests of pages."""
    help_text = "write what commands print now into the pages that show them, instead of failing"
    parser.addoption("--update-pages", action="store_true", help=help_text)


def pytest_configure() -> None:
    """Ctrl-C reaches the tests and what they start. A shell makes what it starts in its background deaf to it, and all
    below that inherit the deafness."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes says more of the machine than of the code.
settings.register_profile("rljob", deadline=None, derandomize=False)
# What `make test` asks for: a change is judged by the same examples as the one before it.
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.load_profile("rljob")
