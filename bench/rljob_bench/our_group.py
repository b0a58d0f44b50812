"""Our worker groups as a contender."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch

from rljob_bench.columns import NUM_ROWS, Columns, check_plus_one, check_sums, new_columns
from rljob_bench.memory import peak_growth_bytes
from rljob_bench.our_worker import ROLE, MeasuredWorker, make_measured
from rljob_bench.peer_process import python_path
from rljob_bench.processes import wait_until_gone
from rljob_bench.rounds import timed_calls
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_group import spawn
from rljob_trainer.groups.worker_processes import BuildSettings, start_processes
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool
from rljob_trainer.settings import worker_environment

CPUS_PER_WORKER = 0.1
"""Only for Ray's bookkeeping."""


class OurGroup:
    """A pool, its processes, and the group of their only role. End it with `close`."""

    def __init__(self, num_workers: int) -> None:
        begin = time.perf_counter()
        self._num_workers = num_workers
        self._pool = ResourcePool(PoolSettings("bench", 1, num_workers, False, CPUS_PER_WORKER, 120))
        environment = {**worker_environment("cpu", 1), "PYTHONPATH": python_path()}
        self._processes = start_processes(self._pool, environment)
        self._processes.build(
            self._pool.slots(), BuildSettings("cpu", 1, None), [RoleSpec(ROLE, MeasuredWorker, make_measured)]
        )
        self._group = spawn(self._processes)[ROLE]
        self.call("empty")
        self.start_seconds = time.perf_counter() - begin
        """Seconds until every worker had responded to a call."""
        self._process_ids = cast(list[int], self.call("process_id"))
        self._sent: tuple[int, Columns] = (0, {})

    def close(self) -> None:
        """Ends the workers and waits until their processes have ended."""
        self._processes.close()
        wait_until_gone(self._process_ids)
        self._pool.release()

    def call(self, method: str, *arguments: object) -> object:
        """Calls a method of the group."""
        bound = cast(Callable[..., object], vars(self._group)[method])
        return bound(*arguments)

    def batch_of(self, method: str, *arguments: object) -> DataProto:
        """Calls a method of the group that returns a batch."""
        return cast(DataProto, self.call(method, *arguments))

    def check(self, num_bytes: int) -> None:
        """Raises AssertionError unless the workers compute correct results."""
        sent, batch = self._batch(num_bytes)
        check_sums(self.batch_of("read", batch)["sums"], sent)
        check_plus_one(self.batch_of("fresh", batch).fetched().tensors, sent)
        expected = (torch.arange(NUM_ROWS) % (NUM_ROWS // self._num_workers) % 8).to(torch.float32)
        for made in (self._made(num_bytes), self._made_later(num_bytes)):
            assert torch.equal(self.batch_of("first_values", made)["first"], expected)

    def measure(self, operation: str, num_calls: int, num_bytes: int = 0) -> list[float]:
        """The seconds of each call of an operation."""
        return timed_calls(self._operation(operation, num_bytes), num_calls)

    def memory(self, operation: str, num_calls: int, num_bytes: int) -> int:
        """Maximum memory growth of this process while it passes data between workers."""
        make = self._made if operation == "pass_on" else self._made_later

        def work() -> None:
            for _ in range(num_calls):
                self.batch_of("first_values", make(num_bytes))

        self.batch_of("first_values", make(NUM_ROWS * 16))
        return peak_growth_bytes(work)

    def _operation(self, operation: str, num_bytes: int) -> Callable[[], object]:
        if operation == "empty":
            return lambda: self.call("empty")
        if operation == "pass_on":
            batch = self._made(num_bytes)
            return lambda: self.batch_of("first_values", batch)
        if operation == "pass_on_pending":
            pending = self._made_later(num_bytes)
            pending.result()
            return lambda: self.batch_of("first_values", pending)
        _, sent = self._batch(num_bytes)
        if operation == "read":
            return lambda: self.batch_of("read", sent)
        return lambda: self.batch_of("fresh", sent).fetched()

    def _batch(self, num_bytes: int) -> tuple[Columns, DataProto]:
        if self._sent[0] != num_bytes:
            self._sent = (num_bytes, new_columns(num_bytes))
        return self._sent[1], DataProto(self._sent[1])

    def _made(self, num_bytes: int) -> DataProto:
        return self.batch_of("make", self._rows(), num_bytes // self._num_workers)

    def _made_later(self, num_bytes: int) -> Pending[DataProto]:
        return cast("Pending[DataProto]", self.call("make_later", self._rows(), num_bytes // self._num_workers))

    def _rows(self) -> DataProto:
        return DataProto({"row": torch.arange(NUM_ROWS)})
