"""Finds the credentials for a Kubernetes cluster: in a kubeconfig with its plugins, or in the service account of this
pod. The `kubernetes` package does this."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rljob.errors import ClusterError
from rljob.plain_text import one_line
from rljob.settings import kubeconfig_files, service_account_namespace

if TYPE_CHECKING:
    from kubernetes.client import Configuration


@dataclass(frozen=True)
class FoundConfiguration:
    """Credentials for a cluster."""

    configuration: Configuration
    name: str
    """Name for messages, such as `context staging`; `in-cluster` for the service account of this pod."""
    namespace: str
    """Namespace of the context or of this pod."""


def read_configuration(kubeconfig: Path | None, context: str | None) -> FoundConfiguration:
    """The credentials of a kubeconfig and a context; None for the default ones, or for the service account of this pod
    if there is no kubeconfig. Raises ClusterError."""
    from kubernetes.client import Configuration

    # Retries are turned off: by default the client retries three times and prints a warning each time.
    configuration = Configuration(retries=False)
    is_selected = kubeconfig is not None or context is not None
    files = [kubeconfig] if kubeconfig else kubeconfig_files()
    # `file.is_file()` would reject a pipe, which a shell creates for `--kubeconfig <(command)`.
    existing = [file for file in files if file.exists() and not file.is_dir()]
    if existing:
        return FoundConfiguration(configuration, *_load_kubeconfig(configuration, existing, context))
    if not is_selected and (own_namespace := service_account_namespace()):
        return FoundConfiguration(configuration, _load_service_account(configuration), own_namespace)
    raise _no_kubeconfig(kubeconfig, files)


def _no_kubeconfig(given: Path | None, searched: Sequence[Path]) -> ClusterError:
    """The error if none of the searched files exists. `given`: the path of --kubeconfig, if it is set."""
    if given is not None:
        return ClusterError(f"--kubeconfig {given}: {'is a folder' if given.is_dir() else 'no such file'}; correct it")
    paths = ", ".join(map(str, searched))
    return ClusterError(
        f"no kubeconfig found (searched: {paths}); set KUBECONFIG or --kubeconfig to an existing file, or create one"
        " with the tool of your cluster"
    )


def _load_kubeconfig(configuration: Configuration, files: Sequence[Path], context: str | None) -> tuple[str, str]:
    """Fills the configuration from kubeconfig files. Returns the context for messages, such as `context staging`, and
    the context's namespace."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    file_names = ", ".join(map(str, files))
    try:
        # Several files are merged as kubectl does it. Credentials that a plugin renews are written back to the file.
        merged = KubeConfigMerger(os.pathsep.join(map(str, files)))  # type: ignore[no-untyped-call]
        names = [str(entry["name"]) for entry in merged.config["contexts"]]
        if context is not None and context not in names:
            raise ClusterError(f"{file_names}: no context {context}; use one of: {', '.join(names) or 'none'}")
        loader = KubeConfigLoader(merged.config, active_context=context, config_persister=merged.save_changes)  # type: ignore[no-untyped-call]
        with _logged_errors() as failures:
            loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
        if failures:
            raise ClusterError(
                f"{file_names}: the program that gets the credentials failed ({one_line(failures[0])}); install it or"
                " log in again, or use another kubeconfig with --kubeconfig"
            )
        _check_server(configuration.host, file_names)
        chosen = loader.current_context
        return f"context {chosen['name']}", str(chosen["context"].get("namespace") or "default")
    except ClusterError:
        raise
    # The package does not wrap the errors of its parsers and of credential plugins.
    except Exception as error:
        raise ClusterError(
            f"{file_names}: invalid kubeconfig ({one_line(error)}); correct it, or use another with --kubeconfig"
        ) from error


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collects the errors that the package logs. If a credential plugin fails, the package only logs this, and would
    then send requests without credentials."""
    failures: list[str] = []
    collector = logging.Handler(logging.ERROR)
    collector.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(collector)
    try:
        yield failures
    finally:
        logging.getLogger().removeHandler(collector)


def _check_server(url: str, file_names: str) -> None:
    """Raises ClusterError if requests cannot be sent to this URL. `file_names`: the kubeconfigs, for the message."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ClusterError(
            f"{file_names}: `server` must be the URL of an API server (seen: {url!r}), such as https://10.0.0.1:6443;"
            " correct it, or use another kubeconfig with --kubeconfig"
        )


def _load_service_account(configuration: Configuration) -> str:
    from kubernetes.config import ConfigException, load_incluster_config

    try:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise ClusterError(
            f"this pod's service account cannot be used ({one_line(error)}); mount the account's token into the pod, or"
            " use a kubeconfig with --kubeconfig"
        ) from error
    return "in-cluster"
