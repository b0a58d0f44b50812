"""Trackers without their package or their credentials are rejected before a device is used."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rljob_api.v1alpha1.tracker import Tracker
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


def test_wandb_needs_a_key_unless_it_is_offline(home: Path) -> None:
    refuse_unusable_trackers([OFFLINE], {})
    refuse_unusable_trackers([WANDB], {"WANDB_API_KEY": "a"})
    with pytest.raises(ConfigurationError) as caught:
        refuse_unusable_trackers([OFFLINE, WANDB], {"WANDB_API_KEY": ""})
    assert str(caught.value) == Mentions("spec.training.trackers[1]", "WANDB_API_KEY", "spec.envFrom", "Offline")
    (home / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    refuse_unusable_trackers([WANDB], {})
    with pytest.raises(ConfigurationError, match=r"https://wandb\.example"):
        refuse_unusable_trackers([WANDB], {"WANDB_BASE_URL": "https://wandb.example"})


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


@pytest.mark.parametrize("address", ["http://mlflow:port", "http://my host/x"])
def test_an_address_that_cannot_be_parsed_is_left_to_the_library(address: str) -> None:
    refuse_unusable_trackers([mlflow(address)], {})


def test_a_server_that_does_not_respond_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_checks, "PROBE_SECONDS", 0.05)
    with hanging_server() as address:
        refuse_unusable_trackers([mlflow(address)], {})
    with answering_server(500) as address:
        refuse_unusable_trackers([mlflow(address)], {})
    refuse_unusable_trackers([mlflow("http://127.0.0.1:1"), mlflow("databricks"), mlflow("/data")], {})
