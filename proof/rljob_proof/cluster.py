"""The kind cluster of the end-to-end tests, for experiments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rljob_kind.cluster import make_namespace
from rljob_kind.installation import ensure_own_images, install
from rljob_kind.kuberay import bring_up
from rljob_kind.locking import cluster_lock
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, kubeconfig_file, program_folder
from rljob_testing.cluster.kubectl import Kubectl


@contextmanager
def ready_cluster(name: str, namespace: str) -> Iterator[tuple[Kubectl, str, Progress]]:
    """Creates the cluster if needed, with our images, our chart and an empty namespace, and keeps it.

    Yields kubectl for the namespace, the trainer's image, and the progress, whose seconds are stored under `name`."""
    progress = Progress(cluster_folder() / "timings" / f"{name}.json")
    with cluster_lock(progress):
        bring_up(progress)
        images = ensure_own_images(progress)
        install(images, progress)
        make_namespace(namespace)
        yield Kubectl(program_folder() / "kubectl", kubeconfig_file(), namespace), images.trainer, progress
