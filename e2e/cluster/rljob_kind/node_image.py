"""The image of the cluster's nodes: the published one if it can be pulled, otherwise one built from Go and Debian."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from rljob_kind.images import (
    build_image,
    content_hash,
    image_id,
    import_image,
    present_or_pulled,
    scratch_folder,
)
from rljob_kind.processes import run
from rljob_kind.progress import Progress
from rljob_kind.settings import data_folder
from rljob_testing.cluster.go_programs import KUBERNETES_VERSION, PROGRAMS, ensure_local_program, ensure_program

OWN_NODE_IMAGE = "rljob-kind/node"
PUBLISHED_NODE_IMAGE = "kindest/node:v1.34.3"
CONTROL_PLANE_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_PROGRAMS = ("kubelet", "kubeadm", "kubectl")
PROGRAMS_IN_IMAGE = (*NODE_PROGRAMS, *CONTROL_PLANE_PROGRAMS, "kube-proxy", "coredns")


@dataclass(frozen=True)
class NodeImage:
    """The image of the nodes. A published image contains a pod network and DNS, ours does not."""

    tag: str
    is_published: bool


def ensure_node_image(progress: Progress) -> NodeImage:
    """Pulls or builds the node image if it is missing. Raises KindError or BuildError if both fail."""
    tag = f"{OWN_NODE_IMAGE}:{KUBERNETES_VERSION}-{_recipe_hash()}"
    if image_id(tag) is not None:
        return NodeImage(tag, is_published=False)
    if present_or_pulled(PUBLISHED_NODE_IMAGE, progress):
        return NodeImage(PUBLISHED_NODE_IMAGE, is_published=True)
    programs = _programs(progress)
    with progress.stage("build the node image", "about 60 s"):
        _build(tag, programs)
    return NodeImage(tag, is_published=False)


def _programs(progress: Progress) -> dict[str, Path]:
    """Builds every program of a node that is not in the cache."""
    with progress.stage("programs of Kubernetes", "12 min the first time"):
        found = {name: ensure_program(name) for name in PROGRAMS_IN_IMAGE}
        found["pause"] = ensure_local_program("pause", _pause_source())
    return found


def _recipe_hash() -> str:
    """A hash of all inputs of the image."""
    data = data_folder()
    recipes = [PROGRAMS[name].recipe() for name in PROGRAMS_IN_IMAGE]
    return content_hash([data / "node", data / "kube-proxy", _pause_source()], *recipes)


def _pause_source() -> Path:
    return data_folder() / "pause" / "main.go"


def _build(tag: str, programs: dict[str, Path]) -> None:
    components = _component_images(programs["kubeadm"])
    for name in (*CONTROL_PLANE_PROGRAMS, "coredns", "pause"):
        _import_program(programs[name], components[name])
    with scratch_folder("kube-proxy") as context:
        shutil.copy2(programs["kube-proxy"], context / "kube-proxy")
        build_image(data_folder() / "kube-proxy" / "Dockerfile", components["kube-proxy"], context)
    with scratch_folder("node") as context:
        shutil.copytree(data_folder() / "node", context / "files")
        (context / "programs").mkdir()
        for name in NODE_PROGRAMS:
            shutil.copy2(programs[name], context / "programs" / name)
        (context / "images").mkdir()
        _save(context / "images" / "control-plane.tar", [components[name] for name in CONTROL_PLANE_PROGRAMS])
        _save(context / "images" / "every-node.tar", [components[name] for name in ("pause", "coredns", "kube-proxy")])
        arguments = {"KUBERNETES_VERSION": KUBERNETES_VERSION, "PAUSE_IMAGE": components["pause"]}
        build_image(context / "files" / "Dockerfile", tag, context, arguments)
    run(["docker", "image", "rm", *components.values()])


def _component_images(kubeadm: Path) -> dict[str, str]:
    """The image names in kubeadm's manifests, by their last part without the tag, such as `etcd`."""
    listing = run([str(kubeadm), "config", "images", "list", "--kubernetes-version", KUBERNETES_VERSION])
    return {line.split("/")[-1].split(":")[0]: line for line in listing.split()}


def _import_program(program: Path, tag: str) -> None:
    """Creates an image of one static program, which is on PATH for kubeadm's manifests and is the entry point for the
    others."""
    with scratch_folder("component") as folder:
        shutil.copy2(program, folder / program.name)
        import_image(folder, tag, ["ENV PATH=/", f'ENTRYPOINT ["/{program.name}"]'])


def _save(archive: Path, tags: list[str]) -> None:
    """Writes images into an archive, and next to it the record by which a node knows whether it has them already."""
    run(["docker", "save", "--output", str(archive), *tags])
    archive.with_suffix(".hash").write_text("\n".join(f"{tag} {image_id(tag)}" for tag in tags) + "\n")
