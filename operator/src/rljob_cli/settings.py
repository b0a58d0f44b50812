"""The only module that reads the process environment."""

from __future__ import annotations

import os
from pathlib import Path

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, for the processes that it starts."""
    return dict(os.environ)


def visible_cuda_devices() -> str | None:
    """`CUDA_VISIBLE_DEVICES`, as it stands; None when unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def kubeconfig_files() -> list[Path]:
    """Where a kubeconfig may be: the entries of `KUBECONFIG`, else `~/.kube/config`."""
    entries = [entry for entry in os.environ.get("KUBECONFIG", "").split(os.pathsep) if entry]
    return [Path(entry).expanduser() for entry in entries] or [Path.home() / ".kube" / "config"]


def service_account_namespace() -> str | None:
    """The namespace of the pod that we run in; None outside of one, or where no service account is mounted."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def hub_cache_folder() -> Path:
    """Where Hugging Face's libraries keep what they have downloaded."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches).expanduser() if caches else Path.home() / ".cache") / "huggingface" / "hub"


def hub_address() -> str | None:
    """The Hugging Face hub, or the mirror that `HF_ENDPOINT` names; None where `HF_HUB_OFFLINE` forbids asking it."""
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        return None
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_token() -> str | None:
    """`HF_TOKEN`; None when unset."""
    return os.environ.get("HF_TOKEN") or None


def profile_folder() -> Path:
    """Where `rljob plan --calibrate` keeps what it has learned of machines."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder).expanduser() if folder else Path.home() / ".config") / "rljob" / "profiles"
