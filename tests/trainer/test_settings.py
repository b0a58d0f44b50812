"""The trainer's environment variables: invalid numbers, and what is known when the rest cannot be read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_trainer.__main__ import with_nodes_of_attempt
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import (
    PodSettings,
    read_pod_settings,
    read_settings,
    run_state_target,
    set_driver_environment,
    set_environment,
    worker_environment,
)

NAMES = (
    *("RLJOB_SPEC", "RLJOB_ATTEMPT", "RLJOB_START_NUMBER", "RLJOB_RUN_STATE_FILE", "RLJOB_RUN_FOLDER"),
    *(
        "RLJOB_POOL_NODES",
        "RLJOB_GRACE_SECONDS",
        "RAY_AUTH_TOKEN",
        "OMP_NUM_THREADS",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RLJOB_DEVICE",
    ),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLJOB_SPEC", "{}")


def test_the_start_number_is_the_attempt_if_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (read_settings().attempt, read_settings().start_number) == (1, 1)
    monkeypatch.setenv("RLJOB_ATTEMPT", "3")
    assert (read_settings().attempt, read_settings().start_number) == (3, 3)
    monkeypatch.setenv("RLJOB_START_NUMBER", "1767225601")
    assert (read_settings().attempt, read_settings().start_number) == (3, 1767225601)


@pytest.mark.parametrize("name", ["RLJOB_ATTEMPT", "RLJOB_START_NUMBER", "OMP_NUM_THREADS"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two", "2147483648", "٣"])
def test_invalid_numbers_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=rf"^{name}: .*1 to 2147483647 \(seen: "):
        read_settings()


def test_the_state_file_is_known_when_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_state_target() is None
    monkeypatch.setenv("RLJOB_RUN_STATE_FILE", "/logs/state.json")
    assert run_state_target() == (Path("/logs/state.json"), 1)
    monkeypatch.setenv("RLJOB_ATTEMPT", "4")
    assert run_state_target() == (Path("/logs/state.json"), 4)
    monkeypatch.setenv("RLJOB_ATTEMPT", "many")
    assert run_state_target() == (Path("/logs/state.json"), 1)


def test_threads_set_by_ray_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (read_settings().num_threads, read_settings().is_ray_job) == (1, False)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert (read_settings().num_threads, read_settings().is_ray_job) == (1, True)


def test_workers_get_a_number_of_threads_only_if_one_was_chosen() -> None:
    assert worker_environment("cpu", 3)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in worker_environment("cpu", None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"RLJOB_CACHE": "/cache"}, "/cache/hub"),
        ({"RLJOB_CACHE": "/cache", "HF_HOME": "/mine"}, None),
        ({"RLJOB_CACHE": "/cache", "HF_HUB_CACHE": "/mine"}, "/mine"),
    ],
)
def test_downloads_go_into_the_named_cache(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("RLJOB_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        # Set first, so that the fixture removes at the end what is set meanwhile.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_driver_environment()
    # The workers are on other nodes, where the same folder is another volume.
    assert worker_environment("cpu", None).get("HF_HUB_CACHE") == expected


def test_programs_beside_the_trainer_accept_any_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_pod_settings() == PodSettings(60.0, None, None)
    for name, value in {"RLJOB_GRACE_SECONDS": "115", "RLJOB_RUN_FOLDER": "/run", "RAY_AUTH_TOKEN": "t"}.items():
        monkeypatch.setenv(name, value)
    assert read_pod_settings() == PodSettings(115.0, Path("/run"), "t")
    monkeypatch.setenv("RLJOB_GRACE_SECONDS", "soon")
    assert read_pod_settings().grace_seconds == 60.0


def test_a_process_that_ray_prestarted_adopts_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray has put the copy of the job's folder there; it comes before the paths that the controller found itself.
    monkeypatch.setenv("PYTHONPATH", "/copy:/both")
    monkeypatch.setattr(sys, "path", ["/script", "/copy", "/both", "/standard-library"])
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    set_environment({"OMP_NUM_THREADS": "2", "PYTHONPATH": "/both:/controller:"})
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["PYTHONPATH"] == "/copy:/both:/controller"
    assert sys.path == ["/script", "/copy", "/both", "/controller", "/standard-library"]


def test_an_environment_without_a_python_path_keeps_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setattr(sys, "path", ["/script", "/own"])
    set_environment({"OMP_NUM_THREADS": "2"})
    assert (os.environ["PYTHONPATH"], sys.path) == ("/own", ["/script", "/own"])
    monkeypatch.delenv("PYTHONPATH")
    set_environment({"PYTHONPATH": "/controller"})
    assert (os.environ["PYTHONPATH"], sys.path) == ("/controller", ["/script", "/controller", "/own"])


@pytest.mark.parametrize("text", ["[1]", "{", '{"main": 0}', '{"main": "2"}', '{"main": true}', '{"main": 1.5}'])
def test_invalid_numbers_of_nodes_by_pool_are_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RLJOB_POOL_NODES", text)
    with pytest.raises(ConfigurationError, match=r"^RLJOB_POOL_NODES: must be a JSON object"):
        read_settings()


def test_an_attempt_on_fewer_nodes_is_another_job_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RLJob.from_wire(valid_job({"spec.pools[0].nodes": 4})).spec
    job = TrainerJob(name="example", spec=spec)
    assert with_nodes_of_attempt(job, read_settings().pool_nodes) is job
    monkeypatch.setenv("RLJOB_POOL_NODES", '{"main": 2}')
    assert [pool.nodes for pool in with_nodes_of_attempt(job, read_settings().pool_nodes).spec.pools] == [2]
    # 8 prompts x 4 responses do not divide by 3 nodes x 2 GPUs.
    for nodes, why in (({"main": 3}, "must be divisible by"), ({"other": 1}, "there is no pool other")):
        with pytest.raises(ConfigurationError, match=why):
            with_nodes_of_attempt(job, nodes)
