"""The RayCluster of an attempt, compared with manifests written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import JsonValue
from ruamel.yaml import YAML

from rljob_api.contract_documents import load_job
from rljob_api.errors import DocumentError
from rljob_api.v1alpha1.pools import PodOverlay
from rljob_operator.manifests.ownership import Manifest
from rljob_operator.manifests.pod_environment import spec_document
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_operator.raw_json import object_at, objects_at
from rljob_testing.operator import inputs

GOLDEN = Path(__file__).parent / "golden"
KEY_ID = "2c70e12b"

TENSOR_PARALLEL: dict[str, object] = {
    "image": "registry.example/own:2",
    "rayVersion": "2.61.1",
    "pools": [
        {
            "name": "gpus",
            "nodes": 2,
            "gpusPerNode": 4,
            "gpuResource": "amd.com/gpu",
            "sharedMemory": "32Gi",
            "resources": {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"cpu": "11.5"}},
            "template": {
                "labels": {"team": "a"},
                "annotations": {"example.com/cost": "research"},
                "nodeSelector": {"gpu": "mi300"},
                "tolerations": [
                    {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
                    {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
                ],
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [{"matchExpressions": [{"key": "spot", "operator": "DoesNotExist"}]}]
                        }
                    },
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": "zone", "labelSelector": {}, "namespaceSelector": {}}
                        ]
                    },
                },
                "priorityClassName": "high",
                "runtimeClassName": "amd",
                "schedulerName": "volcano",
            },
        }
    ],
    "roles.rollout.tensorParallel": 2,
    "env": [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "credentials", "key": "token"}}},
    ],
    "envFrom": [{"prefix": "P_", "configMapRef": {"name": "settings", "optional": True}}],
    "imagePullSecrets": [{"name": "registry"}],
    "volumes": [
        {"name": "data", "mountPath": "/data", "readOnly": True, "subPath": "prompts", "type": "PersistentVolumeClaim"}
        | {"persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "certificates", "mountPath": "/etc/certificates", "type": "Secret", "secret": {"name": "tls"}},
        {"name": "scratch", "mountPath": "/scratch", "type": "EmptyDir", "emptyDir": {"sizeLimit": "10Gi"}},
    ],
    "code": {"configMap": "rewards"},
    "checkpoint.storage.subPath": "team/run",
    "runPolicy.gracePeriodSeconds": 3,
}


def at(value: JsonValue, *path: str | int) -> JsonValue:
    """The value at a path."""
    for part in path:
        if isinstance(value, dict):
            assert isinstance(part, str)
            value = value[part]
        else:
            assert isinstance(value, list)
            assert isinstance(part, int)
            value = value[part]
    return value


def golden(name: str) -> object:
    return YAML(typ="safe", pure=True).load((GOLDEN / name).read_text(encoding="utf-8"))


def made(edits: Mapping[str, object] | None = None, attempt: int = 1) -> Manifest:
    return ray_cluster(inputs.IDENTITY, inputs.spec(edits), attempt, inputs.DEFAULTS, KEY_ID)


def environment(manifest: Manifest, *path: str | int) -> dict[str, object]:
    """Values by name of the container at `path`, without references."""
    variables = at(manifest, *path, "env")
    assert isinstance(variables, list)
    plain = [each for each in variables if isinstance(each, dict) and "value" in each]
    return {str(each["name"]): each["value"] for each in plain}


RAY = ("spec", "headGroupSpec", "template", "spec", "containers", 0)


def test_the_cluster_of_a_minimal_job_matches_the_golden_manifest() -> None:
    manifest = made()
    variables = at(manifest, *RAY, "env")
    assert isinstance(variables, list)
    handed_over = load_job(str(at(variables, 0, "value")))
    assert (handed_over.name, handed_over.namespace, handed_over.uid) == ("example", "team-a", inputs.IDENTITY.uid)
    assert handed_over.spec == inputs.spec()
    variables[0] = {"name": "RLJOB_SPEC", "value": "checked apart"}
    assert manifest == golden("one_pool.yaml")


def test_the_worker_group_of_a_tensor_parallel_job_matches_the_golden_manifest() -> None:
    manifest = made(TENSOR_PARALLEL, attempt=2)
    assert at(manifest, "spec", "workerGroupSpecs") == [golden("tensor_parallel_worker.yaml")]
    assert at(manifest, "spec", "rayVersion") == "2.61.1"
    assert at(manifest, "metadata", "name") == "example-2"
    assert at(manifest, "spec", "authOptions", "secretName") == "example-2-0f8fad5b-2c70e12b"


def test_the_head_has_its_own_resources_and_scheduling_and_no_gpu() -> None:
    edits = {
        "head.resources": {"limits": {"memory": "8Gi"}},
        "head.template": {"nodeSelector": {"cpu": "only"}},
        "pools[0].template": {"nodeSelector": {"gpu": "a"}},
    }
    template = at(made(edits), "spec", "headGroupSpec", "template", "spec")
    assert at(template, "containers", 0, "resources") == {"requests": {}, "limits": {"memory": "8Gi"}}
    assert at(template, "nodeSelector") == {"cpu": "only"}


def test_code_in_the_image_is_on_the_path_and_needs_no_volume() -> None:
    manifest = made({"code": {"imagePath": "/opt/code"}})
    variables = environment(manifest, *RAY)
    assert variables["PYTHONPATH"] == "/opt/code"
    assert variables["RLJOB_JOB_FOLDER"] == "/opt/code"
    mounts = at(manifest, *RAY, "volumeMounts")
    assert isinstance(mounts, list)
    assert [at(mount, "name") for mount in mounts] == ["rljob-storage", "rljob-cache", "rljob-ray"]


SHADOWS = {"LD_AUDIT": "", "LD_PRELOAD": "", "PYTHONHOME": "", "PYTHONSTARTUP": ""}
RAY_SHADOWS = {
    "RAY_CLUSTER_ACTIVITY_HOOK": "builtins.dict",
    "RAY_ENABLE_K8S_TOKEN_AUTH": "false",
    "RAY_RUNTIME_ENV_HOOK": "copy.copy",
    "RAY_RUNTIME_ENV_PLUGINS": "",
    "RAY_START_HOOK": "operator.is_",
}


@pytest.mark.parametrize(
    ("prefixes", "shadows"),
    [
        ([], {}),
        ([None], SHADOWS | RAY_SHADOWS),
        (["P_"], {}),
        (["P_", None], SHADOWS | RAY_SHADOWS),
        (["LD_"], {"LD_AUDIT": "", "LD_PRELOAD": ""}),
        (["LD_AUDIT", "PYTHONH"], {"PYTHONHOME": ""}),
        (["RA"], RAY_SHADOWS),
    ],
)
def test_no_secret_sets_a_variable_that_jobs_may_not_set(prefixes: list[str | None], shadows: dict[str, str]) -> None:
    sources: list[dict[str, object]] = [{"secretRef": {"name": "all"}} | ({"prefix": p} if p else {}) for p in prefixes]
    manifest = made({"envFrom": sources})
    for container_path in (RAY, ("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0)):
        variables = environment(manifest, *container_path)
        assert {name: variables[name] for name in SHADOWS | RAY_SHADOWS if name in variables} == shadows


def test_code_on_a_claim_is_mounted_read_only() -> None:
    template = at(made({"code": {"persistentVolumeClaim": "mine"}}), "spec", "headGroupSpec", "template", "spec")
    assert {"name": "rljob-code", "persistentVolumeClaim": {"claimName": "mine"}} in at(template, "volumes")  # type: ignore[operator]


def test_a_claim_that_is_mounted_several_times_is_one_volume() -> None:
    """A pod with two volumes of one claim never starts."""
    claim = inputs.spec().checkpoint.storage
    assert claim is not None
    name = claim.persistent_volume_claim
    shared = {"name": "runs", "mountPath": "/shared", "subPath": "all", "type": "PersistentVolumeClaim"}
    edits = {
        "code": {"persistentVolumeClaim": name},
        "volumes": [{**shared, "persistentVolumeClaim": {"claimName": name}}],
    }
    for path in (("headGroupSpec",), ("workerGroupSpecs", 0)):
        pod = at(made(edits), "spec", *path, "template", "spec")
        volumes, mounts = at(pod, "volumes"), at(pod, "containers", 0, "volumeMounts")
        assert isinstance(volumes, list)
        assert isinstance(mounts, list)
        of_claim = [each for each in volumes if isinstance(each, dict) and "persistentVolumeClaim" in each]
        assert of_claim == [{"name": "rljob-storage", "persistentVolumeClaim": {"claimName": name}}]
        for mount in (
            {"mountPath": "/rljob/code", "name": "rljob-storage", "readOnly": True},
            {"mountPath": "/shared", "name": "rljob-storage", "subPath": "all"},
        ):
            assert mount in mounts


@pytest.mark.parametrize(
    ("resources", "num_cpus"),
    [
        # Two GPUs need a CPU each and one more; more are declared if the pod has them.
        ({}, "3"),
        ({"requests": {"cpu": "300m"}}, "3"),
        ({"requests": {"cpu": 8}}, "8"),
        ({"requests": {"cpu": 8}, "limits": {"cpu": "15500m"}}, "16"),
        ({"limits": {"cpu": "1k"}}, "1000"),
        ({"limits": {"cpu": "1Ki"}}, "1024"),
    ],
)
def test_ray_gets_the_cpus_of_a_worker(resources: dict[str, object], num_cpus: str) -> None:
    manifest = made({"pools[0].resources": resources})
    assert at(manifest, "spec", "workerGroupSpecs", 0, "rayStartParams", "num-cpus") == num_cpus


def test_dollars_reach_the_trainer_past_kubernetes() -> None:
    text = "$(RLJOB_CACHE) $$ ${X}"
    job_spec = inputs.spec({"training.dataset.promptTemplate": text + "{prompt}"})
    document = spec_document(inputs.IDENTITY, job_spec)
    assert "$" not in document
    assert load_job(document).spec.training.dataset.prompt_template == text + "{prompt}"


def test_a_spec_that_fits_no_variable_is_rejected() -> None:
    values = [{"name": f"A_{number}", "value": "x" * 4096} for number in range(17)]
    with pytest.raises(DocumentError, match="at most 65536 bytes"):
        spec_document(inputs.IDENTITY, inputs.spec({"env": values}))
    # 12 x 4096 dollars fit before they are escaped and not after.
    dollars = [{"name": f"A_{number}", "value": "$" * 4096} for number in range(12)]
    with pytest.raises(DocumentError, match="every '\\$' in it is escaped"):
        spec_document(inputs.IDENTITY, inputs.spec({"env": dollars}))


def test_our_labels_win_even_if_no_rule_rejects_others() -> None:
    whole = inputs.spec()
    overlay = PodOverlay(labels={"rljob.dev/job-uid": "another", "rljob.dev/pool": "another", "team": "a"})
    pool = whole.pools[0].model_copy(update={"template": overlay})
    manifest = ray_cluster(inputs.IDENTITY, whole.model_copy(update={"pools": (pool,)}), 1, inputs.DEFAULTS, KEY_ID)
    labels = at(manifest, "spec", "workerGroupSpecs", 0, "template", "metadata", "labels")
    assert isinstance(labels, dict)
    assert (labels["rljob.dev/job-uid"], labels["rljob.dev/pool"], labels["team"]) == (
        inputs.IDENTITY.uid,
        "main",
        "a",
    )


def test_a_cluster_in_a_queue_is_created_suspended_with_its_labels() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "high"}
    queued = ray_cluster(inputs.IDENTITY, inputs.spec(), 1, inputs.DEFAULTS, KEY_ID, labels)
    other = ray_cluster(inputs.IDENTITY, inputs.spec(), 1, inputs.DEFAULTS, KEY_ID)
    assert object_at(queued, "spec")["suspend"] is True
    assert "suspend" not in object_at(other, "spec")
    of_queued, of_other = (object_at(each, "metadata", "labels") for each in (queued, other))
    assert of_queued == {**of_other, **labels}


def test_the_labels_of_a_batch_scheduler_are_those_of_the_cluster_and_its_pods() -> None:
    spec = inputs.spec({"scheduling": {"gang": True, "labels": {"kai.scheduler/queue": "team"}}})
    cluster = ray_cluster(inputs.IDENTITY, spec, 1, inputs.DEFAULTS, KEY_ID)
    head = object_at(cluster, "spec", "headGroupSpec")
    [worker] = objects_at(cluster, "spec", "workerGroupSpecs")
    of_cluster = object_at(cluster, "metadata", "labels")
    assert of_cluster["ray.io/gang-scheduling-enabled"] == "true"
    for labels in (of_cluster, *(object_at(each, "template", "metadata", "labels") for each in (head, worker))):
        assert labels["kai.scheduler/queue"] == "team"
    plain = ray_cluster(inputs.IDENTITY, inputs.spec(), 1, inputs.DEFAULTS, KEY_ID)
    assert "ray.io/gang-scheduling-enabled" not in object_at(plain, "metadata", "labels")
