"""Hypothesis strategies for one part of a job that ends up in a pod and may be invalid, and pods with the same part,
which an API server validates.

Values for which RLJob is stricter than the API server are not generated (`test_pods_on_the_server.STRICTER`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from hypothesis import strategies as st
from pydantic import JsonValue, TypeAdapter

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.ownership import Manifest
from rljob_operator.manifests.pod_template import PodMaker
from rljob_testing.jobs.valid_job import Wire, valid_job
from rljob_testing.operator import inputs

Edits = dict[str, object]
_MANIFEST = TypeAdapter(Manifest)
_TEMPLATE = "spec.head.template."
_SPEC_FIELDS = ("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName", "schedulerName")
"""Fields of the pod overlay that have the same name in the pod's spec."""
_REQUIRED, _PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))

NAMES = st.text("aZ0-_.", max_size=4) | st.sampled_from(["n" * 63, "n" * 64, "é", "a b", "a\n", "zone"])
DOMAINS = st.text("aZ0-.", max_size=5) | st.sampled_from(["example.com", "a_b", "é"])
KEYS = NAMES | st.builds("{}/{}".format, DOMAINS, NAMES)
LONG_KEYS = st.sampled_from([f"{'d.' * 126}{'d' * more}/{'n' * size}" for more in (1, 2) for size in (1, 63, 64)])
FIELD_KEYS = KEYS.filter(bool)
VALUES = st.text("aZ0-_.", max_size=4) | st.sampled_from(["v" * 63, "v" * 64, "a/b", "é", "a\n", " "])
LABELS = st.dictionaries(KEYS | LONG_KEYS, VALUES, max_size=2)


def _is_doubtful(text: str) -> bool:
    """Excludes an omitted number, a negative zero and a long exponent, which only Kubernetes accepts."""
    begins = re.match(r"\+?\.?[0-9]|-\.?0*\.?0*[1-9]", text)
    return begins is not None and re.search(r"[eE][-+]?[0-9]{3}", text) is None


QUANTITIES = st.text("0159.+-eEmnukKMGi", min_size=1, max_size=6).filter(_is_doubtful)
AMOUNTS = (
    st.sampled_from(["0", 1, 2, "2", "1500m", "1.5", "2e0", "1k", "1Ki", "1G", "1Gi", "1E", "1Ei", "16Ei"]) | QUANTITIES
)
_COUNTS = st.sampled_from(["0", 1, "1", 2, "1.5", "500m", "-1"])
_PAGES = st.sampled_from(["0", "2Mi", "4Mi", "3Mi", "2097152"])
_DEVICES = st.sampled_from(
    ["rdma/hca", "Example.com/a", "a/b/c", "/a", "a/", f"{'d.' * 122}/n", f"{'d.' * 121}dd/n", f"a/{'n' * 64}"]
)
_NAMELESS = st.sampled_from(["cpuu", "pods", "storage", "CPU", "hugepages", "services", "limits.cpu", "", " cpu"])


def _pairs(names: st.SearchStrategy[str], amounts: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    pair = st.tuples(names, st.none() | amounts, st.none() | amounts)
    return st.lists(pair, max_size=2).map(list)


def _resources(pairs: list[tuple[str, object, object]]) -> Edits:
    requests = {name: request for name, request, _ in pairs if request is not None}
    limits = {name: limit for name, _, limit in pairs if limit is not None}
    return {"spec.head.resources": {"requests": requests, "limits": limits}}


RESOURCES = st.builds(
    lambda *parts: _resources([pair for part in parts for pair in part]),
    _pairs(st.sampled_from(["cpu", "memory", "ephemeral-storage"]), AMOUNTS),
    st.just([]) | _pairs(_DEVICES, _COUNTS),
    st.just([]) | _pairs(st.just("hugepages-2Mi"), _PAGES),
    st.just([]) | _pairs(_NAMELESS, st.just(1)),
)
TOLERATIONS = st.fixed_dictionaries(
    {},
    optional={
        "key": FIELD_KEYS,
        "operator": st.sampled_from(["Exists", "Equal", "In"]),
        "value": VALUES,
        "effect": st.sampled_from(["NoSchedule", "PreferNoSchedule", "NoExecute", "Never"]),
        "tolerationSeconds": st.sampled_from([0, 30]),
    },
)
_OPERATORS = st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Is"])


def _requirements(values: st.SearchStrategy[str]) -> st.SearchStrategy[Wire]:
    return st.fixed_dictionaries(
        {"key": st.just("zone") | FIELD_KEYS, "operator": _OPERATORS}, optional={"values": st.lists(values, max_size=2)}
    )


_FIELDS = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["metadata.name", "metadata.uid"]),
        "operator": _OPERATORS,
        "values": st.lists(st.sampled_from(["node-1.example", "Node"]), max_size=2),
    }
)


def _node_terms(values: st.SearchStrategy[str]) -> st.SearchStrategy[Wire]:
    return st.fixed_dictionaries(
        {},
        optional={
            "matchExpressions": st.lists(_requirements(values), max_size=2),
            "matchFields": st.lists(_FIELDS, max_size=1),
        },
    )


_SELECTORS = st.fixed_dictionaries(
    {},
    optional={
        "matchLabels": st.dictionaries(st.just("a") | KEYS, st.just("b") | VALUES, max_size=1),
        "matchExpressions": st.lists(_requirements(VALUES), max_size=1),
    },
)
_POD_TERMS = st.fixed_dictionaries(
    {},
    optional={
        "topologyKey": st.just("zone") | KEYS,
        "labelSelector": _SELECTORS,
        "namespaceSelector": _SELECTORS,
        "namespaces": st.lists(st.sampled_from(["team", "Team", ""]), max_size=1),
    },
)
_WEIGHTS = st.sampled_from([0, 1, 100, 101])
_POD_AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        _REQUIRED: st.lists(_POD_TERMS, max_size=1),
        _PREFERRED: st.lists(st.fixed_dictionaries({"weight": _WEIGHTS, "podAffinityTerm": _POD_TERMS}), max_size=1),
    },
)
_NODE_AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        _REQUIRED: st.lists(_node_terms(VALUES), max_size=2).map(lambda terms: {"nodeSelectorTerms": terms}),
        _PREFERRED: st.lists(
            st.fixed_dictionaries({"weight": _WEIGHTS, "preference": _node_terms(st.just("a"))}), max_size=1
        ),
    },
)
AFFINITY = st.one_of(
    st.builds(lambda part: {"nodeAffinity": part}, _NODE_AFFINITY),
    st.builds(lambda name, part: {name: part}, st.sampled_from(["podAffinity", "podAntiAffinity"]), _POD_AFFINITY),
)


def _at(path: str, values: st.SearchStrategy[object]) -> st.SearchStrategy[Edits]:
    return values.map(lambda value: {path: value})


EDITS: st.SearchStrategy[Edits] = st.one_of(
    _at(_TEMPLATE + "labels", LABELS),
    _at(_TEMPLATE + "annotations", st.dictionaries(KEYS | LONG_KEYS, st.sampled_from(["", "é\n"]), max_size=2)),
    _at(_TEMPLATE + "nodeSelector", LABELS),
    _at(_TEMPLATE + "tolerations", st.lists(TOLERATIONS, min_size=1, max_size=1)),
    # The API server does not check the affinity of the head.
    AFFINITY.map(lambda affinity: {"spec.pools[0].template.affinity": affinity}),
    RESOURCES,
    RESOURCES,
    _at("spec.pools[0].gpuResource", _DEVICES | st.sampled_from(["gpu", "nvidia.com/gpu"])),
    _at("spec.pools[0].sharedMemory", AMOUNTS),
    _at("spec.env", st.builds(lambda name, key: [_secret_variable(name, key)], DOMAINS, NAMES)),
)


def _secret_variable(name: str, key: str) -> Wire:
    return {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def job_with(edits: Mapping[str, object]) -> Wire:
    """The small valid job with storage, changed at wire paths."""
    return valid_job({"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt"}, **edits})


def pods_of(spec: RLJobSpec) -> list[Manifest]:
    """The pods of the operator's manifests: the head and one worker of each pool."""
    maker = PodMaker(inputs.IDENTITY, spec, 1, inputs.DEFAULTS)
    return [_pod(template) for template in (maker.head(), *map(maker.worker, spec.pools))]


def raw_pods_of(edits: Mapping[str, object]) -> list[Manifest]:
    """The same pods for a part that RLJob rejects: the pods of the job without the part, and the part put in its
    place."""
    head, worker = pods_of(RLJob.from_wire(job_with({})).spec)
    for path, value in edits.items():
        wire = TypeAdapter(JsonValue).validate_python(value)
        name = path.rpartition(".")[2]
        for pod in (head, worker) if path == "spec.env" else (worker if "pools" in path else head,):
            _PUT[name](pod, wire)
    return [head, worker]


def _pod(template: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {**_part(template, "metadata"), "name": "example"},
    }


def _part(value: JsonValue, *path: str | int) -> Manifest:
    for step in path:
        value = value[step]  # type: ignore[index]
    return _MANIFEST.validate_python(value) if not isinstance(value, dict) else value


def _put_metadata(field: str, pod: Manifest, value: JsonValue) -> None:
    _part(pod, "metadata", field).update(_MANIFEST.validate_python(value))


def _put_resources(pod: Manifest, value: JsonValue) -> None:
    _part(pod, "spec", "containers", 0)["resources"] = value


def _put_gpu(pod: Manifest, value: JsonValue) -> None:
    for amounts in _part(pod, "spec", "containers", 0, "resources").values():
        _part(amounts)[str(value)] = _part(amounts).pop("nvidia.com/gpu")


def _put_shared_memory(pod: Manifest, value: JsonValue) -> None:
    volumes = pod["spec"]["volumes"]  # type: ignore[index, call-overload]
    [volume] = [each for each in volumes if each["name"] == "rljob-shm"]  # type: ignore[index, call-overload, union-attr]
    _part(volume, "emptyDir")["sizeLimit"] = value


def _put_spec(field: str, pod: Manifest, value: JsonValue) -> None:
    _part(pod, "spec")[field] = value


def _put_env(pod: Manifest, value: JsonValue) -> None:
    container = _part(pod, "spec", "containers", 0)
    container["env"] = [*container["env"], *value]  # type: ignore[misc]


_PUT: dict[str, Callable[[Manifest, JsonValue], None]] = {
    "labels": lambda pod, value: _put_metadata("labels", pod, value),
    "annotations": lambda pod, value: _put_metadata("annotations", pod, value),
    **{field: partial(_put_spec, field) for field in _SPEC_FIELDS},
    "resources": _put_resources,
    "gpuResource": _put_gpu,
    "sharedMemory": _put_shared_memory,
    "env": _put_env,
}
