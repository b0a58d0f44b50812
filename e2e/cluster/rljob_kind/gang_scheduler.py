"""Installs a second scheduler, which starts the pods of a gang together or not at all (the plugin Coscheduling of
scheduler-plugins), and makes KubeRay use it. Only one experiment needs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml import YAML

from rljob_kind.cluster import CPU_NODE
from rljob_kind.images import import_image, present_or_pulled, scratch_folder
from rljob_kind.kuberay import NAMESPACE as KUBERAY_NAMESPACE
from rljob_kind.loading import load_image
from rljob_kind.processes import run
from rljob_kind.progress import Progress
from rljob_kind.settings import repository
from rljob_testing.cluster.go_programs import SCHEDULER_PLUGINS_VERSION, ensure_program, module_folder

NAMESPACE = "scheduler-plugins"
SCHEDULER = "scheduler-plugins-scheduler"
"""KubeRay writes this name into the pods."""
IMAGE = f"registry.k8s.io/scheduler-plugins/kube-scheduler:{SCHEDULER_PLUGINS_VERSION}"
PROGRAM = "/bin/kube-scheduler"
READY_SECONDS = 180

_CONFIGURATION = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "profiles": [
        {
            "schedulerName": SCHEDULER,
            "plugins": {
                "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
                "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
            },
        }
    ],
}


@contextmanager
def gang_scheduling(progress: Progress) -> Iterator[None]:
    """The scheduler runs, and KubeRay uses it for all RayClusters until the end of the context. Raises KindError or
    BuildError."""
    if not present_or_pulled(IMAGE, progress):
        _build_image(progress)
    load_image(IMAGE, CPU_NODE, progress)
    rollout = ["kubectl", "--namespace", KUBERAY_NAMESPACE, "rollout"]
    with progress.stage("install the gang scheduler"):
        definition = module_folder("gang-scheduler") / "manifests" / "coscheduling" / "crd.yaml"
        run(["kubectl", "apply", "--server-side", "--filename", str(definition)])
        objects = {"apiVersion": "v1", "kind": "List", "items": _objects()}
        run(["kubectl", "apply", "--filename", "-"], text=json.dumps(objects))
        ready = ["kubectl", "--namespace", NAMESPACE, "rollout", "status", f"deployment/{SCHEDULER}"]
        run([*ready, f"--timeout={READY_SECONDS}s"])
        argument = {
            "op": "add",
            "path": "/spec/template/spec/containers/0/args/-",
            "value": "--batch-scheduler=scheduler-plugins",
        }
        patch = ["--type=json", "--patch", json.dumps([argument])]
        run(["kubectl", "--namespace", KUBERAY_NAMESPACE, "patch", "deployment/kuberay-operator", *patch])
        run([*rollout, "status", "deployment/kuberay-operator", f"--timeout={READY_SECONDS}s"])
    try:
        yield
    finally:
        run([*rollout, "undo", "deployment/kuberay-operator"])
        run([*rollout, "status", "deployment/kuberay-operator", f"--timeout={READY_SECONDS}s"])


def _objects() -> list[dict[str, object]]:
    """The scheduler, with all rights because this cluster is only for experiments, and the permission of KubeRay."""
    name, place = {"name": SCHEDULER}, {"name": SCHEDULER, "namespace": NAMESPACE}
    labels = {"app": SCHEDULER}
    pod = {
        "serviceAccountName": SCHEDULER,
        "nodeSelector": {"rljob.dev/node": "cpu"},
        "containers": [
            {
                "name": "scheduler",
                "image": IMAGE,
                # By default a gang that did not fit is retried after 5 minutes, also if GPUs become free earlier: the
                # plugin does not register the deletion of pods as an event that may help.
                "command": [
                    PROGRAM,
                    "--config=/configuration/scheduler.json",
                    "--pod-max-in-unschedulable-pods-duration=10s",
                ],
                "volumeMounts": [{"name": "configuration", "mountPath": "/configuration"}],
            }
        ],
        "volumes": [{"name": "configuration", "configMap": name}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": place},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": place,
            "data": {"scheduler.json": json.dumps(_CONFIGURATION)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": place,
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": name,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", **place}],
        },
        *permission_of_kuberay(),
    ]


def permission_of_kuberay() -> list[dict[str, Any]]:
    """KubeRay's permission to create PodGroups, which its manifests lack, as the documentation shows it."""
    text = (repository() / "examples" / "gang-scheduling.yaml").read_text()
    role, binding = YAML(typ="safe", pure=True).load_all(text)
    [subject] = binding["subjects"]
    subject["namespace"] = KUBERAY_NAMESPACE
    return [role, binding]


def _build_image(progress: Progress) -> None:
    with progress.stage("build the gang scheduler", "3 min the first time"):
        program = ensure_program("gang-scheduler")
        with scratch_folder("gang-scheduler") as folder:
            (folder / "bin").mkdir()
            shutil.copy2(program, folder / PROGRAM.lstrip("/"))
            import_image(folder, IMAGE, ["USER 65532:65532", f'ENTRYPOINT ["{PROGRAM}"]'])
