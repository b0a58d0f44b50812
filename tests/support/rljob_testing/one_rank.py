"""This process as the only rank of a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rljob_trainer.dispatch.worker import WorkerContext


@contextmanager
def only_rank(folder: Path) -> Iterator[WorkerContext]:
    """Within it there is a gloo group of one. `folder` must be empty."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    try:
        yield WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, "cpu", 1)
    finally:
        dist.destroy_process_group()
