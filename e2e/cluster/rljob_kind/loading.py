"""Brings images of the Docker daemon onto nodes."""

from __future__ import annotations

from rljob_kind.cluster import on_node
from rljob_kind.errors import KindError
from rljob_kind.images import image_id
from rljob_kind.processes import pipe
from rljob_kind.progress import Progress

ID_LABEL = "rljob.dev/docker-id"


def load_image(tag: str, node: str, progress: Progress) -> None:
    """Makes an image of the Docker daemon available to pods on a node; nothing happens if the node has that very image.

    Raises KindError if the daemon has no such image.
    """
    wanted = image_id(tag)
    if wanted is None:
        raise KindError(f"{tag}: the Docker daemon has no such image; build or pull it first")
    name = full_name(tag)
    if _loaded_id(name, node) == wanted:
        return
    with progress.stage(f"load {tag} on {node}"):
        importing = ["docker", "exec", "--interactive", node, *_CTR, "images", "import", "-"]
        pipe(["docker", "save", tag], importing)
        on_node(node, [*_CTR, "images", "label", name, f"{ID_LABEL}={wanted}"])


def full_name(tag: str) -> str:
    """An image's name with its registry, as containerd writes it: `a/b:1` is `docker.io/a/b:1`."""
    first, _, rest = tag.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return tag
    return f"docker.io/{tag}" if rest else f"docker.io/library/{tag}"


def _loaded_id(name: str, node: str) -> str | None:
    """The Docker ID of the image that the node has under that name, if it came from here."""
    for line in on_node(node, [*_CTR, "images", "list", f"name=={name}"]).splitlines()[1:]:
        for label in line.split()[-1].split(","):
            key, _, value = label.partition("=")
            if key == ID_LABEL:
                return value
    return None


_CTR = ("ctr", "--namespace", "k8s.io")
