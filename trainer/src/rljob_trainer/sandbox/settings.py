"""The environment variables of sandboxed code: none. Only modules called `settings` use environment variables."""

from __future__ import annotations

import os


def remove_all_variables() -> None:
    """Removes all environment variables of this process, and so of the processes that it forks."""
    os.environ.clear()
