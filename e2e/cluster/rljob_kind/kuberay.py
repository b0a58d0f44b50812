"""Installs KubeRay from the manifests of its Go module. `bring_up` also creates the cluster, and skips what exists."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from rljob_kind.cluster import CPU_NODE, NODE_LABEL, ensure_cluster, ensure_tools
from rljob_kind.host import ensure_host
from rljob_kind.images import (
    content_hash,
    ensure_base_image,
    import_image,
    present_or_pulled,
    remove_other_tags,
    remove_stale_scratch,
    scratch_folder,
)
from rljob_kind.loading import load_image
from rljob_kind.node_image import OWN_NODE_IMAGE, ensure_node_image
from rljob_kind.processes import run, succeeds
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder
from rljob_testing.cluster.go_programs import KUBERAY_VERSION, ensure_program, module_folder

NAMESPACE = "kuberay-system"
IMAGE = f"quay.io/kuberay/operator:{KUBERAY_VERSION}"
READY_SECONDS = 180


def bring_up(progress: Progress) -> bool:
    """Creates the cluster with KubeRay and returns whether the cluster was created now.

    Raises KindError or BuildError that says what is missing.
    """
    ensure_host(progress)
    remove_stale_scratch()
    ensure_tools(progress)
    ensure_base_image(progress)
    node_image = ensure_node_image(progress)
    is_new = ensure_cluster(node_image, progress)
    remove_other_tags(OWN_NODE_IMAGE, node_image.tag)
    ensure_kuberay(progress)
    return is_new


def ensure_kuberay(progress: Progress) -> None:
    """Installs KubeRay and waits until its operator is ready. Raises KindError or BuildError."""
    if not present_or_pulled(IMAGE, progress):
        _build_image(progress)
    load_image(IMAGE, CPU_NODE, progress)
    wait = ["kubectl", "--namespace", NAMESPACE, "rollout", "status", "deployment/kuberay-operator"]
    if succeeds([*wait, "--timeout=1s"]):
        return
    with progress.stage("install KubeRay", "30 s"):
        run(["kubectl", "apply", "--server-side", "--force-conflicts", "--filename", "-"], text=_manifests())
        run([*wait, f"--timeout={READY_SECONDS}s"])


def _build_image(progress: Progress) -> None:
    with progress.stage("build the KubeRay operator", "2 min the first time"):
        program = ensure_program("kuberay-operator")
        with scratch_folder("kuberay") as folder:
            shutil.copy2(program, folder / "manager")
            import_image(folder, IMAGE, ["USER 65532:65532", 'ENTRYPOINT ["/manager"]'])


def _manifests() -> str:
    """KubeRay's default installation, changed by `_kustomization`. Cached, because it has four megabytes."""
    kustomization = json.dumps(_kustomization())
    cached = cluster_folder() / f"kuberay-{content_hash([], KUBERAY_VERSION, kustomization)}.yaml"
    if not cached.is_file():
        with scratch_folder("kuberay-manifests") as folder:
            published = module_folder("kuberay-operator") / "config" / "default"
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            (folder / "namespace.json").write_text(json.dumps(namespace))
            (folder / "kustomization.yaml").write_text(kustomization.replace("PUBLISHED", _relative(published, folder)))
            (folder / "rendered").write_text(run(["kubectl", "kustomize", str(folder)]))
            (folder / "rendered").replace(cached)
    return cached.read_text()


def _kustomization() -> dict[str, object]:
    """Puts KubeRay into its own namespace and on the CPU node, speeds up its start, and removes two settings that
    make it restart on a busy machine: the limit of a tenth of a core, and the lease, which a single replica does
    not need."""
    container = "/spec/template/spec/containers/0"
    changes: list[dict[str, object]] = [
        {"op": "remove", "path": f"{container}/resources/limits/cpu"},
        {"op": "add", "path": f"{container}/args/-", "value": "--enable-leader-election=false"},
        {"op": "replace", "path": f"{container}/readinessProbe/initialDelaySeconds", "value": 1},
        {"op": "replace", "path": f"{container}/readinessProbe/periodSeconds", "value": 1},
        {"op": "add", "path": "/spec/template/spec/nodeSelector", "value": {NODE_LABEL: "cpu"}},
    ]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": ["namespace.json", "PUBLISHED"],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(changes)}],
    }


def _relative(path: Path, start: Path) -> str:
    """kustomize does not accept absolute paths."""
    return os.path.relpath(path.resolve(), start.resolve())
