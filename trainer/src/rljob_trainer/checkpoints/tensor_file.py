"""Writes and checks one safetensors file: durably, and optionally with digests that are computed during the write.

The format (safetensors README, "Format"): 8 bytes little-endian length of the header, a JSON header with dtype, shape
and position of each tensor, then the tensors' bytes without gaps. The library's own writer neither syncs nor hashes;
hashing afterwards would read everything again.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import torch

from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.layout import digest_of
from rljob_trainer.checkpoints.storage import Location, stored
from rljob_trainer.observability.activity import ACTIVITY

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

NUM_HASH_THREADS = 4
_READ_BYTES = 4 * 1024 * 1024
_MAX_HEADER_BYTES = 100 * 1024 * 1024


@dataclass(frozen=True)
class WrittenFile:
    """Size and digests of a written file. They are compared with the file when it is read."""

    num_bytes: int
    header_digest: str
    tensor_digests: dict[str, str]
    """By tensor name."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor, as in a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Returns the safetensors name of a tensor's dtype. Raises CheckpointError if the format does not support it."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"tensor {name}: {dtype} cannot be stored in safetensors; convert it before saving")
    return DTYPE_NAMES[dtype]


def num_tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensor's elements in a file."""
    return tensor.numel() * tensor.element_size()


def write_tensor_file(path: Location, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> WrittenFile:
    """Writes the tensors (on any device) to a safetensors file, which is durable on return.

    Raises OSError; then no part of the file remains.
    """
    specs = _in_file_order({name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    header = _header(specs, metadata)
    num_bytes = len(header) + sum(spec.num_bytes for spec in specs.values())
    pool = ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix="checkpoint-digest")
    try:
        digests: dict[str, Future[str]] = {}
        with stored(path).writer(num_bytes) as write:
            write(header)
            for number, name in enumerate(specs, 1):
                ACTIVITY.report_activity("tensors of a checkpoint written", number, len(specs))
                data = _bytes_of(tensors[name])
                digests[name] = pool.submit(digest_of, data)
                write(data)
        return WrittenFile(
            num_bytes=num_bytes,
            header_digest=digest_of(header),
            tensor_digests={name: digest.result() for name, digest in digests.items()},
        )
    finally:
        pool.shutdown(cancel_futures=True)


def stream_tensor_file(
    path: Location, specs: Mapping[str, TensorSpec], read: Callable[[str], torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Like `write_tensor_file`, but reads one tensor at a time with `read`, and computes no digests. Tensors are read
    by decreasing element size, and in the order of `specs` within the same size.

    Raises OSError, and what `read` raises; then no part of the file remains.
    """
    # Wide elements first, as in all files. Within the same width the order of `specs` stays, because `read` may be
    # faster in that order.
    ordered = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
    header = _header(ordered, metadata)
    with stored(path).writer(len(header) + sum(spec.num_bytes for spec in ordered.values())) as write:
        write(header)
        for name in ordered:
            # Without a variable, so that the tensor is freed before the next one is read.
            write(_bytes_of(_as_in_header(name, read(name), ordered[name])))


def _as_in_header(name: str, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), (name, tensor.dtype, tensor.shape, spec)
    return tensor


def _in_file_order(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Sorts wide elements first, so that positions in the file are aligned for memory mapping."""
    return dict(sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, spec in specs.items():
        end = position + spec.num_bytes
        entries[name] = {
            "dtype": dtype_name(name, spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


@dataclass(frozen=True)
class Span:
    """The byte range of a tensor in its file, from `start` to `end` (exclusive)."""

    start: int
    end: int


def read_header(path: Location) -> tuple[bytes, dict[str, Span]]:
    """Returns the first part of a safetensors file (length and header), and the byte range of each tensor.

    Raises DamagedError if the file or its header is missing or unreadable.
    """
    try:
        prefix = _read(path, 0, 8)
        length = int.from_bytes(prefix, "little")
        text = _read(path, 8, length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    data_start = len(prefix) + length
    try:
        entries: dict[str, dict[str, list[int]]] = json.loads(text)
        entries.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        spans = {name: Span(data_start + start, data_start + end) for name, (start, end) in offsets.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path.name} does not begin with a safetensors header") from error
    return prefix + text, spans


def _read(path: Location, start: int, num_bytes: int) -> bytes:
    """Returns the bytes from `start` on; fewer if the file ends before."""
    data = bytearray(num_bytes)
    return bytes(data[: stored(path).read_into(start, memoryview(data))])


def read_checked_header(path: Location, expected_digest: str) -> dict[str, Span]:
    """Returns the byte range of each tensor. Raises DamagedError if the header has changed."""
    header, spans = read_header(path)
    digest = digest_of(header)
    if digest != expected_digest:
        raise DamagedError(f"{path.name}: digest of the header is {digest}, but {expected_digest} was written")
    return spans


@dataclass(frozen=True)
class _Check:
    """One byte range of a file, and the expected digest."""

    path: Location
    tensor: str
    start: int
    end: int
    digest: str


def check_tensor_files(folder: Location, files: Mapping[str, WrittenFile], digests: bool = True) -> None:
    """Compares files with what was written: first sizes, then (with `digests`) every byte, in parallel threads.

    Raises DamagedError for the first difference, with file, tensor and check.
    """
    for name, expected in files.items():
        _check_size(folder / name, expected.num_bytes)
    if not digests:
        return
    with ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix="checkpoint-check") as pool:
        checks = [check for name, expected in files.items() for check in _checks(folder / name, expected)]
        for _ in pool.map(_check_range, checks):
            pass


def _check_size(path: Location, num_bytes: int) -> None:
    try:
        size = stored(path).size()
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    if size != num_bytes:
        raise DamagedError(f"{path.name} has {size:,} bytes, but {num_bytes:,} were written")


def _checks(path: Location, expected: WrittenFile) -> Iterator[_Check]:
    spans = read_checked_header(path, expected.header_digest)
    if spans.keys() != expected.tensor_digests.keys():
        raise DamagedError(f"{path.name}: does not contain exactly the tensors in the manifest")
    for name, span in spans.items():
        yield _Check(path, name, span.start, span.end, expected.tensor_digests[name])


def _check_range(check: _Check) -> None:
    try:
        digest = _digest_of_range(check.path, check.start, check.end)
    except OSError as error:
        raise DamagedError(f"{check.path.name} cannot be read: {error.strerror}") from error
    compare_tensor_digest(check.path, check.tensor, digest, check.digest)


def compare_tensor_digest(path: Location, tensor: str, digest: str, expected: str) -> None:
    """Raises DamagedError if the digests differ."""
    if digest != expected:
        raise DamagedError(f"{path.name}: digest of tensor {tensor} is {digest}, but {expected} was written")


def _digest_of_range(path: Location, start: int, end: int) -> str:
    running: _Hash = sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, end - start)))
    file = stored(path)
    while start < end:
        count = file.read_into(start, buffer[: min(len(buffer), end - start)])
        if not count:
            break
        running.update(buffer[:count])
        start += count
    return f"sha256:{running.hexdigest()}"


def read_range(path: Location, span: Span) -> bytearray:
    """Reads the bytes of a range. Raises DamagedError if the file is too short or cannot be read."""
    data = bytearray(span.end - span.start)
    try:
        count = stored(path).read_into(span.start, memoryview(data))
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    if count < len(data):
        raise DamagedError(f"{path.name} is truncated: it ends before byte {span.end:,}")
    return data
