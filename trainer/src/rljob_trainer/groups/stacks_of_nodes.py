"""Collects the stacks of a run's processes from all other nodes of the Ray cluster. `pod.dump_stacks` starts it as
`python -m rljob_trainer.groups.stacks_of_nodes RUN_FOLDER`.

Prints JSON lines: first `{"nodes": [...]}` with the addresses of the nodes, then one line per node when it responds:
`{"node": address, "processes": [...]}` or `{"node": address, "reason": text}`. It has no timeout; the caller kills it.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rljob_trainer.pod.dump_stacks import stacks_here


def main() -> int:
    """Returns 0 if Ray responds."""
    run_folder = Path(sys.argv[1])
    # `auto` finds the cluster of the Ray job to which this program belongs; if it is started by hand, that of this
    # node.
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    own = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"]: node for node in ray.nodes() if node["NodeID"] != own}
    alive = {identity: str(node["NodeManagerAddress"]) for identity, node in others.items() if node["Alive"]}
    _print({"nodes": sorted(alive.values())})
    task = ray.remote(stacks_here)
    asked: dict[ray.ObjectRef, str] = {}
    for identity, address in alive.items():
        there = NodeAffinitySchedulingStrategy(identity, soft=False)
        asked[task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(run_folder)] = address
    while asked:
        [ready], _ = ray.wait(list(asked), num_returns=1)
        address = asked.pop(ready)
        try:
            _print({"node": address, "processes": ray.get(ready)})
        except RayError as error:
            _print({"node": address, "reason": " ".join(str(error).split())[:500]})
    return 0


def _print(line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
