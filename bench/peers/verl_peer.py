"""verl 0.9.1 as the peer of the benchmarks. `rljob_bench.peer_process` starts it in an environment that has verl."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata

import ray
import torch
from ray.util.placement_group import remove_placement_group

from rljob_bench.columns import NUM_ROWS, Columns, check_plus_one, check_sums, new_columns
from rljob_bench.memory import peak_growth_bytes
from rljob_bench.processes import wait_until_gone
from rljob_bench.rounds import timed_calls
from rljob_bench.token_case import TokenCase

NUMPY_VARIABLE = "VERL_DATAPROTO_SERIALIZATION_METHOD"
VERSIONS = ("verl", "tensordict", "transformers")


class Peer:
    """The requests that the peer handles: each method without an underscore, with the request's details as
    arguments."""

    def __init__(self) -> None:
        self._group = None
        self._pool = None
        self._process_ids: list[int] = []
        self._sent: tuple[int, Columns] = (0, {})
        self._tokens = None

    def versions(self) -> dict:
        return {name: metadata.version(name) for name in VERSIONS}

    def connect(self, address: str) -> dict:
        """Connects to a running Ray cluster and passes on the environment variables that worker processes need."""
        names = ("PYTHONPATH", "OMP_NUM_THREADS", NUMPY_VARIABLE)
        variables = {name: os.environ[name] for name in names if name in os.environ}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": variables})
        # Imported here, so that the import does not count as start time of the workers.
        import verl.single_controller.ray  # noqa: F401

        import peers.verl_worker  # noqa: F401

        torch.set_num_threads(1)
        return {}

    def start(self, num_workers: int) -> dict:
        """Starts a pool and a worker group on it. Returns the seconds until every worker has responded to a call."""
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from peers.verl_worker import MeasuredWorker

        begin = time.perf_counter()
        self._pool = RayResourcePool([num_workers], use_gpu=False, max_colocate_count=1)
        self._group = RayWorkerGroup(self._pool, RayClassWithInitArgs(ray.remote(MeasuredWorker)))
        self._group.empty()
        seconds = [time.perf_counter() - begin]
        self._process_ids = self._group.process_id()
        return {"seconds": seconds}

    def stop(self) -> dict:
        """Ends the workers and waits until their processes have ended."""
        if self._group is not None:
            for worker in self._group.workers:
                ray.kill(worker)
            wait_until_gone(self._process_ids)
            for group in self._pool.get_placement_groups():
                remove_placement_group(group)
        self._group = self._pool = None
        return {}

    def disconnect(self) -> dict:
        """Ends the remaining workers and the connection."""
        self.stop()
        ray.shutdown()
        return {}

    def check(self, num_bytes: int) -> dict:
        """Raises AssertionError unless the workers compute correct results."""
        sent, batch = self._batch(num_bytes)
        check_sums(self._group.read(batch).batch["sums"], sent)
        check_plus_one(dict(self._group.fresh(batch).batch.items()), sent)
        rows = self._rows(num_bytes)
        for made in (self._group.make(rows), self._group.make_later(rows)):
            assert len(self._group.first_values(made)) == NUM_ROWS
        return {}

    def measure(self, operation: str, num_calls: int, num_bytes: int = 0) -> dict:
        """The seconds of each call of an operation."""
        return {"seconds": timed_calls(self._operation(operation, num_bytes), num_calls)}

    def memory(self, operation: str, num_calls: int, num_bytes: int) -> dict:
        """Maximum memory growth of this process while it passes data between workers."""
        rows = self._rows(num_bytes)
        make = self._group.make if operation == "pass_on" else self._group.make_later

        def work() -> None:
            for _ in range(num_calls):
                self._group.first_values(make(rows))

        self._group.first_values(make(self._rows(NUM_ROWS * 16)))
        return {"bytes": peak_growth_bytes(work)}

    def balance(self, lengths: list, num_partitions: int, num_calls: int) -> dict:
        """Seconds of the calls, and the partitions of the last call."""
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

        partitions: list = []

        def call() -> None:
            partitions[:] = get_seqlen_balanced_partitions(lengths, num_partitions, equal_size=True)

        return {"seconds": timed_calls(call, num_calls), "partitions": partitions}

    def algorithm(self, operation: str, case: dict, num_calls: int) -> dict:
        """Seconds of the calls of a loss or an advantage, and its result."""
        from peers.verl_algorithms import Tokens

        if self._tokens is None or self._tokens[0] != case:
            torch.set_num_threads(1)
            self._tokens = (case, Tokens(TokenCase(**case)))
        tokens = self._tokens[1]
        seconds = timed_calls(tokens.call(operation), num_calls)
        return {"seconds": seconds, "outcome": asdict(tokens.outcome(operation))}

    def _operation(self, operation: str, num_bytes: int) -> Callable[[], object]:
        group = self._group
        if operation == "empty":
            return group.empty
        if operation in ("pass_on", "pass_on_future"):
            made = (group.make if operation == "pass_on" else group.make_later)(self._rows(num_bytes))
            if operation == "pass_on_future":
                ray.wait(made.futures, num_returns=len(made.futures), fetch_local=False)
            return lambda: group.first_values(made)
        _, batch = self._batch(num_bytes)
        return lambda: {"read": group.read, "fresh": group.fresh}[operation](batch)

    def _batch(self, num_bytes: int) -> tuple:
        from verl import DataProto

        if self._sent[0] != num_bytes:
            self._sent = (num_bytes, new_columns(num_bytes))
        return self._sent[1], DataProto.from_dict(tensors=self._sent[1])

    def _rows(self, num_bytes: int) -> object:
        from verl import DataProto

        share = num_bytes // self._group.world_size
        return DataProto.from_dict(tensors={"row": torch.arange(NUM_ROWS)}, meta_info={"num_bytes": share})


def main() -> None:
    """Handles requests until there are no more."""
    # The output of libraries goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer()
    for line in sys.stdin:
        details = json.loads(line)
        try:
            answer = getattr(peer, details.pop("request"))(**details)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
