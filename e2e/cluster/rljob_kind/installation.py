"""Builds our images from this checkout, tags them by their content, and installs them with the chart."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_kind.cluster import CPU_NODE, GPU_NODE, NODE_LABEL
from rljob_kind.host import check_free_disk
from rljob_kind.images import build_image, content_hash, image_id, remove_other_tags
from rljob_kind.loading import load_image, remove_other_images
from rljob_kind.processes import run, succeeds
from rljob_kind.progress import Progress
from rljob_kind.settings import repository

NAMESPACE = "rljob-system"
RELEASE = "rljob-operator"
OPERATOR = "rljob-e2e/operator"
TRAINER = "rljob-e2e/trainer"
DEPENDENCIES = "rljob-e2e/trainer-dependencies"
DEPENDENCIES_DISK_GIB = 25.0
"""Docker's image and build cache, and the node's copies, packed and unpacked."""
INSTALL_SECONDS = 180

_BUILD = ("images/with-package-index", "constraints/bootstrap.txt", "constraints/build.txt")
_SHARED = ("crds/pyproject.toml", "crds/src", "cli/pyproject.toml", "cli/src")


@dataclass(frozen=True)
class OwnImages:
    """Tags of the images of this checkout."""

    operator: str
    trainer: str


def ensure_own_images(progress: Progress) -> OwnImages:
    """Builds the operator's and the trainer's image if the Docker daemon does not have them.

    The trainer's dependencies (several GB) are a separate image, so that a change of code only changes a small layer.
    """
    operator = _tag(OPERATOR, "images/operator", "constraints/operator.txt", "operator/pyproject.toml", "operator/src")
    _ensure_image(operator, "operator", progress, {}, expected="2 min the first time")
    dependencies = _hashed(DEPENDENCIES, ["images/trainer", *_BUILD, "constraints/cpu.txt"])
    if image_id(dependencies) is None:
        check_free_disk(DEPENDENCIES_DISK_GIB, "the trainer's image")
    arguments = {"DEVICE": "cpu"}
    expected = "8 min the first time"
    _ensure_image(dependencies, "trainer", progress, arguments, target="dependencies", expected=expected)
    trainer = _tag(TRAINER, "images/trainer", "constraints/cpu.txt", "trainer/pyproject.toml", "trainer/src")
    _ensure_image(trainer, "trainer", progress, arguments | {"DEPENDENCIES": dependencies})
    return OwnImages(operator, trainer)


def install(images: OwnImages, progress: Progress) -> None:
    """Loads the images on the nodes that use them, and installs or upgrades the chart with Helm, with the support of
    Kueue if the cluster has Kueue.

    Raises CommandError if the operator does not become ready.
    """
    load_image(images.operator, CPU_NODE, progress)
    load_image(images.trainer, GPU_NODE, progress)
    with progress.stage("install the chart"):
        _label_namespace()
        _forget_interrupted_install()
        chart = str(repository() / "charts" / "rljob-operator")
        command = ["helm", "upgrade", "--install", RELEASE, chart, "--namespace", NAMESPACE]
        command += ["--set-string", f"image.repository={OPERATOR},image.tag={images.operator.partition(':')[2]}"]
        command += ["--set-string", f"trainer.image={images.trainer}"]
        kueue = "true" if succeeds(["kubectl", "get", "crd", "workloads.kueue.x-k8s.io"]) else "false"
        command += ["--set", f"watchAllNamespaces=true,kueue.enabled={kueue}"]
        node_label = NODE_LABEL.replace(".", r"\.")
        command += ["--set-string", f"nodeSelector.{node_label}=cpu"]
        run([*command, "--wait", f"--timeout={INSTALL_SECONDS}s"])
    for tag, node in ((images.operator, CPU_NODE), (images.trainer, GPU_NODE)):
        remove_other_images(tag, node)


def _label_namespace() -> None:
    """Enforces restricted pods in the operator's namespace, because the operator must run under that rule."""
    manifest = (
        f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}, "
        "labels: {pod-security.kubernetes.io/enforce: restricted}}}"
    )
    run(["kubectl", "apply", "--filename", "-"], text=manifest)


def _forget_interrupted_install() -> None:
    """Deletes Helm's record of a killed operation, after which Helm rejects further ones. Nobody else uses the cluster
    now."""
    listing = run(["helm", "list", "--pending", "--namespace", NAMESPACE, "--short"])
    if RELEASE in listing.split():
        run(["helm", "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait"])


def _tag(name: str, *paths: str) -> str:
    return _hashed(name, [*_BUILD, *_SHARED, *paths])


def _hashed(name: str, paths: list[str]) -> str:
    return f"{name}:{content_hash([repository() / path for path in paths])}"


def _ensure_image(
    tag: str, folder: str, progress: Progress, arguments: dict[str, str], target: str | None = None, expected: str = ""
) -> None:
    if image_id(tag) is None:
        with progress.stage(f"build {tag.partition(':')[0]}", expected):
            dockerfile = repository() / "images" / folder / "Dockerfile"
            build_image(dockerfile, tag, repository(), arguments, target=target)
    remove_other_tags(tag.partition(":")[0], tag)
