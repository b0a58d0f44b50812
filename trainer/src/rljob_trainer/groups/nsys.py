"""Worker processes under NVIDIA Nsight Systems (`nsys`): which nodes lack it, and how Ray starts a process under it."""

from __future__ import annotations

import shlex
import shutil
import sys
import uuid
from collections.abc import Iterable

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rljob_trainer.errors import ResourceError
from rljob_trainer.observability.nsys_profiles import NSYS, launch_command
from rljob_trainer.pools.resource_pool import Slot


def nodes_without_nsys(slots: Iterable[Slot]) -> list[str]:
    """Returns the addresses of the slots' nodes on which nsys is not on the PATH. Raises ResourceError if a node does
    not respond."""
    address_of = {slot.node_id: slot.address for slot in slots}
    find = ray.remote(shutil.which)
    found = {
        node_id: find.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(NSYS)
        for node_id in address_of
    }
    missing = []
    for node_id, path in found.items():
        try:
            if ray.get(path) is None:
                missing.append(address_of[node_id])
        except RayError as error:
            reason = " ".join(str(error).split())
            raise ResourceError(
                f"node {address_of[node_id]}: does not respond ({reason:.200}); check the nodes of the cluster"
            ) from error
    return missing


def new_session() -> str:
    """Returns a name for the nsys session of a process that no other process has."""
    return f"rljob-{uuid.uuid4().hex}"


def under_nsys(session: str) -> dict[str, str]:
    """Returns the runtime environment of a process that Ray starts under nsys. Ray has a plugin for nsys, but it uses
    `nsys profile` (see `nsys_profiles`) and the `python` of the PATH."""
    return {"py_executable": shlex.join([*launch_command(session), sys.executable])}
