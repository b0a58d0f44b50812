"""All environment variables and folders of this package."""

from __future__ import annotations

import os
from pathlib import Path

from rljob_testing.settings import cache_folder

PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def data_folder() -> Path:
    """The files of this package that are not Python: Dockerfiles, systemd units, configurations."""
    return Path(__file__).parents[1]


def repository() -> Path:
    """The checkout of this package, from which images and chart are built."""
    return Path(__file__).parents[3]


def cluster_folder() -> Path:
    """Everything that is kept on this machine for clusters. It may be deleted while no cluster runs."""
    return cache_folder() / "cluster"


def program_folder() -> Path:
    """Folder with links to docker, kind, kubectl and helm. It comes first on PATH."""
    return cluster_folder() / "bin"


def kubeconfig_file() -> Path:
    """Credentials of the cluster, in a separate file, so that nobody's default cluster changes."""
    return cluster_folder() / "kubeconfig"


def command_environment() -> dict[str, str]:
    """The environment of every program started here: that of this process, plus our programs, cluster and BuildKit."""
    return dict(os.environ) | {
        "PATH": f"{program_folder()}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "KUBECONFIG": str(kubeconfig_file()),
        "DOCKER_BUILDKIT": "1",
    }


def search_path() -> list[Path]:
    """The folders of PATH."""
    return [Path(entry) for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry]


def keep_cluster() -> bool:
    """Whether the test session leaves the cluster running: `KEEP=1`."""
    return os.environ.get("KEEP", "") not in ("", "0")


def certificate_bundle() -> Path | None:
    """Certificate authorities that an environment variable names; None if none does."""
    for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        chosen = os.environ.get(name)
        if chosen and Path(chosen).is_file():
            return Path(chosen)
    return None


def package_index() -> str | None:
    """Address of the Python package index that an environment variable names (it may contain a password)."""
    return os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or None


def proxy_variables() -> list[str]:
    """Names of the proxy variables that are set."""
    return [name for name in PROXY_VARIABLES if os.environ.get(name)]
