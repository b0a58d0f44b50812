"""The job files in examples/: valid, suitable for a cluster, accepted by a real API server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.job_checks import cluster_violations
from rljob_api.job_file import load_job_file
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.devices import Devices, DeviceType
from rljob_cli.local.adapted_job import plan_for_machine
from rljob_testing.cli.job_cluster import JobCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted(path for path in EXAMPLES.rglob("*.yaml") if "kind: RLJob" in path.read_text())
FOR_CLUSTERS = [path for path in JOBS if path.name not in ("smollm2-arithmetic.yaml", "code.yaml")]


def name(path: Path) -> str:
    return path.stem


def test_examples_exist() -> None:
    assert {"quickstart", "custom-reward", "two-nodes"} <= {path.stem for path in FOR_CLUSTERS}


@pytest.mark.parametrize("path", JOBS, ids=name)
def test_every_example_is_valid_and_runs_on_two_cpu_workers(path: Path) -> None:
    job = load_job_file(path)
    assert plan_for_machine(job, Devices(DeviceType.CPU, 2), None).pools


@pytest.mark.parametrize("path", FOR_CLUSTERS, ids=name)
def test_examples_for_clusters_are_complete(path: Path) -> None:
    job = load_job_file(path)
    assert cluster_violations(job.spec, has_default_image=True) == ()
    storage = job.spec.checkpoint.storage
    assert storage is not None
    if path.stem == "quickstart-s3":
        assert storage.s3 is not None
        return
    claim = YAML(typ="safe", pure=True).load(EXAMPLES / "storage.yaml")
    assert storage.persistent_volume_claim == claim["metadata"]["name"]


@pytest.mark.apiserver
@pytest.mark.parametrize("path", JOBS, ids=name)
def test_an_api_server_accepts_every_example_unchanged(job_cluster: JobCluster, path: Path) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(path))
    assert RLJob.from_wire({"spec": stored["spec"], **_head(path)}).spec == load_job_file(path).spec


@pytest.mark.apiserver
def test_an_api_server_accepts_the_storage(job_cluster: JobCluster) -> None:
    claim = YAML(typ="safe", pure=True).load(EXAMPLES / "storage.yaml")
    path = f"/api/v1/namespaces/{job_cluster.namespace}/persistentvolumeclaims"
    answer = job_cluster.server.http.post(path, params={"fieldValidation": "Strict"}, json=claim)
    assert answer.status_code == 201, answer.text


@pytest.mark.apiserver
def test_an_api_server_accepts_the_permission_for_gang_scheduling(job_cluster: JobCluster) -> None:
    role, binding = YAML(typ="safe", pure=True).load_all((EXAMPLES / "gang-scheduling.yaml").read_text())
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": role["kind"],
        "name": "kuberay-podgroups",
    }
    for kind, manifest in (("clusterroles", role), ("clusterrolebindings", binding)):
        path = f"/apis/rbac.authorization.k8s.io/v1/{kind}"
        answer = job_cluster.server.http.post(path, params={"fieldValidation": "Strict"}, json=manifest)
        assert answer.status_code == 201, answer.text


def test_the_reward_function_counts_digits_in_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "cluster")
    try:
        from my_rewards import digits_in_place  # type: ignore[import-not-found]

        assert digits_in_place(prompt="93051>", response=" 01395\n", answer="01359", row={}) == pytest.approx(0.6)
        assert digits_in_place(prompt="93051>", response="", answer="01359", row={}) == 0.0
        assert digits_in_place(prompt="93051>", response="013590", answer="01359", row={}) == 1.0
    finally:
        sys.modules.pop("my_rewards", None)


def _head(path: Path) -> dict[str, object]:
    job = YAML(typ="safe", pure=True).load(path)
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": {"name": job["metadata"]["name"]}}
