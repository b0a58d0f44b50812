"""Finds trackers that cannot work, because their package or their credentials are missing. This runs before torch is
loaded.

Only what is certain is an error. A server that does not respond is not: it may respond later.
"""

from __future__ import annotations

import configparser
import http.client
import netrc
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rljob_api.v1alpha1.tracker import MlflowTracker, Tracker, TrackerType, WandbMode, WandbTracker
from rljob_trainer.errors import ConfigurationError

PACKAGES = {TrackerType.WANDB: ("wandb", "wandb"), TrackerType.MLFLOW: ("mlflow", "mlflow-skinny")}
"""By type: the module, and the package that has it."""
NOT_IN_WANDB_PROJECTS, MAX_WANDB_PROJECT = "/\\#?%:", 128
"""Characters that W&B rejects in the name of a project, and its maximum length."""
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
MLFLOW_CREDENTIALS = (
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"),
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
)
MLFLOW_FILE = "~/.mlflow/credentials"
MLFLOW_PATH = "/api/2.0/mlflow/experiments/get?experiment_id=0"
MLFLOW_SCHEMES = ("file", "http", "https", "databricks")
DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
DATABASE_MODULE = "sqlalchemy"
"""MLflow opens databases with it; mlflow-skinny does not install it."""
PROBE_SECONDS = 3.0
"""How long the check waits for an MLflow server."""
UNAUTHORIZED = (401, 403)


def refuse_unusable_trackers(trackers: Sequence[Tracker], environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for the first tracker whose package is not installed, whose address or project is
    invalid, or whose server needs credentials that are not set. `environment`: the variables of this process."""
    for index, tracker in enumerate(trackers):
        where = f"spec.training.trackers[{index}]"
        module, package = PACKAGES[tracker.type]
        if not _is_installed(module):
            raise ConfigurationError(
                f"{where}.type: {tracker.type} needs the Python package {package}, which is not installed; install it "
                f"with `pip install {package}`, or on a cluster use an image that has it, or remove the tracker"
            )
        if tracker.type is TrackerType.WANDB:
            _check_wandb(tracker.wandb or WandbTracker(), environment, where)
        else:
            _check_mlflow(tracker.mlflow or MlflowTracker(), environment, where)


def _is_installed(module: str) -> bool:
    """Whether the package is installed. A folder of this name, such as one with W&B's files, has no origin."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def _check_wandb(settings: WandbTracker, environment: Mapping[str, str], where: str) -> None:
    project = settings.project
    if len(project) > MAX_WANDB_PROJECT or set(project) & set(NOT_IN_WANDB_PROJECTS):
        raise ConfigurationError(
            f"{where}.wandb.project: W&B accepts up to {MAX_WANDB_PROJECT} characters and none of "
            f"{NOT_IN_WANDB_PROJECTS} (seen: {project!r}); a team or user belongs in wandb.entity"
        )
    if settings.mode is WandbMode.OFFLINE or any(environment.get(name) for name in WANDB_KEYS):
        return
    if not _is_in_netrc(environment) and not _has_option(_wandb_files(environment), "default", "api_key"):
        raise ConfigurationError(
            f"{where}: W&B needs an API key (WANDB_API_KEY is not set); set WANDB_API_KEY, on a cluster by "
            "spec.envFrom from a Secret, or run `wandb login`, or set wandb.mode: Offline"
        )


def _is_in_netrc(environment: Mapping[str, str]) -> bool:
    """Whether the user has a file with a password for any server. Which server W&B uses depends on its version and on
    its own settings."""
    named = environment.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(Path(path).expanduser()).hosts:
                return True
        except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):
            # Not UTF-8, or the user has no home folder.
            continue
    return False


def _wandb_files(environment: Mapping[str, str]) -> list[str]:
    """The files with W&B's settings."""
    folder = environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    return [f"{folder}/settings", "wandb/settings"]


def _has_option(paths: Sequence[str], section: str, option: str) -> bool:
    """Whether one of the configuration files has the option. Files that cannot be read have none."""
    for path in paths:
        parser = configparser.ConfigParser()
        try:
            parser.read(Path(path).expanduser())
            if parser.has_option(section, option):
                return True
        except (OSError, ValueError, RuntimeError, configparser.Error):
            continue
    return False


def _check_mlflow(settings: MlflowTracker, environment: Mapping[str, str], where: str) -> None:
    address = settings.tracking_uri or environment.get("MLFLOW_TRACKING_URI", "")
    scheme = address.partition(":")[0].partition("+")[0].lower()
    if scheme in DATABASES and not _is_installed(DATABASE_MODULE):
        raise ConfigurationError(
            f"{where}: the package mlflow-skinny cannot open a database (seen: {scheme}:...); start `mlflow server` "
            "and use its address, or use a folder"
        )
    field = f"{where}.mlflow.trackingUri" if settings.tracking_uri else f"{where}: MLFLOW_TRACKING_URI"
    _check_address(address, scheme, field)
    if scheme not in ("http", "https") or "@" in address:
        return
    has_variable = any(environment.get(name) for name in MLFLOW_CREDENTIALS)
    if has_variable or _has_option([MLFLOW_FILE], "mlflow", "mlflow_tracking_username"):
        return
    if _status(address.rstrip("/") + MLFLOW_PATH) in UNAUTHORIZED:
        raise ConfigurationError(
            f"{where}: the MLflow server {address} needs a user (MLFLOW_TRACKING_USERNAME is not set); set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, on a cluster by "
            "spec.envFrom from a Secret"
        )


def _check_address(address: str, scheme: str, field: str) -> None:
    # Not shown if it has a password.
    seen = f"(seen: {scheme}:...)" if "@" in address else f"(seen: {address!r})"
    if "://" in address and scheme not in (*MLFLOW_SCHEMES, *DATABASES) and not _is_plugin(scheme):
        raise ConfigurationError(
            f"{field}: MLflow knows no addresses of this kind {seen}; use http://..., https://... or the path of a "
            "folder"
        )
    if scheme in ("http", "https") and not _has_valid_host(address):
        raise ConfigurationError(
            f"{field}: the host or the port is invalid {seen}; use an address such as "
            "https://mlflow.example.com:5000, without spaces and line breaks"
        )


def _is_plugin(scheme: str) -> bool:
    """Whether an installed package adds this kind of server to MLflow."""
    return any(each.name == scheme for each in entry_points(group="mlflow.tracking_store"))


def _has_valid_host(address: str) -> bool:
    try:
        parts = urlsplit(address)
        # Reading the port raises ValueError if it is invalid.
        is_valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    # `urlsplit` ignores line breaks, MLflow does not.
    host = address.partition("://")[2].partition("/")[0]
    return is_valid and not any(each.isspace() for each in host)


def _status(url: str) -> int | None:
    """The status code of the server's response; None if it does not respond."""
    found: list[int] = []
    # A thread, because the timeout of a request holds for each read, and not for finding the host's address.
    thread = threading.Thread(target=lambda: found.extend(_response_status(url)), daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return found[0] if found else None


def _response_status(url: str) -> list[int]:
    """The status code; none if the server does not respond."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as response:
            return [int(response.status)]
    except urllib.error.HTTPError as error:
        return [error.code]
    except (OSError, ValueError, http.client.HTTPException):
        # The last one: the server speaks no HTTP.
        return []
