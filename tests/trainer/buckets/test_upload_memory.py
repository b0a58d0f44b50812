"""The upload of a checkpoint needs no memory beside the copies from which it is written, so `rljob plan` counts only
these copies. The library sends parts from the tensors' own memory; if it copied them, up to nine parts of 16 MiB would
be needed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rljob_bucket import bucket
from rljob_bucket.paths import BucketPath
from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import FaultProxy, Request
from rljob_testing.buckets.s3_server import S3Server
from rljob_testing.training import gloo_ranks
from rljob_trainer.checkpoints.save import save_shard
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.dispatch.worker import WorkerContext

NUM_TENSORS, TENSOR_BYTES = 6, 10 * 2**20
NUM_PARTS = -(-NUM_TENSORS * TENSOR_BYTES // bucket.PART_BYTES)
MAX_BYTES = 12 * 2**20
"""Less than one part."""


def upload(folder: BucketPath, _: WorkerContext) -> int:
    """Saves a shard. Returns by how many bytes the process's memory grew at most."""
    small, large = (
        [ShardedTensor(f"weight.{number}", torch.ones(size // 4), (size // 4,), (0,)) for number in range(NUM_TENSORS)]
        for size in (16, TENSOR_BYTES)
    )
    with quick_client():
        # The first upload starts the library's threads.
        save_shard(folder / "first", 0, small)
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        save_shard(folder / "second", 0, large)
        return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """A size in this process's status. `VmHWM`, the peak, counts from the last write of 5 into `clear_refs`."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_an_upload_needs_no_copy_of_its_own(server: S3Server, proxy: FaultProxy) -> None:
    # No part is answered before all of them are on their way.
    barrier = threading.Barrier(NUM_PARTS)

    def hold_parts(request: Request) -> Callable[[bool], None] | None:
        return (lambda is_after: [is_after and barrier.wait(20)].clear()) if request.kind == "PUT part" else None

    proxy.choose = hold_parts
    folder = server.path("memory", proxy.endpoint)
    [[grown]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(upload, folder), 1)])
    assert isinstance(grown, int)
    assert [request.kind for request in proxy.requests].count("PUT part") == NUM_PARTS
    assert grown < MAX_BYTES, f"{grown:,} bytes"
