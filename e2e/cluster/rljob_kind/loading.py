"""Loads images of the Docker daemon on nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rljob_kind.cluster import on_node
from rljob_kind.errors import KindError
from rljob_kind.images import image_id, scratch_folder
from rljob_kind.layering import KnownLayers, known_layers, layer_digests, layer_folders, write_archive
from rljob_kind.processes import pipe
from rljob_kind.progress import Progress

ID_LABEL = "rljob.dev/docker-id"


def load_image(tag: str, node: str, progress: Progress) -> None:
    """Makes an image of the Docker daemon available to pods on a node. Does nothing if the node already has it.

    Layers that the node has from another image are not sent again if possible. Raises KindError if the daemon has no
    such image.
    """
    wanted = image_id(tag)
    if wanted is None:
        raise KindError(f"{tag}: the Docker daemon does not have this image; build or pull it first")
    name = full_name(tag)
    images = _images_on(node)
    if name in images and images[name].docker_id == wanted:
        return
    with progress.stage(f"load {tag.rpartition(':')[0]} on {node}"):
        importing = ["docker", "exec", "--interactive", node, *_CTR, "images", "import", "-"]
        known = _most_known(tag, node, images)
        folders = layer_folders(tag, len(known.layers)) if known.layers else None
        if folders is None:
            pipe(["docker", "save", tag], importing)
        else:
            with scratch_folder("load") as scratch:
                archive = scratch / "image.tar"
                write_archive(archive, name, tag, known, folders)
                pipe(["cat", str(archive)], importing)
        on_node(node, [*_CTR, "images", "label", name, f"{ID_LABEL}={wanted}"])


def remove_other_images(tag: str, node: str) -> None:
    """Removes a node's images of the tag's repository that have other tags, and all images without a name."""
    repository = full_name(tag).rpartition(":")[0]
    images = _images_on(node)
    kept = {name for name in images if name == full_name(tag) or name.rpartition(":")[0] != repository}
    named = {images[name].manifest for name in kept if not _is_unnamed(name)}
    removed = [
        name for name in images if name not in kept or (_is_unnamed(name) and images[name].manifest not in named)
    ]
    if removed:
        on_node(node, [*_CTR, "images", "remove", *removed])


def full_name(tag: str) -> str:
    """An image's name with its registry, as containerd writes it: `a/b:1` is `docker.io/a/b:1`."""
    first, _, rest = tag.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return tag
    return f"docker.io/{tag}" if rest else f"docker.io/library/{tag}"


@dataclass(frozen=True)
class _Image:
    manifest: str
    """Digest of the manifest."""
    docker_id: str | None
    """The Docker daemon's ID of the image, if it came from there."""


def _images_on(node: str) -> dict[str, _Image]:
    """The images on a node, by full name. Kubernetes adds a second name to each, which is a digest."""
    images = {}
    for line in on_node(node, [*_CTR, "images", "list"]).splitlines()[1:]:
        words = line.split()  # name, type, digest, size, unit, platforms, labels
        labels = dict(label.partition("=")[::2] for label in words[-1].split(","))
        images[words[0]] = _Image(words[2], labels.get(ID_LABEL))
    return images


def _is_unnamed(name: str) -> bool:
    return name.startswith("sha256:")


def _most_known(tag: str, node: str, images: dict[str, _Image]) -> KnownLayers:
    """The longest sequence of lowest layers that the image shares with one on the node."""
    digests = layer_digests(tag)
    most = KnownLayers([], [])
    for image in images.values():
        if image.docker_id is None:
            continue  # The layers of another image may be compressed, or incomplete.
        manifest = on_node(node, [*_CTR, "content", "get", image.manifest])
        configuration = on_node(node, [*_CTR, "content", "get", json.loads(manifest)["config"]["digest"]])
        most = max(
            most, known_layers(manifest, configuration).common_with(digests), key=lambda found: len(found.layers)
        )
    return most


_CTR = ("ctr", "--namespace", "k8s.io")
