"""A worker of our worker groups with the measured methods."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from rljob_bench.columns import first_values, new_columns, plus_one, row_sums
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext

ROLE = "measured"


class MeasuredWorker(Worker):
    """Takes and returns batches; computes only what `rljob_bench.columns` defines."""

    @register(Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        """Does nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        """The process id of this worker."""
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def read(self, batch: DataProto) -> DataProto:
        """One number per row, from everything in the row."""
        return DataProto({"sums": row_sums(batch.tensors)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def fresh(self, batch: DataProto) -> DataProto:
        """New columns of the same size."""
        return DataProto(plus_one(batch.tensors))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, rows: DataProto, num_bytes: int) -> DataProto:
        """Columns of `num_bytes`, created on each worker."""
        return DataProto(new_columns(num_bytes, len(rows)))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_later(self, rows: DataProto, num_bytes: int) -> DataProto:
        """The same, but the caller gets a `Pending`."""
        return DataProto(new_columns(num_bytes, len(rows)))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def first_values(self, batch: DataProto) -> DataProto:
        """One number per row, from its first position."""
        return DataProto({"first": first_values(batch.tensors)})


def make_measured(context: WorkerContext, others: Mapping[str, Worker]) -> MeasuredWorker:
    """The factory of the role."""
    del others
    torch.set_num_threads(1)
    return MeasuredWorker(context)
