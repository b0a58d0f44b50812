"""Reads the environment variables of this process. No other module of `rljob_cli` does."""

from __future__ import annotations

import os
from pathlib import Path


def inherited_environment() -> dict[str, str]:
    """A copy of the environment of this process, for the trainer that this process starts."""
    return dict(os.environ)


def forget_zero_columns() -> None:
    """Removes the variable `COLUMNS` if it is empty or 0, as in some containers. With 0, rich would print nothing."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)


def request_completion(line: str) -> None:
    """Makes the command print the completions of a command line, one per line with a tab before its explanation, as for
    the shell fish."""
    os.environ["_RLJOB_COMPLETE"] = "complete_fish"
    os.environ["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    os.environ["_TYPER_COMPLETE_ARGS"] = line


def visible_cuda_devices() -> str | None:
    """The value of `CUDA_VISIBLE_DEVICES`, such as `0,1`; None if unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def hub_cache_folder() -> Path:
    """The download cache of Hugging Face's libraries."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return _path(folder)
    if home := os.environ.get("HF_HOME"):
        return _path(home) / "hub"
    caches = os.environ.get("XDG_CACHE_HOME")
    return _path(caches or "~/.cache") / "huggingface" / "hub"


def hub_address() -> str | None:
    """URL of the Hugging Face hub or of the mirror in `HF_ENDPOINT`; None if `HF_HUB_OFFLINE` is on."""
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        return None
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_token() -> str | None:
    """The value of `HF_TOKEN`; None if unset or empty."""
    return os.environ.get("HF_TOKEN") or None


def view_folder() -> Path:
    """Folder for the copies of the files from which `rljob view` makes the page of a job on a cluster."""
    return _path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rljob" / "view"


def profile_folder() -> Path:
    """Folder of the profiles that `rljob plan --calibrate` writes."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    return _path(folder or "~/.config") / "rljob" / "profiles"


def _path(text: str) -> Path:
    """The path, with `~` expanded. Unlike pathlib, this raises no error if the home folder is unknown."""
    return Path(os.path.expanduser(text))
