"""A program that prints the stack traces of a run's processes on all other nodes of the Ray cluster. `pod.dump_stacks`
starts it as `python -m rljob_trainer.groups.stacks_of_nodes RUN_FOLDER`.

It prints JSON lines: first `{"nodes": [...]}` with the addresses of the other living nodes; then a line for each of
them as soon as the node responds, `{"node": address, "processes": [...]}`, or fails, `{"node": address, "reason":
text}`. It has no timeout: the caller kills it if it takes too long."""

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
    """Prints the stack traces and returns 0. If Ray does not respond, raises Ray's error, which ends the program."""
    run_folder = Path(sys.argv[1])
    # `auto` finds the cluster of the Ray job that has started this program; if a person has started it, the cluster of
    # this node.
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    own_id = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"]: node for node in ray.nodes() if node["NodeID"] != own_id}
    alive = {node_id: str(node["NodeManagerAddress"]) for node_id, node in others.items() if node["Alive"]}
    _print({"nodes": sorted(alive.values())})
    task = ray.remote(stacks_here)
    address_of_task: dict[ray.ObjectRef, str] = {}
    for node_id, address in alive.items():
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        started = task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node).remote(run_folder)
        address_of_task[started] = address
    while address_of_task:
        [ready], _ = ray.wait(list(address_of_task), num_returns=1)
        address = address_of_task.pop(ready)
        try:
            _print({"node": address, "processes": ray.get(ready)})
        except RayError as error:
            _print({"node": address, "reason": " ".join(str(error).split())[:500]})
    return 0


def _print(line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
