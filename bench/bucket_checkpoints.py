"""Saving and loading a checkpoint in a bucket, against the library alone (obstore).

    python bench/bucket_checkpoints.py [--quick] [--json PATH]

A real S3 server runs on the same machine and shares its cores, so the numbers show RLJob's own cost, not the speed of a
store. The library uploads the same bytes as one file, with parts of the same size and as many at once. RLJob also
computes SHA-256 of every tensor, compares the size of the file, and writes the manifest. When it loads, it compares
every digest, and reads ranges in parallel.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import partial
from pathlib import Path

import obstore
import torch
from obstore.store import S3Store

from rljob_bench.command_line import read_options
from rljob_bench.machine import installed_versions
from rljob_bench.report import OURS, Bar, Report, of_timings, ratio
from rljob_bench.rounds import Turn, interleaved, timed_calls
from rljob_bench.saved_tensors import NUM_TENSORS, Tensors, some_tensors
from rljob_bucket.bucket import PART_BYTES, UPLOADS_AT_ONCE
from rljob_bucket.paths import BucketPath
from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, s3_server
from rljob_trainer.checkpoints.layout import MANIFEST_FILE, folder_name
from rljob_trainer.checkpoints.load import load_into, open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard
from rljob_trainer.checkpoints.sharding import sharded_tensors_from_dtensors
from rljob_trainer.checkpoints.storage import stored

LIBRARY = "obstore"
FOLDER = folder_name(1, 1)
MIB = 2**20
MAX_OF_LIBRARY = 1.3
"""Maximum time of a save as a multiple of the library's."""


def save_ours(root: BucketPath, tensors: Tensors) -> None:
    """Saves a complete checkpoint: file and manifest."""
    folder = begin_save(root, 1, 1)
    record = save_shard(folder, 0, sharded_tensors_from_dtensors(tensors.items(), 0))
    commit(root, folder, 1, 1, [record], {})


def save_and_remove(root: BucketPath, tensors: Tensors) -> list[float]:
    """The seconds of one save; then the checkpoint is removed, because a step is saved only once."""
    seconds = timed_calls(partial(save_ours, root, tensors), 1)
    stored(root / FOLDER).remove_folder(first=MANIFEST_FILE)
    return seconds


def load_ours(root: BucketPath, tensors: Tensors) -> None:
    """Loads the checkpoint and compares every digest."""
    load_into(tensors.items(), open_checkpoint(root / FOLDER))


def save_library(store: S3Store, tensors: Tensors) -> None:
    """Uploads the tensors as one file."""
    with obstore.open_writer(store, "plain", buffer_size=PART_BYTES, max_concurrency=UPLOADS_AT_ONCE) as file:
        for tensor in tensors.values():
            file.write(tensor.numpy().data.cast("B"))


def load_library(store: S3Store, tensors: Tensors, with_digests: bool) -> None:
    """Reads the file into the tensors, one request per tensor."""
    start = 0
    for tensor in tensors.values():
        data = obstore.get_range(store, "plain", start=start, end=start + tensor.nbytes)
        tensor.numpy().data.cast("B")[:] = memoryview(data)
        if with_digests:
            hashlib.sha256(memoryview(data)).digest()
        start += tensor.nbytes


def measure(server: S3Server, num_bytes: int, num_rounds: int, report: Report) -> None:
    """Measures saving and loading, one table each."""
    tensors, loaded = some_tensors(num_bytes), some_tensors(num_bytes)
    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True},
    )
    root = server.path("ours")
    size = f"{num_bytes // MIB:,} MiB in {NUM_TENSORS} tensors"
    saves: dict[str, Turn] = {
        LIBRARY: partial(timed_calls, partial(save_library, store, tensors), 1),
        OURS: partial(save_and_remove, root, tensors),
    }
    timings = interleaved(saves, num_rounds)
    bar = Bar(f"at most {MAX_OF_LIBRARY} x {LIBRARY}", ratio(timings, OURS, LIBRARY), MAX_OF_LIBRARY)
    report.add(of_timings(f"Save {size}", timings, LIBRARY, [bar]))
    save_ours(root, tensors)
    loads: dict[str, Turn] = {
        LIBRARY: partial(timed_calls, partial(load_library, store, loaded, False), 1),
        f"{LIBRARY}, with digests": partial(timed_calls, partial(load_library, store, loaded, True), 1),
        OURS: partial(timed_calls, partial(load_ours, root, loaded), 1),
    }
    for load in (partial(load_library, store, loaded, False), partial(load_ours, root, loaded)):
        for tensor in loaded.values():
            tensor.zero_()
        load()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    timings = interleaved(loads, num_rounds)
    report.add(of_timings(f"Load {size}", timings, LIBRARY, []))


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Checkpoints in a bucket: RLJob and the library alone.")
    torch.set_num_threads(1)
    report = Report("bench/bucket_checkpoints.py", installed_versions(("obstore", "torch")))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as server, quick_client():
        measure(server, (32 if options.is_quick else 256) * MIB, 2 if options.is_quick else 8, report)
    report.write(options.json_path)


if __name__ == "__main__":
    main()
