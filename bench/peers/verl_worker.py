"""A worker of verl's single controller with the measured methods."""

from __future__ import annotations

import os

import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

from rljob_bench.columns import first_values, new_columns, plus_one, row_sums


class MeasuredWorker(Worker):
    """Takes and returns batches; computes only what `rljob_bench.columns` defines."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        """Does nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        """The process id of this worker."""
        return os.getpid()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read(self, batch: DataProto) -> DataProto:
        """One number per row, from everything in the row."""
        return DataProto.from_dict(tensors={"sums": row_sums(dict(batch.batch.items()))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fresh(self, batch: DataProto) -> DataProto:
        """New columns of the same size."""
        return DataProto.from_dict(tensors=plus_one(dict(batch.batch.items())))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, rows: DataProto) -> DataProto:
        """Columns of `num_bytes`, created on each worker."""
        return _made(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_later(self, rows: DataProto) -> DataProto:
        """The same, but the caller gets a future."""
        return _made(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def first_values(self, batch: DataProto) -> DataProto:
        """One number per row, from its first position."""
        return DataProto.from_dict(tensors={"first": first_values(dict(batch.batch.items()))})


def _made(rows: DataProto) -> DataProto:
    return DataProto.from_dict(tensors=new_columns(rows.meta_info["num_bytes"], len(rows)))
