"""The whole way to a cluster with KubeRay. Nothing is repeated that is there already."""

from __future__ import annotations

from rljob_kind.cluster import ensure_cluster, ensure_tools
from rljob_kind.host import ensure_host
from rljob_kind.images import ensure_base_image, remove_other_tags, remove_stale_scratch
from rljob_kind.kuberay import ensure_kuberay
from rljob_kind.node_image import OWN_NODE_IMAGE, ensure_node_image
from rljob_kind.progress import Progress


def bring_up(progress: Progress) -> bool:
    """Makes the cluster run, with KubeRay in it; returns whether it was made now.

    Raises KindError or BuildError, saying what is missing.
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
