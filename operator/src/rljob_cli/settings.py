"""The only module that reads the process environment."""

from __future__ import annotations

import os


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, for the processes that it starts."""
    return dict(os.environ)


def visible_cuda_devices() -> str | None:
    """`CUDA_VISIBLE_DEVICES`, as it stands; None when unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
