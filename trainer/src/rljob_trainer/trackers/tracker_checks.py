"""Finds trackers that cannot work, because their package or their credentials are missing. This runs before torch is
loaded.

Only what is certain is an error. A server that does not respond is not: it may respond later.
"""

from __future__ import annotations

import configparser
import http.client
import netrc
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rljob_api.v1alpha1.tracker import MlflowTracker, Tracker, TrackerType, WandbMode, WandbTracker
from rljob_trainer.errors import ConfigurationError

PACKAGES = {TrackerType.WANDB: ("wandb", "wandb"), TrackerType.MLFLOW: ("mlflow", "mlflow-skinny")}
"""By type: the module, and the package that has it."""
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WANDB_SERVER = "https://api.wandb.ai"
MLFLOW_CREDENTIALS = (
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"),
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
)
MLFLOW_PATH = "/api/2.0/mlflow/experiments/get?experiment_id=0"
DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
DATABASE_MODULE = "sqlalchemy"
"""MLflow opens databases with it; mlflow-skinny does not install it."""
PROBE_SECONDS = 3.0
"""How long the check waits for an MLflow server."""
UNAUTHORIZED = (401, 403)


def refuse_unusable_trackers(trackers: Sequence[Tracker], environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for the first tracker whose package is not installed, or whose server needs credentials
    that are not set. `environment`: the variables of this process."""
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
    if settings.mode is WandbMode.OFFLINE or any(environment.get(name) for name in WANDB_KEYS):
        return
    server = environment.get("WANDB_BASE_URL") or WANDB_SERVER
    if not _is_in_netrc(urlsplit(server).netloc, environment):
        raise ConfigurationError(
            f"{where}: W&B needs an API key for {server} (WANDB_API_KEY is not set); set WANDB_API_KEY, on a cluster "
            "by spec.envFrom from a Secret, or run `wandb login`, or set wandb.mode: Offline"
        )


def _is_in_netrc(host: str, environment: Mapping[str, str]) -> bool:
    """Whether the file with passwords of the user has one for this host."""
    named = environment.get("NETRC")
    for path in [Path(named).expanduser()] if named else [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _check_mlflow(settings: MlflowTracker, environment: Mapping[str, str], where: str) -> None:
    address = settings.tracking_uri or environment.get("MLFLOW_TRACKING_URI", "")
    scheme = address.partition(":")[0].partition("+")[0]
    if scheme in DATABASES and not _is_installed(DATABASE_MODULE):
        raise ConfigurationError(
            f"{where}: the package mlflow-skinny cannot open a database (seen: {scheme}:...); start `mlflow server` "
            "and use its address, or use a folder"
        )
    if scheme not in ("http", "https") or "@" in address:
        return
    if any(environment.get(name) for name in MLFLOW_CREDENTIALS) or _has_mlflow_file():
        return
    if _status(address.rstrip("/") + MLFLOW_PATH) in UNAUTHORIZED:
        raise ConfigurationError(
            f"{where}: the MLflow server {address} needs a user (MLFLOW_TRACKING_USERNAME is not set); set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, on a cluster by "
            "spec.envFrom from a Secret"
        )


def _has_mlflow_file() -> bool:
    """Whether MLflow's file of credentials has a user."""
    parser = configparser.ConfigParser()
    try:
        parser.read(Path("~/.mlflow/credentials").expanduser())
        return parser.has_option("mlflow", "mlflow_tracking_username")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return False


def _status(url: str) -> int | None:
    """The status code of the server's response; None if it does not respond."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException):
        # The last one: the server speaks no HTTP, or the address cannot be parsed.
        return None
