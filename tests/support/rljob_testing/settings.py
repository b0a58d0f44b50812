"""All environment variables that the test support reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Folder in which built programs are kept between runs: `RLJOB_CACHE`, otherwise `~/.cache/rljob`."""
    chosen = os.environ.get("RLJOB_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "rljob"


def kubebuilder_assets() -> Path | None:
    """Folder with the programs `etcd` and `kube-apiserver`: `KUBEBUILDER_ASSETS`, the variable of Kubernetes'
    envtest."""
    chosen = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(chosen) if chosen else None


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, for child processes that need PATH, proxies and certificates."""
    return dict(os.environ)


def inherited_python_path() -> list[str]:
    """The entries of this process's PYTHONPATH."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


@contextmanager
def first_in_python_path(folder: Path) -> Iterator[None]:
    """Puts a folder first in the PYTHONPATH of child processes that start within the context."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *inherited_python_path()])
    try:
        yield
    finally:
        replace_environment(before)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replaces the environment of this process: for a child that was forked and did not exec."""
    os.environ.clear()
    os.environ.update(environment)
