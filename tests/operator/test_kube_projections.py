"""The cache keeps little of large objects, and everything that is read."""

from __future__ import annotations

import copy
import json
import sys
import tracemalloc
from collections.abc import Mapping

import pytest

from rljob_api.constants import LABEL_JOB_UID
from rljob_operator.handlers import watches
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, ResourceType
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.observed_objects import JobReader
from rljob_operator.kube.projections import LONGEST_TEXT, projected, projected_job
from rljob_operator.manifests.pod_template import PodMaker
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_operator.raw_json import JsonObject, object_at, objects_at, text_at
from rljob_testing.operator import inputs
from rljob_testing.operator.testbed import cluster_job

RUNNING = {"running": {"startedAt": "2026-01-31T12:00:00Z"}}
CONDITIONS = [
    {"type": name, "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-01-31T12:00:00Z"}
    for name in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
]


def stored(manifest: Mapping[str, object], name: str, uid: str, status: Mapping[str, object]) -> JsonObject:
    """An object as the API server sends it: with `managedFields`, which repeat the names of all fields, and with a
    string of its own for each name of a field."""
    metadata = {**object_at(manifest, "metadata"), "name": name, "namespace": "team", "uid": uid}
    managed = [{"manager": each, "fieldsV1": {"f:spec": names_of(manifest)}} for each in ("kuberay", "kubelet")]
    full = {**manifest, "metadata": {**metadata, "resourceVersion": "7", "managedFields": managed}, "status": status}
    found: JsonObject = json.loads(json.dumps(full))
    return found


def names_of(value: object) -> object:
    """The names of the fields of a value, as in `managedFields`."""
    if isinstance(value, Mapping):
        return {f"f:{name}": names_of(inner) for name, inner in value.items()}
    return {f"k:{index}": names_of(entry) for index, entry in enumerate(value)} if isinstance(value, list) else {}


def head_pod(name: str) -> JsonObject:
    """A running head pod of the size of those that KubeRay 1.6 creates: it copies the variables of the Ray container
    into an init container."""
    template = PodMaker(inputs.IDENTITY, inputs.spec(), 1, inputs.DEFAULTS).head()
    spec, metadata = object_at(template, "spec"), object_at(template, "metadata")
    references = [{"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels{number}"}} for number in range(10)]
    added = [{"name": f"RAY_{number}", "valueFrom": source} for number, source in enumerate(references)]
    containers = [{**each, "env": [*objects_at(each, "env"), *added]} for each in objects_at(spec, "containers")]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "job-1", "uid": "c1", "controller": True}
    labels = {**object_at(metadata, "labels"), "rljob.dev/job-uid": "j1", "example.com/team": "a"}
    statuses = [
        {
            "name": each,
            "ready": True,
            "restartCount": 0,
            "state": RUNNING,
            "lastState": {},
            "image": "registry.example/trainer@sha256:0123456789abcdef",
            "containerID": "containerd://0123456789abcdef",
        }
        for each in ("ray", "driver-log")
    ]
    return stored(
        {
            "metadata": {**metadata, "labels": labels, "ownerReferences": [owner]},
            "spec": {**spec, "containers": containers, "initContainers": containers, "nodeName": "node-1"},
        },
        name,
        name,
        {"phase": "Running", "conditions": CONDITIONS, "podIP": "10.0.0.1", "containerStatuses": statuses},
    )


def num_bytes(value: object, seen: set[int]) -> int:
    """Bytes of all objects that a value refers to, except those in `seen`."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    found = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return found + sum(num_bytes(name, seen) + num_bytes(inner, seen) for name, inner in value.items())
    return found + sum(num_bytes(entry, seen) for entry in value) if isinstance(value, list | tuple) else found


def kept_bytes(cache: ObjectCache) -> int:
    """Bytes of all objects in the cache."""
    seen: set[int] = set()
    return sum(num_bytes(raw, seen) for raw in (*cache.jobs(), *cache.clusters(), *cache.of_job(PODS, "team", "j1")))


def test_a_pod_is_kept_in_6_kb() -> None:
    cache = ObjectCache((None,))
    for number in range(100):
        cache.store(PODS, "ADDED", head_pod(f"pod-{number}"))
    assert 26_000 < len(json.dumps(head_pod("pod"))) < 31_000
    assert kept_bytes(cache) < 100 * 6_000


def test_a_cluster_is_kept_without_its_pod_templates() -> None:
    manifest = ray_cluster(inputs.IDENTITY, inputs.spec(), 1, inputs.DEFAULTS, "2c70e12b")
    raw = stored(manifest, "job-1", "c1", {"conditions": CONDITIONS, "state": "ready"})
    kept = projected(CLUSTERS, raw)
    assert object_at(kept, "spec") == {"authOptions": object_at(raw, "spec", "authOptions")}
    assert object_at(kept, "metadata", "annotations").keys() == {
        "rljob.dev/token-key",
    }
    assert num_bytes(kept, set()) < 6_000


def test_states_of_an_unfinished_job_share_one_spec_with_the_reader() -> None:
    cache, reader = ObjectCache((None,)), JobReader()
    specs: list[object] = []
    for version, step in enumerate((1, 2), start=1):
        raw = stored(cluster_job("job"), "job", "j1", {"progress": {"step": step}})
        metadata = {**object_at(raw, "metadata"), "resourceVersion": str(version), "generation": 1}
        last_applied = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 5_000}
        cache.store(JOBS, "MODIFIED", {**raw, "metadata": {**metadata, "annotations": last_applied}})
        kept = cache.job("team", "job")
        assert kept is not None
        specs.append(kept["spec"])
        assert object_at(kept, "status", "progress") == {"step": step}
        assert object_at(kept, "metadata", "annotations") == {}
        assert reader.read(kept).observed.spec is not None
        specs.append(reader._readings["team", "job"][0])
    assert len({id(spec) for spec in specs}) == 1


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    message = "a" * 5_000 + "z" * 5_000
    raw = copy.deepcopy(dict(head_pod("pod")))
    raw["status"] = {"phase": "Failed", "message": message, "reason": "Evicted"}
    kept = text_at(projected(PODS, raw), "status", "message")
    assert (len(kept), kept[:3], kept[-3:]) == (LONGEST_TEXT + len(" ... "), "aaa", "zzz")


@pytest.mark.parametrize("kind", [CLUSTERS, PODS])
def test_labels_and_owners_that_a_tenant_adds_take_no_memory(kind: ResourceType) -> None:
    few: JsonObject = {"metadata": {"name": "a", "labels": {LABEL_JOB_UID: "j1"}, "ownerReferences": []}}
    labels = {LABEL_JOB_UID: "j1"} | {f"rljob.dev/{number}": "" for number in range(1000)}
    annotations = {f"rljob.dev/{number}": "" for number in range(1000)}
    owners = [{"uid": 9000 * "u", "kind": 9000 * "k", "controller": False} for _ in range(1000)]
    metadata = {"name": "a", "labels": labels, "annotations": annotations, "ownerReferences": owners}
    many: JsonObject = {"metadata": metadata}
    assert len(json.dumps(projected(kind, many))) < len(json.dumps(projected(kind, few))) + 100
    kept, of_few = (projected_job({**raw, "spec": {}, "status": {}}, None) for raw in (many, few))
    assert len(json.dumps(kept)) < len(json.dumps(of_few)) + 100


def test_a_page_of_the_largest_jobs_takes_little_memory_while_it_is_parsed() -> None:
    """The API server limits an object to 1.5 MiB, not the number of its labels; `managedFields` repeat their names."""
    labels = [f"x{number:x}" for number in range(45_000)]
    managed = {"f:metadata": {"f:labels": {f"f:{label}": {} for label in labels}}}
    metadata = {"labels": dict.fromkeys(labels, ""), "managedFields": [{"fieldsV1": managed}]}
    job = json.dumps({"metadata": metadata}, separators=(",", ":"))
    page_size = watches._settings().watching.chunk_size
    assert page_size is not None
    assert 1_000_000 < len(job) < 1.5 * 2**20
    page = f'{{"items": [{",".join([job] * page_size)}]}}'
    tracemalloc.start()
    json.loads(page)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20
