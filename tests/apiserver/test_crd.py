"""The generated CRD on a real API server: accepted completely, small enough, and with the same defaults and types as
pydantic."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from rljob_api.constants import API_GROUP
from rljob_api.crdgen.manifest import custom_resource_definition
from rljob_api.job_file import resolved_job_text
from rljob_api.pydantic_messages import follows_from_another
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_operator.raw_json import objects_at
from rljob_testing.cluster import job_requests
from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.cluster.kubectl import wait_for
from rljob_testing.jobs.valid_job import REMOVED, valid_job

pytestmark = pytest.mark.apiserver

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.{API_GROUP}"
ENVIRONMENT = {"type": "Class", "classes": [{"path": "my_games:Guess"}], "maxContextTokens": 1024}
NOW = "2026-01-31T12:00:00Z"


@pytest.fixture
def stored(api: httpx.Client) -> Iterator[str]:
    """The name of a stored valid job."""
    answer = job_requests.create(api, valid_job(), keep=True)
    assert answer.status == 201, answer.message
    yield "example"
    job_requests.delete(api, "example")


def test_the_crd_is_established_and_structural(api: httpx.Client) -> None:
    def established() -> dict[str, object] | None:
        found: dict[str, object] = api.get(CRD).raise_for_status().json()
        conditions = {each["type"]: each["status"] for each in objects_at(found, "status", "conditions")}
        return found if conditions.get("Established") == "True" else None

    # The server serves a resource up to five seconds before it calls it established.
    crd: dict[str, Any] = wait_for(established, "the definition to be established", 60, 0.1)
    conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"
    assert crd["status"]["acceptedNames"]["shortNames"] == ["rlj"]
    assert crd["status"]["acceptedNames"]["categories"] == ["all", "ml"]


def test_the_crd_fits_client_side_apply() -> None:
    # kubectl apply keeps the last applied object as compact JSON in an annotation; all annotations together may have
    # 256 KiB. A quarter of it is left for later fields.
    assert len(json.dumps(custom_resource_definition(), separators=(",", ":")).encode()) < 196_608


def test_client_side_apply_with_its_annotation_is_accepted(api: httpx.Client) -> None:
    applied = json.dumps(custom_resource_definition())
    patch = {"metadata": {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": applied}}}
    answer = api.patch(CRD, json=patch, params={"dryRun": "All"})
    assert answer.status_code == 200, answer.text


def _without_nulls(value: object) -> object:
    """None entries removed: pydantic dumps unset optional fields as null, the server leaves them out."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def test_defaults_equal_those_of_the_types(api: httpx.Client) -> None:
    edits: dict[str, object] = {
        "spec.training.evaluations[0].dataset": {"type": "ReasoningGym", "reasoningGym": {"task": "leg_counting"}},
        "spec.training.environment": ENVIRONMENT,
        "spec.pools[0].template.tolerations": [{"key": "gpu"}],
        "spec.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
        "spec.envFrom": [{"secretRef": {"name": "a"}}],
        "spec.volumes": [{"name": "s", "mountPath": "/s", "type": "EmptyDir", "emptyDir": {}}],
        "spec.checkpoint.storage": {"persistentVolumeClaim": "c"},
    }
    job = valid_job(edits)
    ours = RLJob.from_wire(job).model_dump(mode="json", by_alias=True)["spec"]
    assert job_requests.create(api, job).at("spec") == _without_nulls(ours)


def test_the_server_object_reads_back_as_the_same_job(api: httpx.Client) -> None:
    job = valid_job()
    stored = job | {"spec": job_requests.create(api, job).at("spec")}
    assert RLJob.from_wire(stored) == RLJob.from_wire(job)


@pytest.mark.parametrize(
    "edits",
    [
        {"spec.training.steps": "10"},
        {"spec.training.optimizer.learningRate": "1e-6"},
        {"spec.training.optimizer.beta1": True},
        # `image: no` and `shuffle: no`, as readers of YAML 1.1 and of YAML 1.2 pass them on.
        {"spec.image": False},
        {"spec.training.dataset.shuffle": "no"},
        # `image: 010`
        {"spec.image": 8},
        {"spec.training.model.source": 3},
        {"spec.training.steps": 0},
        {"spec.training.steps": 2**31},
        {"spec.training.steps": 10.5},
        {"spec.training.steps": None},
        {"spec.training.steps": REMOVED},
        {"spec.training.rollout.topP": 0},
        # The API server rounds bounds of whole numbers: 0 passes `minimum: 0.01` alone.
        {"spec.training.rollout.temperature": 0},
        {"spec.training.rollout.temperature": 0.009},
        {"spec.training.evaluations": [{"temperature": 0}]},
        {"spec.training.optimizer.epsilon": 0},
        {"spec.training.rollout.topP": 1.01},
        {"spec.training.rollout.stop": "text"},
        {"spec.training.rollout.stop": ["x"] * 17},
        {"spec.training.rewards": [{"type": "Function", "function": {"path": "no-colon"}}]},
        {"spec.training.rewards[0].type": "mathAnswer"},
        {"spec.training.algorithm.type": "A2C"},
        {"spec.training.algorithm.advantage.type": "TD"},
        {"spec.training.environment": ENVIRONMENT | {"classes": []}},
        {"spec.training.environment": ENVIRONMENT | {"classes": [{"path": "my_games"}]}},
        {"spec.training.environment": ENVIRONMENT | {"maxContextTokens": 1}},
        {"spec.training.environment": ENVIRONMENT | {"onRewrite": "Redo"}},
        {"spec.training.environment": {"type": "Class", "classes": ENVIRONMENT["classes"]}},
        {"spec.pools": []},
        {"spec.pools[0].nodes": 1025},
        {"spec.pools[0].sharedMemory": "eight"},
        {"spec.pools[0].sharedMemory": -1},
        {"spec.pools[0].sharedMemory": "-1"},
        {"spec.pools[0].sharedMemory": "1GiB"},
        {"spec.head.resources.requests": {"cpu": 0.5}},
        {"spec.head.template.labels": {"a": "not a value"}},
        {"spec.head.template.labels": {"a": "b" * 64}},
        {"spec.pools[0].template.affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}},
        {"spec.head.template.priorityClassName": "a..b"},
        {"spec.image": "registry.example/Team/trainer:1"},
        {"spec.image": "trainer:1 "},
        {"spec.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "../b"}}}]},
        {"spec.pools[0].gpuResource": "gpu"},
        {"spec.env": [None]},
        {"spec.code.imagePath": "relative"},
        {"spec": REMOVED},
    ],
    ids=str,
)
def test_a_wrong_type_or_bound_is_rejected_on_both_sides(api: httpx.Client, edits: dict[str, object]) -> None:
    job = valid_job(edits)
    with pytest.raises(ValidationError):
        RLJob.from_wire(job)
    assert job_requests.create(api, job).status == 422


@pytest.mark.parametrize(
    "affinity",
    [{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}, {"nodeAfinity": {}}],
    ids=str,
)
def test_the_affinity_of_the_head_is_checked_by_the_types_only(api: httpx.Client, affinity: dict[str, object]) -> None:
    job = valid_job({"spec.head.template.affinity": affinity})
    with pytest.raises(ValidationError):
        RLJob.from_wire(job)
    assert job_requests.create(api, job).at("spec", "head", "template", "affinity") == affinity


@pytest.mark.parametrize(
    "edits",
    [
        {"spec.training.optimizer.beta1": 0},
        {"spec.training.batchSize": None},
        {"spec.training.evaluations": None},
        {"spec.training.algorithm": None},
        {"spec.training.dataset.reasoningGym": None},
        {"spec.pools[0].template.labels": {"a": None}},
        {"spec.pools[0].sharedMemory": 1024},
        {
            "spec.training.dataset": {
                "type": "ReasoningGym",
                "reasoningGym": {"task": "t", "config": {"a": None, "b": [1]}},
            }
        },
        {
            "spec.training.environment": ENVIRONMENT
            | {"classes": [{"path": "a:B", "arguments": {"a": None, "b": [1, {"c": "d"}]}}], "maxSeconds": 600}
        },
        {"spec.training.environment": ENVIRONMENT, "spec.training.dataset": None, "spec.training.rewards": None},
        {"spec.head.template.affinity": {"nodeAffinity": {}, "podAffinity": None}},
        {"spec.head.resources.requests": {"cpu": "1e3", "memory": "+.5Gi"}},
    ],
    ids=str,
)
def test_an_unusual_but_valid_form_is_accepted_on_both_sides_with_one_meaning(
    api: httpx.Client, edits: dict[str, object]
) -> None:
    job = valid_job(edits)
    answer = job_requests.create(api, job)
    assert answer.status == 201, answer.message
    assert RLJob.from_wire(job | {"spec": answer.at("spec")}) == RLJob.from_wire(job)


def test_fields_left_to_the_recipe_stay_unset_on_the_server(api: httpx.Client) -> None:
    clipped = {"dualClipRatio": None, "clipRatioHigh": 0.28}
    job = valid_job({"spec.training.algorithm": {"type": "DrGRPO", "loss": {"clipped": clipped}}})
    assert job_requests.create(api, job).at("spec", "training", "algorithm") == {
        "type": "DrGRPO",
        "advantage": {},
        "loss": {"clipped": {"clipRatioHigh": 0.28}},
        "maskTruncatedResponses": False,
        "entropyCoefficient": 0.0,
        "kl": {
            "coefficient": 0.0,
            "estimator": "K3",
            "placement": "Loss",
            "straightThrough": False,
            "controller": {"type": "Fixed"},
        },
        "rolloutCorrection": {"type": "None", "oldLogprobs": "Trainer"},
        "policyFiltration": {"type": "None"},
    }


def test_the_server_accepts_the_resolved_algorithm_and_returns_it_unchanged(api: httpx.Client) -> None:
    job = RLJob.from_wire(valid_job({"spec.training.algorithm.type": "DrGRPO"}))
    text = resolved_job_text(job.metadata, job.spec)
    answer = job_requests.create(api, YAML(typ="safe", pure=True).load(text))
    assert answer.status == 201, answer.message
    stored = RLJob.from_wire(valid_job() | {"spec": answer.at("spec")})
    assert resolve_algorithm(stored.spec.training.algorithm) == resolve_algorithm(job.spec.training.algorithm)


@pytest.mark.parametrize("path", ["spec.nope", "spec.training.optimizer.learning_rate", "spec.pools[0].template.nope"])
def test_an_unknown_field_is_rejected_on_both_sides(api: httpx.Client, path: str) -> None:
    job = valid_job({path: 1})
    with pytest.raises(ValidationError) as caught:
        RLJob.from_wire(job)
    assert {error["type"] for error in caught.value.errors() if not follows_from_another(error)} == {"extra_forbidden"}
    answer = job_requests.create(api, job)
    assert answer.status == 400
    assert f'unknown field "{path}"' in answer.message


def test_status_is_written_only_through_its_subresource(api: httpx.Client, stored: str) -> None:
    progress = {"step": 3, "totalSteps": 10, "updatedAt": NOW}
    assert job_requests.merge(api, stored, {"status": {"phase": "Running", "progress": progress}}).status == 200
    assert "status" not in api.get(f"/apis/rljob.dev/v1alpha1/namespaces/default/rljobs/{stored}").json()
    answer = job_requests.merge(api, stored, {"status": {"progress": progress}, "spec": {"image": "x"}}, "/status")
    assert answer.at("status", "progress") == progress
    spec = answer.at("spec")
    assert isinstance(spec, dict)
    assert "image" not in spec


def test_columns_show_phase_reason_progress_attempt_gpus_and_age(api: httpx.Client, stored: str) -> None:
    attempts = [{"number": number, "cluster": f"example-{number}", "started": NOW} for number in (1, 2)]
    status = {
        "phase": "Running",
        "reason": "Training",
        "gpus": 16,
        "progress": {"step": 40, "totalSteps": 500, "rewardMean": 0.25, "updatedAt": NOW},
        "checkpoint": {"step": 20, "uri": "/checkpoints/20", "digest": "abc", "savedAt": NOW},
        "counters": {"attempts": 2, "failedAttempts": 1},
        "attempts": attempts,
    }
    assert job_requests.merge(api, stored, {"status": status}, "/status").status == 200
    names, cells = job_requests.get_table(api, stored)
    assert names == [
        *("Name", "Phase", "Reason", "Step", "Reward", "Ckpt", "Attempt", "GPUs"),
        *("Total", "Failures", "Cluster", "Age"),
    ]
    assert cells[:11] == ["example", "Running", "Training", 40, 0.25, 20, 2, 16, 500, 1, "example-2"]


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"training": {"steps": 11}}, "spec.training"),
        ({"image": "other:1"}, "spec.image"),
        ({"code": {"imagePath": "/code"}}, "spec.code"),
        ({"pools": [{"name": "main", "nodes": 2, "gpusPerNode": 2}]}, "spec.pools"),
        ({"head": {"template": {"affinity": {"podAffinity": {}}}}}, "spec.head"),
    ],
)
def test_the_spec_is_immutable(api: httpx.Client, stored: str, patch: dict[str, object], path: str) -> None:
    answer = job_requests.merge(api, stored, {"spec": patch})
    assert answer.status == 422
    assert f"{path}: Invalid value" in answer.message
    assert "is immutable; create a job with another name" in answer.message


def test_run_policy_may_change(api: httpx.Client, stored: str) -> None:
    answer = job_requests.merge(
        api, stored, {"spec": {"runPolicy": {"activeDeadlineSeconds": 60, "cleanup": "KeepCluster"}}}
    )
    assert answer.status == 200, answer.message
    assert answer.at("spec", "runPolicy", "activeDeadlineSeconds") == 60


def test_rules_of_the_spec_are_evaluated_only_when_the_job_is_created(
    apiserver: ApiServer, api: httpx.Client, stored: str
) -> None:
    """Otherwise every write of the status would cost their evaluation, and after an upgrade with a new rule nobody
    could suspend a job that breaks it."""
    broken = {"spec.pools[0].name": "other", "spec.roles.actor.pool": "main"}
    assert job_requests.create(api, valid_job(broken)).status == 422
    key = base64.b64encode(f"/registry/{API_GROUP}/rljobs/default/{stored}".encode()).decode()
    with httpx.Client(base_url=apiserver.store_url, trust_env=False) as store:
        [pair] = store.post("/v3/kv/range", json={"key": key}).raise_for_status().json()["kvs"]
        job = json.loads(base64.b64decode(pair["value"]))
        job["spec"]["pools"][0]["name"] = "other"
        job["spec"]["roles"]["actor"]["pool"] = "main"
        value = base64.b64encode(json.dumps(job).encode()).decode()
        store.post("/v3/kv/put", json={"key": key, "value": value}).raise_for_status()
    answer = job_requests.merge(api, stored, {"spec": {"suspend": True}})
    assert answer.status == 200, answer.message
    answer = job_requests.merge(api, stored, {"status": {"phase": "Suspended"}}, "/status")
    assert answer.status == 200, answer.message
