"""Reads the environment variables of this process. No other module of `rljob` does."""

from __future__ import annotations

import os
from pathlib import Path

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def kubeconfig_files() -> list[Path]:
    """Possible paths of a kubeconfig: the entries of `KUBECONFIG`, else `~/.kube/config`."""
    entries = [entry for entry in os.environ.get("KUBECONFIG", "").split(os.pathsep) if entry]
    # Unlike pathlib, this raises no error if the home folder is unknown.
    return [Path(os.path.expanduser(entry)) for entry in entries or ["~/.kube/config"]]


def service_account_namespace() -> str | None:
    """The namespace of the pod that this process runs in; None outside a pod or without a service account."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return None
