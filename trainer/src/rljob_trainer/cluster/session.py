"""The connection to Ray: an existing cluster, or one started here and stopped again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rljob_trainer.errors import ResourceError

log = logging.getLogger(__name__)


@contextmanager
def ray_session(address: str | None, num_cpus: int, num_gpus: int) -> Iterator[None]:
    """Connected to the cluster at `address`, or to a local one with so many CPUs and GPUs (logical numbers).

    Raises ResourceError when Ray cannot be reached or started (ports, memory, disk)."""
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = f"at {address}" if address else "on this machine"
        raise ResourceError(
            f"ray: no cluster {where} ({error}); check free memory, disk, ports and RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def num_cluster_gpus() -> int:
    """GPUs (real or declared) of all nodes that are alive."""
    return int(ray.cluster_resources().get("GPU", 0))
