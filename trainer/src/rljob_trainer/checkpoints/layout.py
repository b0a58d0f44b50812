"""The storage layout of checkpoints: names of folders and files, and the manifest.

    <root>/starts/0001.json                           checkpoints that start 1 accepts (see `fencing`)
    <root>/step-00000020.start-0001/
        rank-00000.safetensors ...                    the pieces of tensors that each rank has written
        manifest.json                                 written last; without it the folder is not a checkpoint

JSON files are *sealed*: `{"content":<document>,"digest":"sha256:<of the document's bytes>"}`. Without a digest, nobody
would notice a flipped bit in a number, because the JSON would still be valid. Tensor files have no digest of the whole
file: the digests of the header and of the tensors cover every byte once, can be computed in parallel, and identify the
damaged tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, JsonValue, ValidationError

from rljob_api.base import WireModel
from rljob_api.contract_documents import is_readable_version, readable_versions
from rljob_api.scalars import Count, PositiveCount
from rljob_api.tolerant_reading import CHECKPOINT, Reading, read_document
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.storage import Location, exists, stored

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
STARTS_FOLDER = "starts"

_FOLDER_PATTERN = re.compile(r"step-(\d{8,10})\.start-(\d{4,10})")
_INDEX = re.compile(r"\[\d+\]")
_SEAL_START = b'{"content":'
_SEAL_END = re.compile(rb',"digest":"(sha256:[0-9a-f]{64})"}\n')
_SEAL_END_LENGTH = len(b',"digest":"sha256:') + 64 + len(b'"}\n')

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}\.safetensors$")]
"""A plain file name, so that a manifest cannot refer to files outside of its folder."""
Extents = tuple[Annotated[int, Field(ge=0)], ...]
"""One number for each dimension, in elements."""


class Piece(WireModel):
    """The block of a tensor that one rank holds: `tensor[offsets[d] : offsets[d] + shape[d]]` in each dimension d."""

    offsets: Extents
    shape: Extents
    file: FileName
    digest: Digest
    """Digest of the piece's bytes: row-major, little-endian."""


class TensorEntry(WireModel):
    """A tensor and its pieces. A `ShardRecord` only has the pieces of one rank."""

    name: str
    dtype: str
    """Name of the dtype in safetensors, for example `F32`."""
    global_shape: Extents
    pieces: tuple[Piece, ...]


class FileEntry(WireModel):
    """One safetensors file."""

    name: FileName
    num_bytes: Annotated[int, Field(ge=8)]
    header_digest: Digest
    """Digest of the file's first part: 8 bytes of length, and the JSON header."""


class ShardRecord(WireModel):
    """What one rank has written. The rank creates it and sends it to the controller for `commit`."""

    rank: Count
    file: FileEntry
    tensors: tuple[TensorEntry, ...]


class Manifest(WireModel):
    """Everything that is needed to load a checkpoint on any number of ranks."""

    contract_version: PositiveCount
    step: Count
    start_number: PositiveCount
    world_size: PositiveCount
    """Number of ranks that have written the checkpoint."""
    saved_at: str
    """UTC time in RFC 3339 format."""
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    extra: dict[str, JsonValue]
    """The caller's own state: data cursor, random generators, policy version, job name."""


@dataclass(frozen=True, order=True)
class CheckpointFolder:
    """A folder with the name of a checkpoint, complete or not. Ordered from old to new."""

    step: int
    start_number: int
    path: Location

    @property
    def name(self) -> str:
        """Name of the folder, without its parent path."""
        return self.path.name


def folder_name(step: int, start_number: int) -> str:
    """Returns the folder's name. Names sort by step, then by start."""
    return f"step-{step:08d}.start-{start_number:04d}"


def shard_file_name(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def list_checkpoint_folders(root: Location) -> list[CheckpointFolder]:
    """Returns every checkpoint folder in `root`, complete or not, newest first; empty if `root` does not exist."""
    return sorted(_checkpoint_folders(root), reverse=True)


def _checkpoint_folders(root: Location) -> Iterator[CheckpointFolder]:
    for name in stored(root).folders():
        if match := _FOLDER_PATTERN.fullmatch(name):
            yield CheckpointFolder(int(match[1]), int(match[2]), root / name)


def has_manifest(folder: Location) -> bool:
    """Whether a commit was at least started. The manifest's content is not checked."""
    return exists(folder / MANIFEST_FILE)


def is_committed(folder: Location) -> bool:
    """Whether the checkpoint was committed, even if its files are damaged now.

    An empty manifest does not count: without hard links, an interrupted commit leaves one (`create_absent`).
    """
    try:
        return stored(folder / MANIFEST_FILE).size() > 0
    except FileNotFoundError:
        return False


def digest_of(data: bytes | memoryview) -> str:
    """Returns the SHA-256 digest. CPUs have instructions for SHA-256 (1.4 GB/s on one core, faster than the storage),
    and the program `sha256sum` can check the digest."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def seal(document: WireModel) -> tuple[bytes, str]:
    """Returns the bytes of a sealed JSON file, and the digest of its document."""
    content = document.model_dump_json(by_alias=True, exclude_unset=True).encode()
    digest = digest_of(content)
    return _SEAL_START + content + f',"digest":"{digest}"}}\n'.encode(), digest


DocumentType = TypeVar("DocumentType", bound=WireModel)


def read_sealed(path: Location, document_type: type[DocumentType]) -> tuple[DocumentType, str]:
    """Reads the document of a sealed file, which another version may have written. Returns the document and its digest.

    Raises DamagedError, naming the file and the check that failed.
    """
    try:
        sealed = stored(path).read()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    content, end = sealed[len(_SEAL_START) : -_SEAL_END_LENGTH], sealed[-_SEAL_END_LENGTH:]
    match = _SEAL_END.fullmatch(end)
    if not sealed:
        raise DamagedError(f"{path.name} is empty")
    if not match or not sealed.startswith(_SEAL_START):
        raise DamagedError(f"{path.name} is truncated or is not a sealed JSON file ({len(sealed)} bytes)")
    digest, expected = digest_of(content), match[1].decode()
    if digest != expected:
        raise DamagedError(f"{path.name}: digest of the content is {digest}, but {expected} was written")
    try:
        reading = _read(path.name, content, document_type)
    except RecursionError:
        raise DamagedError(f"{path.name}: its content is nested too deeply") from None
    warn_of_unknown_fields(path.name, reading.unknown_fields)
    return reading.value, digest


def _read(name: str, content: bytes, document_type: type[DocumentType]) -> Reading[DocumentType]:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise DamagedError(f"{name}: its content is not JSON ({error})") from error
    version = data.get("contractVersion") if isinstance(data, dict) else None
    if not is_readable_version(version):
        raise DamagedError(
            f"{name} has contractVersion {json.dumps(version)}; this version of rljob can read {readable_versions()}"
        )
    try:
        return read_document(document_type, data, CHECKPOINT)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedError(f"{name}: {where}: {first['msg']}") from error


def read_manifest(folder: Location) -> tuple[Manifest, str]:
    """Reads the manifest of a complete checkpoint. Returns the manifest and its digest, which identifies the whole
    checkpoint.

    Raises DamagedError if the manifest is missing, damaged, of another folder, or of an unsupported version.
    """
    manifest, digest = read_sealed(folder / MANIFEST_FILE, Manifest)
    if folder_name(manifest.step, manifest.start_number) != folder.name:
        raise DamagedError(
            f"{MANIFEST_FILE} is for step {manifest.step} and start {manifest.start_number}, but the folder is "
            f"{folder.name}"
        )
    return manifest, digest


def status_of(folder: Location, manifest: Manifest, digest: str) -> CheckpointStatus:
    """Returns what the job's status shows of a checkpoint. The digest of its manifest covers all other digests."""
    uri = folder.resolve().as_uri() if isinstance(folder, Path) else folder.as_uri()
    return CheckpointStatus(step=manifest.step, uri=uri, digest=digest, saved_at=manifest.saved_at)


def warn_of_unknown_fields(what: str, paths: tuple[str, ...]) -> None:
    """Logs, once per field, the fields of a document that this version does not know and has ignored."""
    for name in sorted({_INDEX.sub("[]", path) for path in paths}):
        _log_once(what, name)


@cache
def _log_once(what: str, name: str) -> None:
    log.warning("%s: %s is not known to this version and is ignored; a newer version wrote it", what, name)
