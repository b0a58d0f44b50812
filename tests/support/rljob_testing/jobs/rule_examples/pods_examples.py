"""Examples for the rules on pools and pods: resources, labels, annotations, tolerations, affinity; part of
`rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rljob_testing.jobs.valid_job import Bad

_TOLERATIONS = "spec.pools[0].template.tolerations"
_HEAD = "spec.head."
_POOL = "spec.pools[0]."
_RESOURCES = _HEAD + "resources"
_TEMPLATE = _HEAD + "template."
_SCHEDULING_LABELS = "spec.scheduling.labels"
_DOMAIN = "d." * 126 + "d"
"""253 characters, the maximum length of a domain name."""
_PODS = _POOL + "template.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution"
_NODES = _POOL + "template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
_TERM = {"topologyKey": "kubernetes.io/hostname"}
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def _resources(requests: Mapping[str, object], limits: Mapping[str, object]) -> dict[str, object]:
    return {_RESOURCES: {"requests": dict(requests), "limits": dict(limits)}}


def _bad(place: str, requests: Mapping[str, object], limits: Mapping[str, object], path: str = ".requests") -> Bad:
    """A fault in the resources of the head pod; `path` is the field that the API server reports."""
    return Bad(_RESOURCES + path, _resources(requests, limits), places=(f"{_RESOURCES}.{place}",))


def _nodes(operator: str, *values: str) -> dict[str, object]:
    return {_NODES + ".nodeSelectorTerms[0].matchExpressions[0]": _expression(operator, *values)}


def _pods(operator: str, *values: str) -> dict[str, object]:
    return {_PODS + "[0]": _TERM | {"labelSelector": {"matchExpressions": [_expression(operator, *values)]}}}


def _expression(operator: str, *values: str) -> dict[str, object]:
    return {"key": "example.com/zone", "operator": operator, "values": list(values)}


def _bad_nodes(operator: str, *values: str) -> Bad:
    # Both the API server and our messages give the index of each list on the path.
    return Bad(_NODES + ".nodeSelectorTerms[0].matchExpressions[0].values", _nodes(operator, *values))


def _bad_pods(operator: str, *values: str) -> Bad:
    return Bad(_PODS + "[0].labelSelector.matchExpressions[0].values", _pods(operator, *values))


def _bad_key(field: str, key: str) -> Bad:
    return Bad(_TEMPLATE + field, {_TEMPLATE + field: {"team": "a", key: "a"}}, places=(f"{_TEMPLATE}{field}.{key}",))


def _bad_scheduling_label(key: str) -> Bad:
    field = _SCHEDULING_LABELS
    return Bad(field, {field: {"team": "a", key: "a"}}, places=(f"{field}.{key}",))


def _bad_annotation(key: str, value: str) -> Bad:
    field = _TEMPLATE + "annotations"
    return Bad(field, {field: {"team": "a", key: value}}, places=(f"{field}.{key}",))


_GOOD_KEYS = {"team": "a", f"{_DOMAIN}/{'n' * 63}": "a", "a.b-c_D": "a", "example.com/0": ""}
_BAD_KEYS = ("-team", "te am", "a/b/c", "/team", "example.com/", "n" * 64, f"{_DOMAIN}d/n", "a..b/n")

GOOD: dict[str, list[Mapping[str, object]]] = {
    "Resources.requests": [
        _resources({"cpu": 4, "memory": "16Gi", "ephemeral-storage": "1e3"}, {}),
        _resources({"hugepages-2Mi": "4Mi", "memory": 1}, {"hugepages-2Mi": "4Mi", "hugepages-1Gi": "2Gi"}),
    ],
    "Resources.limits": [_resources({}, {"rdma/hca": 1, f"{'d.' * 121}dd/{'n' * 63}": "2"})],
    "Resources.extendedResources": [
        _resources({"rdma/hca": 1}, {"rdma/hca": "1", "vendor.example/nic": "123456789"}),
        _resources({}, {"rdma/hca": 999999999}),
    ],
    "Resources.requestEqualsLimit": [_resources({"rdma/hca": 1, "cpu": 1}, {"rdma/hca": "1", "cpu": 2})],
    "Resources.cpu": [
        _resources({"cpu": request}, {"cpu": limit})
        for request, limit in (("1100m", "1.1"), (1, "1"), ("999m", 1), ("1e3", 1000), ("+.5", "0.50"), ("1n", "1u"))
    ],
    "Resources.memory": [
        _resources({"memory": request}, {"memory": limit})
        for request, limit in (
            *(("1Gi", "1Gi"), ("1G", "1Gi"), ("1024", "1Ki"), ("1e9", "1G"), ("1E", "1Ei")),
            *((2**53, 2**53 + 1), (str(2**53), 2**53), (2**63 - 1, "16Ei"), ("99e18", "99e18")),
        )
    ],
    "Resources.ephemeral-storage": [_resources({"ephemeral-storage": 1}, {"ephemeral-storage": "1Ki"})],
    "Resources.hugePages": [
        _resources({"cpu": 1}, {"hugepages-2Mi": "2Mi"}),
        _resources({}, {"memory": "1Gi", "hugepages-1Gi": "1Gi"}),
    ],
    "Resources.pageSize": [
        _resources({"cpu": 1}, {"hugepages-2Mi": "4Mi", "hugepages-1Gi": 2**31, "hugepages-64Ki": "64Ki"}),
    ],
    "Pool.gpuResource": [{_POOL + "gpuResource": name} for name in ("amd.com/gpu", "nvidia.com/mig-3g.40gb")],
    "PodOverlay.labelsKeys": [{_TEMPLATE + "labels": _GOOD_KEYS}],
    "Scheduling.labelsKeys": [{_SCHEDULING_LABELS: _GOOD_KEYS}],
    "PodOverlay.annotationsKeys": [{_TEMPLATE + "annotations": {**_GOOD_KEYS, "Example.COM/name": "é" * 4096}}],
    "PodOverlay.nodeSelectorKeys": [{_TEMPLATE + "nodeSelector": _GOOD_KEYS}],
    "PodOverlay.annotationsTaken": [
        {_TEMPLATE + "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "no"}}
    ],
    "PodOverlay.appArmor": [
        {_TEMPLATE + "annotations": {_APPARMOR + "ray": profile}}
        for profile in ("runtime/default", "unconfined", "localhost/mine", "")
    ],
    "LabelSelector.matchLabelsKeys": [
        {_PODS + "[0]": _TERM | {"labelSelector": {"matchLabels": _GOOD_KEYS}}},
        {_PODS + "[0]": _TERM | {"namespaceSelector": {}}},
    ],
    "NodeRequirement.values": [
        _nodes("In", "a", "b"),
        _nodes("NotIn", ""),
        _nodes("Gt", "3"),
        _nodes("Lt", "007"),
        _nodes("Lt", "9" * 18),
        _nodes("Exists"),
        _nodes("DoesNotExist"),
    ],
    "LabelRequirement.values": [_pods("In", "a", "b"), _pods("NotIn", "a"), _pods("Exists"), _pods("DoesNotExist")],
    "Pool.nameNotHead": [{"spec.pools[0].name": "head2"}],
    "Pool.gpusNotInResources": [
        {"spec.pools[0].resources": {"requests": {"cpu": 4, "memory": "16Gi"}, "limits": {"memory": "16Gi"}}}
    ],
    "PodOverlay.labels": [
        {"spec.pools[0].template.labels": {"team": "a", "example.com/rljob.dev": "b", "app.kubernetes.io/name": "c"}}
    ],
    "Scheduling.labels": [{_SCHEDULING_LABELS: {"volcano.sh/queue-name": "a", "kai.scheduler/queue": "b"}}],
    "PodOverlay.annotations": [{"spec.pools[0].template.annotations": {"kueue.x-k8s.io/podset-group-name": "a"}}],
    "Toleration.existsHasNoValue": [
        {_TOLERATIONS: [{"key": "gpu", "operator": "Exists"}]},
        {_TOLERATIONS: [{"key": "gpu", "operator": "Exists", "value": ""}]},
        {_TOLERATIONS: [{"key": "gpu", "value": "a100"}]},
    ],
    "Toleration.equalHasKey": [{_TOLERATIONS: [{"operator": "Exists"}]}],
    "Toleration.secondsOnlyForNoExecute": [
        {_TOLERATIONS: [{"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 30}]}
    ],
}

BAD: dict[str, list[Bad]] = {
    "Resources.requests": [
        _bad(f"requests.{name}", {name: 1, "cpu": 1}, {})
        for name in ("cpuu", "pods", "storage", "CPU", "limits.cpu", "hugepages", "memory ")
    ]
    + [replace(_bad("requests.hugepages-", {"hugepages-": 1, "cpu": 1}, {}), also=("Resources.requestEqualsLimit",))],
    "Resources.limits": [
        _bad(f"limits.{name}", {}, {name: 1}, ".limits")
        for name in (
            *("nvidia", "kubernetes.io/gpu", "x.kubernetes.io/y", "requests.example.com/gpu", "a/b/c", "a_b/c"),
            f"{'d.' * 122}d/n",
        )
    ],
    "Resources.extendedResources": [
        _bad("limits.rdma/hca", {}, {"rdma/hca": count}, "")
        for count in ("1.5", "1k", "500m", "1e3", "1234567890", 12345678901, 10**9)
    ],
    "Resources.requestEqualsLimit": [
        _bad("requests.rdma/hca", {"rdma/hca": 1}, {}),
        _bad("requests.rdma/hca", {"rdma/hca": 1}, {"rdma/hca": 2}),
        _bad("requests.rdma/hca", {"rdma/hca": "3"}, {"rdma/hca": 2}),
        _bad("requests.hugepages-2Mi", {"hugepages-2Mi": "2Mi", "cpu": 1}, {}),
    ],
    "Resources.cpu": [
        _bad("requests.cpu", {"cpu": request}, {"cpu": limit})
        for request, limit in ((2, 1), ("1001m", 1), ("1.1", "1099m"), ("1e1", "9"), ("2u", "1999n"))
    ],
    "Resources.memory": [
        _bad("requests.memory", {"memory": request}, {"memory": limit})
        for request, limit in (
            *(("1Gi", "1G"), (1025, "1Ki"), ("1Ei", "1E"), ("1e10", "1G")),
            *((2**53 + 1, 2**53), (str(2**53 + 1), str(2**53)), (2**53 + 1, str(2**53)), (str(2**53 + 1), 2**53)),
        )
    ],
    "Resources.ephemeral-storage": [
        _bad("requests.ephemeral-storage", {"ephemeral-storage": 2}, {"ephemeral-storage": 1})
    ],
    "Resources.hugePages": [_bad("limits.hugepages-2Mi", {}, {"hugepages-2Mi": "2Mi"}, "")],
    "Resources.pageSize": [
        _bad(f"limits.{name}", {"memory": 1}, {name: amount}, "")
        for name, amount in (("hugepages-2Mi", "3Mi"), ("hugepages-2Mi", 2**21 + 1), ("hugepages-1Gi", "1G"))
    ],
    "Pool.gpuResource": [
        Bad(_POOL + "gpuResource", {_POOL + "gpuResource": name})
        for name in ("kubernetes.io/gpu", "gpu.kubernetes.io/x", "requests.nvidia.com/gpu", f"{'d.' * 122}d/n")
    ],
    "PodOverlay.labelsKeys": [_bad_key("labels", key) for key in (*_BAD_KEYS, "Example.com/n")],
    "Scheduling.labelsKeys": [_bad_scheduling_label(key) for key in (*_BAD_KEYS, "Example.com/n")],
    "PodOverlay.annotationsKeys": [_bad_key("annotations", key) for key in _BAD_KEYS],
    "PodOverlay.nodeSelectorKeys": [_bad_key("nodeSelector", key) for key in _BAD_KEYS],
    "PodOverlay.annotationsTaken": [
        _bad_annotation(key, value)
        for key, value in (
            ("kubernetes.io/config.mirror", "a"),
            ("scheduler.alpha.kubernetes.io/tolerations", "[]"),
            ("controller.kubernetes.io/pod-deletion-cost", "high"),
            ("seccomp.security.alpha.kubernetes.io/pod", "unconfined"),
            ("container.seccomp.security.alpha.kubernetes.io/ray", "unconfined"),
        )
    ],
    "PodOverlay.appArmor": [
        _bad_annotation(_APPARMOR + "other", "runtime/default"),
        _bad_annotation(_APPARMOR + "ray", "mine"),
    ],
    "LabelSelector.matchLabelsKeys": [
        Bad(
            _PODS + "[0].labelSelector.matchLabels",
            {_PODS + "[0]": _TERM | {"labelSelector": {"matchLabels": {"a b": "c"}}}},
            places=(_PODS + "[0].labelSelector.matchLabels.a b",),
        )
    ],
    "NodeRequirement.values": [
        _bad_nodes("In"),
        _bad_nodes("NotIn"),
        _bad_nodes("Gt"),
        _bad_nodes("Lt", "1", "2"),
        _bad_nodes("Gt", "abc"),
        _bad_nodes("Lt", "1.5"),
        _bad_nodes("Gt", ""),
        _bad_nodes("Gt", "9" * 19),
        _bad_nodes("Exists", "a"),
        _bad_nodes("DoesNotExist", "a"),
    ],
    "LabelRequirement.values": [
        _bad_pods("In"),
        _bad_pods("NotIn"),
        _bad_pods("Exists", "a"),
        _bad_pods("DoesNotExist", "a"),
    ],
    "Pool.nameNotHead": [
        Bad("spec.pools[0].name", {"spec.pools[0].name": "head"}),
        Bad("spec.pools[0].name", {"spec.pools[0].name": "headgroup"}),
    ],
    "Pool.gpusNotInResources": [
        Bad("spec.pools[0].resources", {"spec.pools[0].resources.limits": {"nvidia.com/gpu": 2}}),
        Bad(
            "spec.pools[0].resources",
            {"spec.pools[0].gpuResource": "amd.com/gpu", "spec.pools[0].resources.requests": {"amd.com/gpu": "2"}},
            also=("Resources.requestEqualsLimit",),
        ),
    ],
    "PodOverlay.labels": [
        _bad_key("labels", key)
        for key in ("rljob.dev/job", "ray.io/cluster", "kueue.x-k8s.io/queue-name", "app.kubernetes.io/created-by")
    ],
    "Scheduling.labels": [
        _bad_scheduling_label(key)
        for key in ("rljob.dev/pool", "ray.io/group", "kueue.x-k8s.io/queue-name", "app.kubernetes.io/managed-by")
    ],
    "PodOverlay.annotations": [
        _bad_annotation("ray.io/overwrite-container-cmd", "true"),
    ],
    "Toleration.existsHasNoValue": [
        Bad(_TOLERATIONS + "[0].value", {_TOLERATIONS: [{"key": "gpu", "operator": "Exists", "value": "a"}]})
    ],
    "Toleration.equalHasKey": [Bad(_TOLERATIONS + "[0].key", {_TOLERATIONS: [{"effect": "NoSchedule"}]})],
    "Toleration.secondsOnlyForNoExecute": [
        Bad(_TOLERATIONS + "[0].tolerationSeconds", {_TOLERATIONS: [{"key": "gpu", "tolerationSeconds": 30}]})
    ],
}
