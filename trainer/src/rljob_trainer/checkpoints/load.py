"""Loading: finds the newest intact checkpoint, and reads the blocks that a rank needs.

Every byte that a run resumes from is read once, and verified with its digest by the rank that reads it. So the search
only checks manifests, and names and sizes of files. The search reads everything only after a rank has found damage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.fencing import visible_checkpoints
from rljob_trainer.checkpoints.layout import (
    CheckpointFolder,
    Manifest,
    Piece,
    TensorEntry,
    digest_of,
    is_committed,
    list_checkpoint_folders,
    read_manifest,
)
from rljob_trainer.checkpoints.merging import Box, overlap_of
from rljob_trainer.checkpoints.sharding import local_block
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.checkpoints.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    Span,
    WrittenFile,
    check_tensor_files,
    compare_tensor_digest,
    read_checked_header,
    read_range,
)
from rljob_trainer.errors import ConfigurationError

READS_AT_ONCE, MAX_BYTES_IN_PARALLEL = 8, 32 * 1024 * 1024
"""How many tensors are read from a bucket at the same time, and the size of their pieces: together at most 256 MiB."""


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was skipped because it is damaged."""

    folder: Location
    reason: str
    """A message with the file and the check that failed."""

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that passed the checks."""

    folder: Location
    manifest: Manifest
    digest: str
    """Digest of the manifest."""
    rejected: tuple[Rejected, ...]
    """Newer checkpoints that are damaged, newest first. The caller should report them."""

    @property
    def checkpoint(self) -> CheckpointFolder:
        """The folder, as `accept_up_to` needs it."""
        return CheckpointFolder(self.manifest.step, self.manifest.start_number, self.folder)


def find_newest_complete(root: Location, start_number: int, digests: bool = True) -> Found | None:
    """Finds the checkpoint that this start resumes from; None if there is none and the run begins at step 0.

    Damaged checkpoints are skipped. With `digests` every byte is verified. Otherwise only manifests and file sizes are
    checked; changed bytes in a file of the right size are then found later, by `load_into`.

    Raises CheckpointError if checkpoints were committed but all are damaged, because a run must not silently restart
    from step 0. Raises FencedError if a later start exists.
    """
    rejected: list[Rejected] = []
    for folder in visible_checkpoints(root, start_number):
        try:
            manifest, digest = check_checkpoint(folder.path, digests)
        except DamagedError as error:
            rejected.append(Rejected(folder.path, str(error)))
        else:
            return Found(folder.path, manifest, digest, tuple(rejected))
    if any(is_committed(rejection.folder) for rejection in rejected):
        reasons = "".join(f"\n  {rejection}" for rejection in rejected)
        raise CheckpointError(
            f"{root}: no checkpoint is usable, {len(rejected)} are damaged:{reasons}\n"
            f"Restore one of them, or move all of them away to restart from step 0"
        )
    return None


def refuse_existing(root: Location) -> None:
    """Implements `resume: Never`. Raises ConfigurationError if a committed checkpoint exists, intact or damaged."""
    existing = [folder.name for folder in list_checkpoint_folders(root) if is_committed(folder.path)]
    if existing:
        raise ConfigurationError(
            f"spec.checkpoint.resume: is Never, but {root} contains {len(existing)} checkpoints (newest: "
            f"{existing[0]}); set it to Auto to resume, or use another folder"
        )


def check_checkpoint(folder: Location, digests: bool = True) -> tuple[Manifest, str]:
    """Verifies every byte of a checkpoint (without `digests` only file sizes). Returns the manifest and its digest.

    Raises DamagedError, naming the file and the check that failed.
    """
    manifest, digest = read_manifest(folder)
    written = {file.name: WrittenFile(file.num_bytes, file.header_digest, {}) for file in manifest.files}
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            written[piece.file].tensor_digests[tensor.name] = piece.digest
    check_tensor_files(folder, written, digests)
    return manifest, digest


class CheckpointReader:
    """Reads blocks of a checkpoint's tensors. Reads a file's header when its first block is requested."""

    def __init__(self, folder: Location, manifest: Manifest, compares_digests: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self._compares_digests = compares_digests
        self._header_digests = {file.name: file.header_digest for file in manifest.files}
        self._entries = {tensor.name: tensor for tensor in manifest.tensors}
        self._spans: dict[str, dict[str, Span]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the manifest's order."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Returns shape, dtype and pieces. Raises CheckpointError if the checkpoint has no such tensor."""
        if name not in self._entries:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing (the checkpoint has {len(self._entries)} tensors); it was "
                "probably saved with another model"
            )
        return self._entries[name]

    def max_piece_bytes(self, name: str) -> int:
        """Returns the size of the largest piece of a tensor, which `read_into` keeps in memory. Raises
        CheckpointError."""
        entry = self.entry(name)
        return max((math.prod(piece.shape) * DTYPES[entry.dtype].itemsize for piece in entry.pieces), default=0)

    def read(self, name: str) -> torch.Tensor:
        """Returns the whole tensor, on the CPU, with the dtype with which it was saved."""
        entry = self.entry(name)
        out = torch.empty(entry.global_shape, dtype=DTYPES[entry.dtype])
        self.read_into(name, (0,) * out.dim(), out)
        return out

    def read_into(self, name: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        """Fills `out` (any device) with the block of the tensor that begins at `offsets` and has the shape of `out`.

        Every piece that overlaps the block is read completely, one at a time, because a digest covers a whole piece.
        With the same number of ranks as at the save, this reads no more than the block.

        Raises CheckpointError if dtype or shape do not match, DamagedError if bytes have changed.
        """
        entry = self.entry(name)
        if DTYPE_NAMES.get(out.dtype) != entry.dtype:
            raise CheckpointError(
                f"{self.folder}: tensor {name} was saved as {entry.dtype}, but this run needs {out.dtype}; use the "
                f"dtype of the run that saved it"
            )
        num_elements = 0
        for piece in entry.pieces:
            box = overlap_of(offsets, out.shape, piece.offsets, piece.shape)
            if box is None:
                continue
            block = self._read_piece(name, piece, out.dtype)[_slices(box, piece.offsets)]
            out[_slices(box, offsets)].copy_(block)
            num_elements += block.numel()
        if num_elements != out.numel():
            raise CheckpointError(
                f"{self.folder}: tensor {name}: only {num_elements:,} of {out.numel():,} elements from "
                f"{list(offsets)} on are stored; the saved tensor has shape {list(entry.global_shape)}"
            )

    def _read_piece(self, name: str, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        path = self.folder / piece.file
        data = read_range(path, self._span(name, piece))
        if self._compares_digests:
            compare_tensor_digest(path, name, digest_of(memoryview(data)), piece.digest)
        return torch.frombuffer(data, dtype=dtype).reshape(piece.shape)

    def _span(self, name: str, piece: Piece) -> Span:
        path = self.folder / piece.file
        if piece.file not in self._spans:
            self._spans[piece.file] = read_checked_header(path, self._header_digests[piece.file])
        span = self._spans[piece.file].get(name)
        num_bytes = math.prod(piece.shape) * DTYPES[self._entries[name].dtype].itemsize
        if span is None or span.end - span.start != num_bytes:
            raise DamagedError(f"{piece.file}: tensor {name} is missing or has another size than in the manifest")
        return span


def _slices(box: Box, offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the slices that select a box of the whole tensor in the block that begins at `offsets`."""
    return tuple(slice(start - offset, end - offset) for (start, end), offset in zip(box, offsets, strict=True))


def open_checkpoint(folder: Location) -> CheckpointReader:
    """Opens a reader that verifies the digest of every piece that it reads. Raises DamagedError."""
    return CheckpointReader(folder, read_manifest(folder)[0], compares_digests=True)


def open_known_checkpoint(folder: Location) -> CheckpointReader:
    """Opens a reader for a checkpoint that this start has written or resumed from. The bytes of such a checkpoint were
    already hashed when they were written, or verified when they were loaded. So only manifest, headers and sizes are
    checked.

    Raises DamagedError.
    """
    return CheckpointReader(folder, check_checkpoint(folder, digests=False)[0], compares_digests=False)


def load_into(named: Iterable[tuple[str, torch.Tensor | DTensor]], reader: CheckpointReader) -> None:
    """Fills the tensors in place. Each rank reads its own blocks. Any number of ranks may have saved the checkpoint.

    Tensors of the checkpoint that are not in `named` are ignored. Raises CheckpointError if a tensor is missing or has
    another shape or dtype, DamagedError if bytes have changed. Some tensors may be filled then; loading another
    checkpoint overwrites them.
    """
    if isinstance(reader.folder, Path):
        for name, tensor in named:
            _load_one(name, tensor, reader)
        return
    # A request to a bucket takes long, so small tensors are read several at a time. Large ones are read alone, to bound
    # the memory; their requests are parallel, too.
    large = []
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="checkpoint-read") as pool:
        waiting = []
        for name, tensor in named:
            if reader.max_piece_bytes(name) > MAX_BYTES_IN_PARALLEL:
                large.append((name, tensor))
            else:
                waiting.append(pool.submit(_load_one, name, tensor, reader))
        for each in waiting:
            each.result()
    for name, tensor in large:
        _load_one(name, tensor, reader)


def _load_one(name: str, tensor: torch.Tensor | DTensor, reader: CheckpointReader) -> None:
    block = local_block(name, tensor)
    saved = reader.entry(name).global_shape
    if saved != block.global_shape:
        raise CheckpointError(
            f"{reader.folder}: tensor {name} was saved with shape {list(saved)}, but the model needs "
            f"{list(block.global_shape)}; the checkpoint belongs to another model"
        )
    if block.local.numel():
        reader.read_into(name, block.offsets, block.local)
