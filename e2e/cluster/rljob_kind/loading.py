"""Brings images of the Docker daemon onto nodes."""

from __future__ import annotations

import json

from rljob_kind.cluster import on_node
from rljob_kind.errors import KindError
from rljob_kind.images import image_id, scratch_folder
from rljob_kind.layering import BaseImage, base_image, layers_on_top, write_archive
from rljob_kind.processes import pipe
from rljob_kind.progress import Progress

ID_LABEL = "rljob.dev/docker-id"


def load_image(tag: str, node: str, progress: Progress, base: str | None = None) -> None:
    """Makes an image of the Docker daemon available to pods on a node; nothing happens if the node has that very image.

    `base` names an image that it was built on and that the node has: then only the layers above are sent, if they can
    be told apart. Raises KindError if the daemon has no such image.
    """
    wanted = image_id(tag)
    if wanted is None:
        raise KindError(f"{tag}: the Docker daemon has no such image; build or pull it first")
    name = full_name(tag)
    if _loaded_id(name, node) == wanted:
        return
    with progress.stage(f"load {tag} on {node}"):
        importing = ["docker", "exec", "--interactive", node, *_CTR, "images", "import", "-"]
        folders = layers_on_top(tag, base) if base is not None else []
        if base is not None and folders:
            with scratch_folder("load") as scratch:
                archive = scratch / "image.tar"
                write_archive(archive, name, tag, _image_on_node(base, node), folders)
                pipe(["cat", str(archive)], importing)
        else:
            pipe(["docker", "save", tag], importing)
        on_node(node, [*_CTR, "images", "label", name, f"{ID_LABEL}={wanted}"])


def remove_other_images(tag: str, node: str) -> None:
    """Removes from a node the images of the tag's repository that have other tags."""
    name = full_name(tag)
    repository = name.rpartition(":")[0]
    names = on_node(node, [*_CTR, "images", "list", "--quiet"]).split()
    others = [other for other in names if other.rpartition(":")[0] == repository and other != name]
    if others:
        on_node(node, [*_CTR, "images", "remove", *others])


def full_name(tag: str) -> str:
    """An image's name with its registry, as containerd writes it: `a/b:1` is `docker.io/a/b:1`."""
    first, _, rest = tag.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return tag
    return f"docker.io/{tag}" if rest else f"docker.io/library/{tag}"


def _image_on_node(tag: str, node: str) -> BaseImage:
    listing = on_node(node, [*_CTR, "images", "list", f"name=={full_name(tag)}"]).splitlines()
    manifest = on_node(node, [*_CTR, "content", "get", listing[1].split()[2]])
    configuration = on_node(node, [*_CTR, "content", "get", json.loads(manifest)["config"]["digest"]])
    return base_image(manifest, configuration)


def _loaded_id(name: str, node: str) -> str | None:
    """The Docker ID of the image that the node has under that name, if it came from here."""
    for line in on_node(node, [*_CTR, "images", "list", f"name=={name}"]).splitlines()[1:]:
        for label in line.split()[-1].split(","):
            key, _, value = label.partition("=")
            if key == ID_LABEL:
                return value
    return None


_CTR = ("ctr", "--namespace", "k8s.io")
