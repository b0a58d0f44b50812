"""Merges the ranks' records, and checks that the pieces cover every tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import Piece, ShardRecord, TensorEntry
from rljob_trainer.checkpoints.storage import Location


def merge_tensors(folder: Location, records: Sequence[ShardRecord]) -> tuple[TensorEntry, ...]:
    """Returns one entry per tensor with the pieces of all ranks, in the order in which the ranks name the tensors.

    Raises CheckpointError if ranks disagree about a tensor, or if pieces overlap or leave a gap.
    """
    entries: dict[str, TensorEntry] = {}
    pieces: dict[str, list[Piece]] = {}
    for record in records:
        for entry in record.tensors:
            first = entries.setdefault(entry.name, entry)
            if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
                raise CheckpointError(
                    f"{folder}: tensor {entry.name} is {entry.dtype} {list(entry.global_shape)} on rank {record.rank}, "
                    f"but {first.dtype} {list(first.global_shape)} on another; save the same model on all ranks"
                )
            pieces.setdefault(entry.name, []).extend(entry.pieces)
    merged = []
    for name, entry in entries.items():
        _check_cover(folder, entry, pieces[name])
        merged.append(entry.model_copy(update={"pieces": tuple(pieces[name])}))
    return tuple(merged)


def _check_cover(folder: Location, entry: TensorEntry, pieces: list[Piece]) -> None:
    for piece in pieces:
        ends = [offset + size for offset, size in zip(piece.offsets, piece.shape, strict=True)]
        if any(end > limit for end, limit in zip(ends, entry.global_shape, strict=True)):
            raise CheckpointError(
                f"{folder}: tensor {entry.name}: the piece at {list(piece.offsets)} with shape {list(piece.shape)} is "
                f"outside of {list(entry.global_shape)}; check the offsets of {piece.file}"
            )
    num_elements = sum(math.prod(piece.shape) for piece in pieces)
    expected = math.prod(entry.global_shape)
    overlap = _find_overlap(pieces)
    if overlap or num_elements != expected:
        what = f"{overlap[0].file} and {overlap[1].file} overlap" if overlap else "parts of it are missing"
        raise CheckpointError(
            f"{folder}: tensor {entry.name}: the ranks saved {num_elements:,} of {expected:,} elements, and {what}; "
            f"exactly one rank must save each element"
        )


def _find_overlap(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """Returns two pieces that share an element; None if there are none. The pieces are sorted by their start in the
    first dimension, so that only neighbors need to be compared."""
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for index, piece in enumerate(ordered):
        end = piece.offsets[0] + piece.shape[0] if piece.shape else 1
        for other in ordered[index + 1 :]:
            if other.offsets and other.offsets[0] >= end:
                break
            if overlap_of(piece.offsets, piece.shape, other.offsets, other.shape) is not None:
                return piece, other
    return None


Box = tuple[tuple[int, int], ...]
"""Start and end in each dimension, in elements of the whole tensor."""


def overlap_of(
    offsets: Sequence[int], shape: Sequence[int], other_offsets: Sequence[int], other_shape: Sequence[int]
) -> Box | None:
    """Returns the elements that two blocks of a tensor share; None if there are none. The box of a scalar is `()`."""
    box = tuple(
        (max(start, other_start), min(start + size, other_start + other_size))
        for start, size, other_start, other_size in zip(offsets, shape, other_offsets, other_shape, strict=True)
    )
    return box if all(start < end for start, end in box) else None
