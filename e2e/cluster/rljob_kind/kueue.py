"""Installs Kueue from the chart of its Go module, and creates queues. Kueue lets RayClusters of a queue start when the
queue has free quota.

This is no part of `bring_up`: only the tests and experiments with queues need Kueue.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from ruamel.yaml import YAML

from rljob_kind.cluster import CPU_NODE
from rljob_kind.images import import_image, present_or_pulled, scratch_folder
from rljob_kind.loading import load_image
from rljob_kind.processes import run, succeeds
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, repository
from rljob_testing.cluster.go_programs import KUEUE_VERSION, ensure_program, module_folder

NAMESPACE = "kueue-system"
RELEASE = "kueue"
REPOSITORY = "registry.k8s.io/kueue/kueue"
IMAGE = f"{REPOSITORY}:{KUEUE_VERSION}"
READY_SECONDS = 180
EXAMPLE = "examples/queue.yaml"
"""The queue that the documentation shows."""

_CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    # A single replica needs no lease, which a busy machine may lose.
    "leaderElection": {"leaderElect": False},
    # RayClusters only, and of them only those with a queue or in a namespace that has a queue called `default`.
    "integrations": {"frameworks": ["ray.io/raycluster"]},
    "manageJobsWithoutQueueName": False,
}


def ensure_kueue(progress: Progress) -> None:
    """Installs Kueue with its integration of RayClusters, and waits until it is ready. Raises KindError or
    BuildError."""
    if not present_or_pulled(IMAGE, progress):
        _build_image(progress)
    load_image(IMAGE, CPU_NODE, progress)
    ready = ["kubectl", "--namespace", NAMESPACE, "rollout", "status", "deployment/kueue-controller-manager"]
    if not succeeds([*ready, "--timeout=1s"]):
        with progress.stage("install Kueue", "20 s"):
            chart = module_folder("kueue") / "charts" / "kueue"
            values = cluster_folder() / "kueue-values.json"
            values.write_text(json.dumps(_values()))
            command = ["helm", "upgrade", "--install", RELEASE, str(chart), "--namespace", NAMESPACE]
            run([*command, "--create-namespace", "--values", str(values), "--wait", f"--timeout={READY_SECONDS}s"])
            # On nodes that were built here, the API server gets 404 from this additional API. As long as an API does
            # not respond, the deletion of a namespace hangs in "Terminating" with the condition
            # NamespaceDeletionDiscoveryFailure.
            apis = [f"{version}.visibility.{RELEASE}.x-k8s.io" for version in ("v1beta1", "v1beta2")]
            run(["kubectl", "delete", "apiservice", "--ignore-not-found", *apis])
    _apply(_example("ResourceFlavor"))


def make_queue(name: str, namespace: str, num_gpus: int) -> None:
    """Creates a LocalQueue in a namespace, and a new ClusterQueue with this many GPUs only for it, as in `EXAMPLE`.
    Jobs with a higher priority preempt jobs with a lower one."""
    cluster_queue, local_queue = queue_manifests(name, namespace, num_gpus)
    # Kueue neither evaluates a job that equals one that did not fit earlier nor says anything about it. A new queue has
    # no such memory.
    full_name = cluster_queue["metadata"]["name"]
    run(["kubectl", "delete", "clusterqueue", full_name, "--ignore-not-found", f"--timeout={READY_SECONDS}s"])
    _apply(cluster_queue, local_queue)
    active = ["kubectl", "wait", f"clusterqueue/{full_name}", "--for=condition=Active"]
    run([*active, f"--timeout={READY_SECONDS}s"])


def queue_manifests(name: str, namespace: str, num_gpus: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ClusterQueue and the LocalQueue of `EXAMPLE` with other names and another number of GPUs."""
    # With the setting `quotaCheckStrategy: IgnoreUndeclared` and a queue that covers only GPUs, Kueue 0.19 never admits
    # a RayCluster, whose head requests none.
    cluster_queue, local_queue = _example("ClusterQueue"), _example("LocalQueue")
    cluster_queue["metadata"]["name"] = local_queue["spec"]["clusterQueue"] = f"{namespace}-{name}"
    cluster_queue["spec"]["namespaceSelector"]["matchLabels"] = {"kubernetes.io/metadata.name": namespace}
    local_queue["metadata"] = {"name": name, "namespace": namespace}
    [group] = cluster_queue["spec"]["resourceGroups"]
    [gpus] = [each for each in group["flavors"][0]["resources"] if each["name"] == "nvidia.com/gpu"]
    gpus["nominalQuota"] = str(num_gpus)
    return cluster_queue, local_queue


def make_priorities(**values: int) -> None:
    """Creates WorkloadPriorityClasses with these names and values."""
    example = _example("WorkloadPriorityClass")
    _apply(*({**example, "metadata": {"name": name}, "value": value} for name, value in values.items()))


def _example(kind: str) -> dict[str, Any]:
    """The first object of this kind in `EXAMPLE`."""
    objects = YAML(typ="safe", pure=True).load_all((repository() / EXAMPLE).read_text())
    found: dict[str, Any] = next(each for each in objects if each["kind"] == kind)
    return found


def _apply(*objects: dict[str, Any]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    run(["kubectl", "apply", "--filename", "-"], text=text)


def _values() -> dict[str, object]:
    """Values of the chart: our image, a start as fast as possible, and the CPU node, which has the image."""
    return {
        "controllerManager": {
            "manager": {
                "image": {"repository": REPOSITORY, "tag": KUEUE_VERSION, "pullPolicy": "IfNotPresent"},
                "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
            },
            "readinessProbe": {"initialDelaySeconds": 1, "periodSeconds": 1},
            "nodeSelector": {"rljob.dev/node": "cpu"},
        },
        "managerConfig": {"controllerManagerConfigYaml": json.dumps(_CONFIGURATION)},
    }


def _build_image(progress: Progress) -> None:
    with progress.stage("build Kueue", "5 min the first time"):
        program = ensure_program("kueue")
        with scratch_folder("kueue") as folder:
            shutil.copy2(program, folder / "manager")
            import_image(folder, IMAGE, ["USER 65532:65532", 'ENTRYPOINT ["/manager"]'])
