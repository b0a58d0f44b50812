"""A hypothesis strategy for the specs of all jobs that pass the API's validation."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from rljob_api.quantities import number_of
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.operator import inputs

_LABELS = st.dictionaries(
    st.sampled_from(["team", "example.com/cost", "app.kubernetes.io/name", "pod", "app"]), st.just("x"), max_size=3
)
_QUANTITIES = st.sampled_from(["1", "300m", "2.5", "16Gi", "1k", "0", "100Mi", "1e3", "+.5", "400m", "3E", "2."])
_COUNTS = st.sampled_from(["0", "1", "16"])
_RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.tuples(_QUANTITIES, _QUANTITIES),
        "memory": st.tuples(_QUANTITIES, _QUANTITIES),
        "ephemeral-storage": st.tuples(_QUANTITIES, _QUANTITIES),
        "rdma/hca": _COUNTS.map(lambda count: (count, count)),
        "example.com/nic": _COUNTS.map(lambda count: (None, count)),
    },
).map(lambda amounts: _ordered(amounts))  # A lambda, because the function is defined below.
_TOLERATIONS = st.lists(
    st.sampled_from([{"operator": "Exists"}, {"key": "gpu", "value": "a", "effect": "NoSchedule"}]), max_size=2
)
_REQUIREMENTS = st.sampled_from(
    [{"key": "zone", "operator": "In", "values": ["a", ""]}, {"key": "example.com/gpu", "operator": "DoesNotExist"}]
)
_NODE_TERMS = st.fixed_dictionaries(
    {},
    optional={
        "matchExpressions": st.lists(
            _REQUIREMENTS | st.just({"key": "cores", "operator": "Gt", "values": ["8"]}), max_size=2
        ),
        "matchFields": st.just([{"key": "metadata.name", "operator": "NotIn", "values": ["node-1.example"]}]),
    },
)
_SELECTORS = st.fixed_dictionaries(
    {}, optional={"matchLabels": _LABELS, "matchExpressions": st.lists(_REQUIREMENTS, max_size=2)}
)
_POD_TERMS = st.fixed_dictionaries(
    {"topologyKey": st.sampled_from(["kubernetes.io/hostname", "zone"])},
    optional={"labelSelector": _SELECTORS, "namespaceSelector": _SELECTORS, "namespaces": st.just(["team-b"])},
)
_REQUIRED, _PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))


def _weighted(name: str, terms: st.SearchStrategy[Mapping[str, object]]) -> st.SearchStrategy[list[dict[str, object]]]:
    return st.lists(st.fixed_dictionaries({"weight": st.integers(1, 100), name: terms}), max_size=2)


_POD_AFFINITY = st.fixed_dictionaries(
    {}, optional={_REQUIRED: st.lists(_POD_TERMS, max_size=2), _PREFERRED: _weighted("podAffinityTerm", _POD_TERMS)}
)
_AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        "nodeAffinity": st.fixed_dictionaries(
            {},
            optional={
                _REQUIRED: st.lists(_NODE_TERMS, min_size=1, max_size=2).map(
                    lambda terms: {"nodeSelectorTerms": terms}
                ),
                _PREFERRED: _weighted("preference", _NODE_TERMS),
            },
        ),
        "podAffinity": _POD_AFFINITY,
        "podAntiAffinity": _POD_AFFINITY,
    },
)
_OVERLAYS = st.fixed_dictionaries(
    {},
    optional={
        "labels": _LABELS,
        "annotations": st.dictionaries(
            st.sampled_from(["a", "sidecar.istio.io/inject", "Example.com/b"]),
            st.sampled_from(["true", ""]),
            max_size=2,
        ),
        "nodeSelector": _LABELS,
        "tolerations": _TOLERATIONS,
        "affinity": _AFFINITY,
        "priorityClassName": st.just("high"),
        "runtimeClassName": st.just("nvidia"),
        "schedulerName": st.just("volcano"),
    },
)
_TEXTS = st.sampled_from(["", "1", "$(RLJOB_SPEC) $$ `id`; rm -rf $HOME", "\u2028é\n", "x" * 200])
_SECRET = {"secretKeyRef": {"name": "credentials", "key": "token"}}
_ENV = st.lists(
    st.one_of(
        st.builds(lambda name, value: {"name": name, "value": value}, st.sampled_from(["HOME", "A", "NCCL_B"]), _TEXTS),
        st.just({"name": "HF_TOKEN", "valueFrom": _SECRET}),
    ),
    unique_by=lambda variable: str(variable["name"]),
    max_size=3,
)
_ENV_FROM = st.lists(
    st.sampled_from([{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "all"}, "prefix": "LD_"}]), max_size=2
)
_CLAIMED = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "data"}}
_VOLUME_CHOICES: list[dict[str, object]] = [
    {"name": "data", "mountPath": "/data", "readOnly": True, "subPath": "a/b", **_CLAIMED},
    {"name": "shared-mem", "mountPath": "/c", "type": "ConfigMap", "configMap": {"name": "c"}},
    {"name": "ray-logs", "mountPath": "/tmp/s", "type": "Secret", "secret": {"name": "s"}},
    {"name": "scratch", "mountPath": "/scratch/", "type": "EmptyDir", "emptyDir": {"sizeLimit": "1Gi"}},
]
_VOLUMES = st.lists(st.sampled_from(_VOLUME_CHOICES), unique_by=lambda volume: str(volume["name"]), max_size=4)
_CODE = st.sampled_from([{"configMap": "rewards"}, {"persistentVolumeClaim": "code"}, {"imagePath": "/opt/code"}])
_POOLS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["main", "worker", "a" * 63]),
        "nodes": st.integers(1, 4),
        "gpusPerNode": st.sampled_from([1, 2, 4, 8]),
    },
    optional={
        "gpuResource": st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-3g.40gb"]),
        "sharedMemory": _QUANTITIES,
        "resources": _RESOURCES,
        "template": _OVERLAYS,
    },
)
_EDITS = st.fixed_dictionaries(
    {"pools": _POOLS.map(lambda pool: [pool])},
    optional={
        "image": st.just("registry.example/own:2"),
        "rayVersion": st.just("2.61.0"),
        "head.resources": _RESOURCES,
        "head.template": _OVERLAYS,
        "env": _ENV,
        "envFrom": _ENV_FROM,
        "imagePullSecrets": st.just([{"name": "registry"}]),
        "volumes": _VOLUMES,
        "code": _CODE,
        "checkpoint.storage.subPath": st.sampled_from(["a/b", "a/"]),
        "runPolicy.gracePeriodSeconds": st.integers(1, 600),
    },
)


def any_specs() -> st.SearchStrategy[RLJobSpec]:
    """Specs of every shape that passes validation."""
    return _EDITS.map(_spec_of)


def _ordered(amounts: Mapping[str, tuple[str | None, str]]) -> dict[str, dict[str, str]]:
    """Resources whose requests do not exceed their limits; some have only a limit."""
    pairs = {
        name: (request, limit) if request is None or number_of(request) <= number_of(limit) else (limit, request)
        for name, (request, limit) in amounts.items()
    }
    requests = {name: request for name, (request, _) in pairs.items() if request is not None}
    return {"requests": requests, "limits": {name: limit for name, (_, limit) in pairs.items()}}


def _spec_of(edits: dict[str, object]) -> RLJobSpec:
    # 96 prompts x 4 responses divide over up to 4 nodes x 8 GPUs.
    return inputs.spec({**edits, "training.batchSize": 96})
