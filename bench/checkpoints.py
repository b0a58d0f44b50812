"""Saving and loading a checkpoint: RLJob's format against torch's distributed checkpoint (DCP).

    python bench/checkpoints.py [--quick] [--json PATH]

One process saves and loads the same tensors. The floor writes the same bytes to one file with fsync, and reads them
back. With digests it also computes SHA-256 of every tensor, as RLJob does at each save and load; DCP has no digests.
Both sides wait until the files are durable. Both read files that were just written, which are still in the page cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rljob_bench.command_line import read_options
from rljob_bench.machine import installed_versions
from rljob_bench.report import OURS, Bar, Report, of_timings, ratio
from rljob_bench.rounds import interleaved, timed_calls
from rljob_bench.saved_tensors import NUM_TENSORS, Tensors, some_tensors
from rljob_trainer.checkpoints.load import load_into, open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard
from rljob_trainer.checkpoints.sharding import sharded_tensors_from_dtensors

DCP = "DCP"
WRITE, READ = "write and fsync", "read"
WITH_DIGESTS = ", with digests"
MIB = 2**20
MAX_OF_FLOOR = 1.5
"""Maximum time as a multiple of the floor with digests."""


def save_ours(root: Path, tensors: Tensors) -> None:
    """Saves a complete checkpoint: folder, file and manifest."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    folder = begin_save(root, 1, 1, sum(tensor.nbytes for tensor in tensors.values()))
    record = save_shard(folder, 0, sharded_tensors_from_dtensors(tensors.items(), 0))
    commit(root, folder, 1, 1, [record], {})


def load_ours(root: Path, tensors: Tensors) -> None:
    """Loads a checkpoint and compares every digest."""
    [folder] = [path for path in root.iterdir() if path.is_dir()]
    load_into(tensors.items(), open_checkpoint(folder))


def save_dcp(folder: Path, tensors: Tensors) -> None:
    """Saves with fsync, which is DCP's default."""
    shutil.rmtree(folder, ignore_errors=True)
    dcp_save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)


def load_dcp(folder: Path, tensors: Tensors) -> None:
    """Loads in place."""
    dcp_load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)


def write_all(path: Path, tensors: Tensors, with_digests: bool) -> None:
    """Writes one file with as little work as possible."""
    with path.open("wb") as file:
        for tensor in tensors.values():
            data = tensor.numpy().data.cast("B")
            file.write(data)
            if with_digests:
                hashlib.sha256(data).digest()
        file.flush()
        os.fsync(file.fileno())


def read_all(path: Path, tensors: Tensors, with_digests: bool) -> None:
    """Reads the file into the tensors."""
    with path.open("rb") as file:
        for tensor in tensors.values():
            data = tensor.numpy().data.cast("B")
            file.readinto(data)
            if with_digests:
                hashlib.sha256(data).digest()


def checked(load: Callable[[], None], loaded: Tensors, saved: Tensors) -> None:
    """Raises AssertionError unless the loaded tensors equal the saved ones."""
    for tensor in loaded.values():
        tensor.zero_()
    load()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def measure(folder: Path, num_bytes: int, num_rounds: int, report: Report) -> None:
    """Measures saving and loading, one table each."""
    tensors, loaded = some_tensors(num_bytes), some_tensors(num_bytes)
    saves: dict[str, Callable[[], None]] = {
        WRITE: partial(write_all, folder / "plain", tensors, False),
        WRITE + WITH_DIGESTS: partial(write_all, folder / "plain", tensors, True),
        OURS: partial(save_ours, folder / "ours", tensors),
        DCP: partial(save_dcp, folder / "dcp", tensors),
    }
    loads: dict[str, Callable[[], None]] = {
        READ: partial(read_all, folder / "plain", loaded, False),
        READ + WITH_DIGESTS: partial(read_all, folder / "plain", loaded, True),
        OURS: partial(load_ours, folder / "ours", loaded),
        DCP: partial(load_dcp, folder / "dcp", loaded),
    }
    size = f"{num_bytes // MIB:,} MiB in {NUM_TENSORS} tensors"
    timings = interleaved({name: partial(timed_calls, save, 1) for name, save in saves.items()}, num_rounds)
    bar = Bar(
        f"at most {MAX_OF_FLOOR} x {WRITE}{WITH_DIGESTS}", ratio(timings, OURS, WRITE + WITH_DIGESTS), MAX_OF_FLOOR
    )
    report.add(of_timings(f"Save {size}", timings, WRITE, [bar]))
    for load in loads.values():
        checked(load, loaded, tensors)
    timings = interleaved({name: partial(timed_calls, load, 1) for name, load in loads.items()}, num_rounds)
    bar = Bar(f"at most {MAX_OF_FLOOR} x {READ}{WITH_DIGESTS}", ratio(timings, OURS, READ + WITH_DIGESTS), MAX_OF_FLOOR)
    report.add(of_timings(f"Load {size}", timings, READ, [bar]))


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Checkpoints: RLJob's format and torch's distributed checkpoint.")
    torch.set_num_threads(1)
    report = Report("bench/checkpoints.py", installed_versions(("torch",)))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), (8 if options.is_quick else 256) * MIB, 2 if options.is_quick else 8, report)
    report.write(options.json_path)


if __name__ == "__main__":
    main()
