"""Saving: every rank writes its file, then the controller writes the manifest, which makes the files a checkpoint.

`begin_save` (controller) -> `save_shard` or `save_shard_async` (each rank) -> `commit` (controller). Before the commit
nothing refers to the files; after it they are durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import JsonValue

from rljob_api.constants import CONTRACT_VERSION
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.fencing import refuse_if_fenced, timestamp_now
from rljob_trainer.checkpoints.layout import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    Piece,
    ShardRecord,
    TensorEntry,
    folder_name,
    is_committed,
    seal,
    shard_file_name,
    status_of,
)
from rljob_trainer.checkpoints.merging import merge_tensors
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.checkpoints.storage import Location, storage_errors, stored
from rljob_trainer.checkpoints.tensor_file import (
    WrittenFile,
    check_tensor_files,
    dtype_name,
    num_tensor_bytes,
    write_tensor_file,
)


def begin_save(root: Location, step: int, start_number: int, num_bytes: int = 0) -> Location:
    """Creates the folder of a new checkpoint; only called by the controller.

    `num_bytes` is the sum of `num_shard_bytes` over the ranks. It is compared with the free space before anything is
    written; 0 skips this check. The new checkpoint needs this space in addition to all existing ones, because old ones
    are removed later.

    Raises FencedError, and CheckpointError if there is too little space or if the step is already saved.
    """
    refuse_if_fenced(root, start_number)
    folder = root / folder_name(step, start_number)
    if is_committed(folder):
        raise CheckpointError(f"{folder}: step {step} is already saved; do not save a step twice in one start")
    with storage_errors(folder, "creating the checkpoint's folder", num_bytes):
        free = stored(root).free_bytes()
        if free is not None and num_bytes > free:
            raise CheckpointError(
                f"{folder}: not enough free space for the checkpoint: {num_bytes:,} bytes needed, {free:,} bytes free; "
                "free some space, for example by removing old checkpoints. Earlier checkpoints are unchanged"
            )
        stored(folder).make_folder()
    return folder


def num_shard_bytes(tensors: Sequence[ShardedTensor]) -> int:
    """Returns the bytes of the tensors in storage, without the header."""
    return sum(num_tensor_bytes(tensor.local) for tensor in tensors)


def save_shard(folder: Location, rank: int, tensors: Sequence[ShardedTensor]) -> ShardRecord:
    """Writes this rank's blocks. The blocks are durable on return, but part of a checkpoint only after `commit`.

    Raises CheckpointError with the folder, and the bytes needed and free. Then no part of the file remains.
    """
    blocks = {tensor.name: tensor.local for tensor in tensors if tensor.local.numel()}
    num_bytes = num_shard_bytes(tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise CheckpointError(f"{folder}: rank {rank} saves two tensors with the same name; names must be unique")
    file_name = shard_file_name(rank)
    with storage_errors(folder, f"writing {file_name}", num_bytes):
        written = write_tensor_file(folder / file_name, blocks, metadata={})
    return ShardRecord(
        rank=rank,
        file=FileEntry(name=file_name, num_bytes=written.num_bytes, header_digest=written.header_digest),
        tensors=tuple(_entry(tensor, file_name, written) for tensor in tensors),
    )


def _entry(tensor: ShardedTensor, file_name: str, written: WrittenFile) -> TensorEntry:
    digest = written.tensor_digests.get(tensor.name)
    piece = (
        [Piece(offsets=tensor.offsets, shape=tuple(tensor.local.shape), file=file_name, digest=digest)]
        if digest
        else []
    )
    return TensorEntry(
        name=tensor.name,
        dtype=dtype_name(tensor.name, tensor.local.dtype),
        global_shape=tensor.global_shape,
        pieces=tuple(piece),
    )


class HostBuffers:
    """CPU memory for one rank's copies. The memory is reused for every save, because allocating pinned memory and first
    writes to new memory are slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self.pending: PendingShard | None = None
        """The latest save from this memory; it may be finished."""

    def copy(self, tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Returns copies of the tensors in this memory; waits for copies from a device to finish."""
        copies = []
        for tensor in tensors:
            buffer = self._buffer_for(tensor.name, tensor.local)
            buffer.copy_(tensor.local, non_blocking=True)
            copies.append(ShardedTensor(tensor.name, buffer, tensor.global_shape, tensor.offsets))
        if any(tensor.local.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return copies

    def _buffer_for(self, name: str, local: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer


class PendingShard:
    """A shard that is being written in the background."""

    def __init__(self, future: Future[ShardRecord]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `wait` returns or raises without waiting."""
        return self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> ShardRecord:
        """Waits until the file is durable, and returns its record. Raises what `save_shard` raises, and
        TimeoutError."""
        return self._future.result(timeout_seconds)


def save_shard_async(
    folder: Location, rank: int, tensors: Sequence[ShardedTensor], buffers: HostBuffers
) -> PendingShard:
    """Like `save_shard`, but only blocks during the copy into `buffers`; the tensors may change afterwards.

    Raises CheckpointError while the previous save still uses the buffers: call its `wait` first, or skip this save.
    """
    if buffers.pending and not buffers.pending.done():
        raise CheckpointError(
            f"{folder}: the previous checkpoint of rank {rank} is still being written; wait for it, or save less often"
        )
    copies = buffers.copy(tensors)
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
    buffers.pending = PendingShard(pool.submit(save_shard, folder, rank, copies))
    pool.shutdown(wait=False)
    return buffers.pending


def commit(
    root: Location,
    folder: Location,
    step: int,
    start_number: int,
    records: Sequence[ShardRecord],
    extra: Mapping[str, JsonValue],
) -> CheckpointStatus:
    """Makes the ranks' files a checkpoint by writing the manifest. Only called by the controller, after all ranks have
    finished.

    Raises CheckpointError if records are missing, files differ from the records, or the pieces do not cover every
    tensor exactly once; then the folder is not a checkpoint. Raises CheckpointError if writing fails, and FencedError
    if a later start exists; then the folder may be a checkpoint, but this start must not report it.
    """
    refuse_if_fenced(root, start_number)
    manifest = _manifest(folder, step, start_number, records, extra)
    content, digest = seal(manifest)
    with storage_errors(folder, f"writing {MANIFEST_FILE}", len(content)):
        try:
            stored(folder / MANIFEST_FILE).create(content)
        except FileExistsError as error:
            raise CheckpointError(f"{folder}: is already committed; do not save a step twice in one start") from error
    # A later start may have been announced since the first check. Whether or not it accepts this checkpoint, this start
    # is over and must not report it.
    refuse_if_fenced(root, start_number)
    return status_of(folder, manifest, digest)


def _manifest(
    folder: Location, step: int, start_number: int, records: Sequence[ShardRecord], extra: Mapping[str, JsonValue]
) -> Manifest:
    if folder.name != folder_name(step, start_number):
        raise CheckpointError(
            f"{folder}: is not the folder of step {step} and start {start_number}; use the folder of begin_save"
        )
    ordered = sorted(records, key=lambda record: record.rank)
    ranks = [record.rank for record in ordered]
    if not ranks or ranks != list(range(len(ranks))):
        raise CheckpointError(f"{folder}: the records are from ranks {ranks}; pass one record per rank, from 0 on")
    written = {r.file.name: WrittenFile(r.file.num_bytes, r.file.header_digest, {}) for r in ordered}
    try:
        check_tensor_files(folder, written, digests=False)
    except DamagedError as error:
        raise CheckpointError(f"{folder}: cannot be committed: {error}; save again") from error
    return Manifest(
        contract_version=CONTRACT_VERSION,
        step=step,
        start_number=start_number,
        world_size=len(ranks),
        saved_at=timestamp_now(),
        files=tuple(record.file for record in ordered),
        tensors=merge_tensors(folder, ordered),
        extra=dict(extra),
    )


def discard_save(folder: Location) -> None:
    """Removes the files of a failed save. Only called by the controller, when no rank is writing.

    Does not touch a committed checkpoint. Raises no error, because this is called while another error is handled;
    `prune` removes what remains. In a bucket nothing is removed: if the answer to the manifest's request was lost, the
    manifest may still appear, and must then find its files.
    """
    with suppress(OSError):
        if isinstance(folder, Path) and not is_committed(folder):
            stored(folder).remove_folder(first=MANIFEST_FILE)
