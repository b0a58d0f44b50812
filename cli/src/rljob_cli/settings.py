"""Reads the environment variables of this process. No other module of `rljob_cli` does."""

from __future__ import annotations

import os
from pathlib import Path

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def inherited_environment() -> dict[str, str]:
    """A copy of the environment of this process, for the trainer that this process starts."""
    return dict(os.environ)


def forget_zero_columns() -> None:
    """Removes the variable `COLUMNS` if it is empty or 0, as in some containers. With 0, rich would print nothing."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)


def visible_cuda_devices() -> str | None:
    """The value of `CUDA_VISIBLE_DEVICES`, such as `0,1`; None if unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def kubeconfig_files() -> list[Path]:
    """Possible paths of a kubeconfig: the entries of `KUBECONFIG`, else `~/.kube/config`."""
    entries = [entry for entry in os.environ.get("KUBECONFIG", "").split(os.pathsep) if entry]
    return [_path(entry) for entry in entries or ["~/.kube/config"]]


def service_account_namespace() -> str | None:
    """The namespace of the pod that this process runs in; None outside a pod or without a service account."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return None


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
