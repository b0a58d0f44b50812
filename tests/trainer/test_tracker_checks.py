"""Trackers without their package or their credentials are rejected before a device is used."""

from __future__ import annotations

import importlib.util
import threading
import urllib.error
import urllib.request
from email.message import Message
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rljob_api.v1alpha1.tracker import Tracker, TrackerType, WandbMode, WandbTracker
from rljob_testing.messages import Mentions
from rljob_testing.training.tracker_servers import answering_server, hanging_server
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.trackers import tracker_checks
from rljob_trainer.trackers.tracker_checks import refuse_unusable_trackers

WANDB = Tracker.from_wire({"type": "WandB"})
OFFLINE = Tracker.from_wire({"type": "WandB", "wandb": {"mode": "Offline"}})


def mlflow(uri: str) -> Tracker:
    return Tracker.from_wire({"type": "MLflow", "mlflow": {"trackingUri": uri}})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without credentials."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("tracker", "package"), [(OFFLINE, "wandb"), (mlflow("/data/runs"), "mlflow-skinny")])
def test_a_missing_package_is_named(tracker: Tracker, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(tracker_checks, "find_spec", lambda name: None if name in ("wandb", "mlflow") else found(name))
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([tracker], {})
    assert str(caught.value) == Mentions("spec.training.trackers[0].type", f"pip install {package}", "image")


def test_a_folder_of_the_same_name_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModuleSpec("wandb", None, is_package=True)
    monkeypatch.setattr(tracker_checks, "find_spec", lambda _: folder)
    with pytest.raises(ConfigurationError, match="pip install wandb"):
        refuse_unusable_trackers([OFFLINE], {})


@pytest.mark.parametrize("address", ["sqlite:///runs.db", "postgresql+psycopg2://host/runs"])
def test_a_database_needs_a_package(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(tracker_checks, "find_spec", lambda name: None if name == "sqlalchemy" else found(name))
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([mlflow(address)], {})
    assert str(caught.value) == Mentions("spec.training.trackers[0]", f"{address.partition(':')[0].partition('+')[0]}:")
    monkeypatch.setattr(tracker_checks, "find_spec", lambda _: found("mlflow"))
    refuse_unusable_trackers([mlflow(address)], {})


def test_wandb_needs_a_key_unless_it_is_offline() -> None:
    refuse_unusable_trackers([OFFLINE], {})
    refuse_unusable_trackers([WANDB], {"WANDB_API_KEY": "a"})
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([OFFLINE, WANDB], {"WANDB_API_KEY": ""})
    assert str(caught.value) == Mentions("spec.training.trackers[1]", "WANDB_API_KEY", "spec.envFrom", "Offline")


@pytest.mark.parametrize("project", ["team/project", "a:b", "a\\b", "p" * 129])
def test_a_project_name_that_wandb_does_not_accept_is_rejected(project: str) -> None:
    named = Tracker(type=TrackerType.WANDB, wandb=WandbTracker(mode=WandbMode.OFFLINE, project=project))
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([named], {})
    assert str(caught.value) == Mentions("spec.training.trackers[0].wandb.project", repr(project), "entity")
    from wandb import Settings
    from wandb.errors import UsageError

    with pytest.raises(UsageError, match="Invalid project name"):
        Settings(project=project)


@pytest.mark.parametrize("server", ["api.wandb.ai", "wandb.example", "localhost:8080"])
def test_a_key_that_wandb_login_has_stored_for_any_server_is_accepted(home: Path, server: str) -> None:
    (home / ".netrc").write_text(f"machine {server}\n  login user\n  password secret\n")
    refuse_unusable_trackers([WANDB], {})
    refuse_unusable_trackers([WANDB], {"WANDB_BASE_URL": "http://[x"})


@pytest.mark.parametrize("name", [".config/wandb/settings", "other/settings"])
def test_a_key_in_the_settings_of_wandb_is_accepted(home: Path, name: str) -> None:
    environment = {"WANDB_CONFIG_DIR": "~/other"} if name.startswith("other") else {}
    path = home / name
    path.parent.mkdir(parents=True)
    path.write_text("[default]\nbase_url = https://wandb.example\n")
    with pytest.raises(ConfigurationError, match="WANDB_API_KEY"):
        refuse_unusable_trackers([WANDB], environment)
    path.write_text("[default]\napi_key = secret\n")
    refuse_unusable_trackers([WANDB], environment)


@pytest.mark.parametrize("content", [b"machine a login \xff\xfe password \xe9\n", b"nonsense\n", b""])
def test_a_file_without_a_readable_key_has_none(home: Path, content: bytes) -> None:
    (home / ".netrc").write_bytes(content)
    (home / ".config" / "wandb").mkdir(parents=True)
    (home / ".config" / "wandb" / "settings").write_bytes(content)
    for environment in ({}, {"NETRC": "~nobody-has-this-name/netrc"}):
        with pytest.raises(ConfigurationError, match="WANDB_API_KEY"):
            refuse_unusable_trackers([WANDB], environment)


def test_a_missing_mlflow_user_is_detected(home: Path) -> None:
    with answering_server(401) as address:
        with pytest.raises(ConfigurationError) as caught:
            refuse_unusable_trackers([mlflow(address)], {})
        assert str(caught.value) == Mentions("spec.training.trackers[0]", address, "MLFLOW_TRACKING_USERNAME")
        with pytest.raises(ConfigurationError):
            refuse_unusable_trackers([Tracker.from_wire({"type": "MLflow"})], {"MLFLOW_TRACKING_URI": address})
        # Whether the user is the right one is known only later.
        refuse_unusable_trackers([mlflow(address)], {"MLFLOW_TRACKING_USERNAME": "me"})
        (home / ".mlflow").mkdir()
        (home / ".mlflow" / "credentials").write_text("[mlflow]\nmlflow_tracking_username = me\n")
        refuse_unusable_trackers([mlflow(address)], {})


@pytest.mark.parametrize(
    "address",
    [
        *("http://mlflow:port", "http://my host/x", "http://[x", "https://", "http://mlflow:5000\n", "http://h:99999"),
        *("htp://mlflow", "http//://x"),
    ],
)
@pytest.mark.parametrize("credentials", [{}, {"MLFLOW_TRACKING_USERNAME": "me"}])
def test_an_invalid_address_is_rejected(address: str, credentials: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([Tracker(type=TrackerType.MLFLOW)], {"MLFLOW_TRACKING_URI": address, **credentials})
    assert str(caught.value) == Mentions("spec.training.trackers[0]: MLFLOW_TRACKING_URI", repr(address))


def test_an_invalid_address_is_named_by_its_field_and_its_password_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match=r"^spec\.training\.trackers\[0\]\.mlflow\.trackingUri: "):
        refuse_unusable_trackers([mlflow("htp://mlflow")], {})
    environment = {"MLFLOW_TRACKING_URI": "http://user:secret@host:port"}
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([Tracker(type=TrackerType.MLFLOW)], environment)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["HTTP://127.0.0.1:1", "http://user:word@127.0.0.1:1", "file:///runs", "runs/a:b"])
def test_a_valid_address_is_accepted(address: str) -> None:
    refuse_unusable_trackers([Tracker(type=TrackerType.MLFLOW)], {"MLFLOW_TRACKING_URI": address})


def test_a_server_that_does_not_respond_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_checks, "PROBE_SECONDS", 0.05)
    with hanging_server() as address:
        refuse_unusable_trackers([mlflow(address)], {})
    with answering_server(500) as address:
        refuse_unusable_trackers([mlflow(address)], {})
    refuse_unusable_trackers([mlflow("http://127.0.0.1:1"), mlflow("databricks"), mlflow("/data")], {})


def test_a_server_that_responds_slowly_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's timeout holds for each read, so a server that sends byte by byte takes long."""
    monkeypatch.setattr(tracker_checks, "PROBE_SECONDS", 0.05)
    is_checked = threading.Event()

    def respond(url: str, timeout: float) -> None:
        del timeout
        is_checked.wait(5)
        raise urllib.error.HTTPError(url, 401, "", Message(), None)

    monkeypatch.setattr(urllib.request, "urlopen", respond)
    refuse_unusable_trackers([mlflow("http://127.0.0.1:1")], {})
    is_checked.set()
