"""Jobs as the operator gets them: one by hand, and any that the rules of the API let through."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.objects import JobIdentity
from rljob_testing.valid_job import edited, valid_job

IDENTITY = JobIdentity(namespace="team-a", name="example", uid="0f8fad5b-d9cb-469f-a165-70867728950e")
DEFAULTS = Defaults(
    trainer_image="example/trainer:1",
    ray_version="2.60.0",
    image_pull_policy="IfNotPresent",
    operator_namespace="rljob-system",
    operator_pod_labels={"app.kubernetes.io/name": "rljob-operator"},
)


def spec(edits: Mapping[str, object] | None = None) -> RLJobSpec:
    """The small valid job (one node with two GPUs) with storage, edited at wire paths below `spec`."""
    storage = {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt"}}
    more = {f"spec.{path}": value for path, value in (edits or {}).items()}
    return RLJob.from_wire(edited(valid_job(), storage | more)).spec


_LABELS = st.dictionaries(
    st.sampled_from(["team", "example.com/cost", "app.kubernetes.io/name", "pod", "app"]), st.just("x"), max_size=3
)
_QUANTITIES = st.sampled_from(["1", "300m", "2.5", "16Gi", "1k", "0", "100Mi"])
_RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "requests": st.dictionaries(st.sampled_from(["cpu", "memory", "ephemeral-storage"]), _QUANTITIES, max_size=3),
        "limits": st.dictionaries(st.sampled_from(["cpu", "memory", "rdma/hca"]), _QUANTITIES, max_size=3),
    },
)
_TOLERATIONS = st.lists(
    st.sampled_from([{"operator": "Exists"}, {"key": "gpu", "value": "a", "effect": "NoSchedule"}]), max_size=2
)
_AFFINITY = st.sampled_from(
    [
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        {"securityContext": {"runAsUser": 0}, "hostNetwork": True, "containers": []},
    ]
)
_OVERLAYS = st.fixed_dictionaries(
    {},
    optional={
        "labels": _LABELS,
        "annotations": st.dictionaries(st.sampled_from(["a", "sidecar.istio.io/inject"]), st.just("true"), max_size=2),
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


def specs() -> st.SearchStrategy[RLJobSpec]:
    """Specs of all shapes that pass the rules."""
    return _EDITS.map(_spec_of)


def _spec_of(edits: dict[str, object]) -> RLJobSpec:
    # 96 prompts x 4 responses divide by up to 4 nodes x 8 GPUs.
    return spec({**edits, "training.batchSize": 96})
