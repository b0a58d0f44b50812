"""This process as the only rank of a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from rljob_trainer.dispatch.worker import WorkerContext


@contextmanager
def only_rank(folder: Path, device_type: str = "cpu") -> Iterator[WorkerContext]:
    """Within it there is a group of one, as workers join it on such devices. `folder` must be empty."""
    context = WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, device_type, 1)
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(context.device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    try:
        yield context
    finally:
        dist.destroy_process_group()
