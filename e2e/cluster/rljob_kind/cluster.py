"""The kind cluster: a control plane, a GPU node whose GPUs exist only as numbers, and a node without GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from string import Template

from rljob_kind.host import check_free_disk
from rljob_kind.images import content_hash
from rljob_kind.network import connect_nodes, disable_dns_forwarding
from rljob_kind.node_image import NodeImage
from rljob_kind.processes import run, run_logged, succeeds
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, data_folder, kubeconfig_file, program_folder
from rljob_testing.cluster.go_programs import ensure_program

CLUSTER = "rljob"
GPU_NODE = f"{CLUSTER}-worker"
CPU_NODE = f"{CLUSTER}-worker2"
NODE_LABEL = "rljob.dev/node"
"""Label of the worker nodes: `gpu` or `cpu`."""
NUM_GPUS = 4
READY_SECONDS = 180
CLUSTER_DISK_GIB = 6.0


def ensure_tools(progress: Progress) -> None:
    """Builds kind, kubectl and helm if missing, and puts them first on the PATH of the programs started from here."""
    program_folder().mkdir(parents=True, exist_ok=True)
    with progress.stage("kind, kubectl and helm", "6 min the first time"):
        for name in ("kind", "kubectl", "helm"):
            link = program_folder() / name
            program = ensure_program(name)
            if not link.is_symlink() or link.readlink() != program:
                link.unlink(missing_ok=True)
                link.symlink_to(program)


def ensure_cluster(node_image: NodeImage, progress: Progress) -> bool:
    """Creates the cluster if needed and returns whether it was created now. A running cluster with the same
    configuration is kept."""
    configuration = _configuration(node_image)
    marker = cluster_folder() / "cluster.hash"
    if marker.is_file() and marker.read_text() == content_hash([], configuration) and is_running():
        return False
    delete_cluster(progress)
    check_free_disk(CLUSTER_DISK_GIB, "a cluster")
    _prepare_folders()
    file = cluster_folder() / "kind.yaml"
    file.write_text(configuration)
    with progress.stage("create the cluster", "60 s"):
        command = ["kind", "create", "cluster", "--name", CLUSTER, "--config", str(file)]
        run_logged([*command, "--kubeconfig", str(kubeconfig_file())], cluster_folder() / "logs" / "kind-create.log")
    with progress.stage("nodes ready"):
        if not node_image.is_published:
            connect_nodes(node_names())
            disable_dns_forwarding()
        run(["kubectl", "wait", "node", "--all", "--for=condition=Ready", f"--timeout={READY_SECONDS}s"])
    set_gpus(GPU_NODE, NUM_GPUS)
    marker.write_text(content_hash([], configuration))
    return True


def is_running() -> bool:
    """Whether every node runs and the API server responds."""
    command = ["docker", "ps", "--quiet", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}"]
    if len(run(command).split()) != 3:
        return False
    return succeeds(["kubectl", "get", "--raw", "/readyz"], timeout_seconds=30)


def delete_cluster(progress: Progress) -> None:
    """Deletes the cluster and the remains of its nodes. Does nothing if there is none."""
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}"]
    (cluster_folder() / "cluster.hash").unlink(missing_ok=True)
    if not run(command).strip():
        return
    with progress.stage("delete the cluster"):
        run(["kind", "delete", "cluster", "--name", CLUSTER, "--kubeconfig", str(kubeconfig_file())])


def node_names() -> list[str]:
    """The names of the cluster's nodes, which are also the names of their containers."""
    return run(["kubectl", "get", "nodes", "--output", "jsonpath={.items[*].metadata.name}"]).split()


def set_gpus(node: str, num_gpus: int) -> None:
    """Gives a node GPUs that only the scheduler and Ray count."""
    counted = f'{{"nvidia.com/gpu":"{num_gpus}"}}'
    patch = f'{{"status":{{"capacity":{counted},"allocatable":{counted}}}}}'
    run(["kubectl", "patch", "node", node, "--subresource=status", "--type=merge", "--patch", patch])


def on_node(node: str, command: Sequence[str], text: str | None = None) -> str:
    """Runs a program as root inside a node and returns what it prints."""
    return run(["docker", "exec", "--interactive", node, *command], text=text)


def audit_log() -> Path:
    """The API server's audit log, one JSON object per line. It starts when the cluster is created."""
    return cluster_folder() / "audit" / "requests.jsonl"


def make_volume(name: str, namespace: str) -> Path:
    """Creates a claim with this name for an empty ReadWriteMany volume, in a namespace that does not have it yet.

    Returns the volume's folder on this machine, which is mounted into every node.
    """
    volume = f"{namespace}-{name}"
    run(["kubectl", "delete", "persistentvolume", volume, "--ignore-not-found"])
    folder = f"/var/shared/{volume}"
    on_node(CPU_NODE, ["sh", "-c", f"rm -rf {folder} && mkdir {folder} && chmod 0777 {folder}"])
    template = Template((data_folder() / "volume.yaml").read_text())
    run(["kubectl", "apply", "--filename", "-"], text=template.safe_substitute(NAME=name, NAMESPACE=namespace))
    bound = ["kubectl", "--namespace", namespace, "wait", f"persistentvolumeclaim/{name}"]
    run([*bound, "--for=jsonpath={.status.phase}=Bound", f"--timeout={READY_SECONDS}s"])
    return cluster_folder() / "shared" / volume


def make_namespace(name: str) -> None:
    """Creates an empty namespace that admits only restricted pods and schedules them on the GPU node, which has the
    trainer's image. An existing namespace with this name is deleted first, with everything in it."""
    run(["kubectl", "delete", "namespace", name, "--ignore-not-found", f"--timeout={READY_SECONDS}s"])
    template = Template((data_folder() / "namespace.yaml").read_text())
    run(["kubectl", "apply", "--filename", "-"], text=template.safe_substitute(NAME=name))


def _configuration(node_image: NodeImage) -> str:
    template = Template((data_folder() / "kind.yaml").read_text())
    without_cni = "false" if node_image.is_published else "true"
    text = template.safe_substitute(IMAGE=node_image.tag, WITHOUT_CNI=without_cni, FOLDER=str(cluster_folder()))
    # The published image has its own images in that folder, and does not clean up after an earlier cluster.
    if node_image.is_published:
        text = "".join(line for line in text.splitlines(keepends=True) if "/var/lib/containerd" not in line)
    return text


def _prepare_folders() -> None:
    """Creates the folders that are mounted into nodes. Images from an earlier cluster are kept, its logs are
    deleted."""
    images = [f"containerd/{name}" for name in ("control-plane", "gpu", "cpu")]
    for name in ("audit", "audit-policy", "shared", *images):
        (cluster_folder() / name).mkdir(parents=True, exist_ok=True)
    for log in (cluster_folder() / "audit").iterdir():
        log.unlink()
    shutil.copy2(data_folder() / "audit-policy.yaml", cluster_folder() / "audit-policy" / "policy.yaml")
