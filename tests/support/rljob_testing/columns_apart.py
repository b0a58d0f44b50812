"""Runs in which every column is an object of its own in the store, as if it had a mebibyte and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from rljob_trainer.controller import model_roles
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.groups import object_store
from rljob_trainer.workers.factories import make_hybrid

ANY_COLUMN = 1
"""Bytes from which columns are taken for large ones."""


def hybrid_of_columns_apart(
    dtype: torch.dtype, seed: int, context: WorkerContext, others: Mapping[str, Worker]
) -> Worker:
    """In place of `make_hybrid`, in a process of all roles: its results are stored column by column."""
    object_store.LARGE_COLUMN_BYTES = ANY_COLUMN
    return make_hybrid(dtype, seed, context, others)


@contextmanager
def columns_apart() -> Iterator[None]:
    """Within it, of runs of this process: what the controller stores, and what its workers do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "LARGE_COLUMN_BYTES", ANY_COLUMN)
        patch.setattr(model_roles, "make_hybrid", hybrid_of_columns_apart)
        yield
