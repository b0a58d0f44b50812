"""Where the files of a job are read from: a pod that mounts the claim (`pod_client`), or a bucket (`bucket_source`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class RemoteFile:
    """A file of the job as it was listed."""

    path: str
    """Relative to the job's folder, such as `run/metrics.jsonl`."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """The files below some folders."""

    files: Sequence[RemoteFile]
    ignored: Sequence[str] = ()
    """Some of the paths that are no regular files, such as links."""
    num_ignored: int = 0
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Paths of folders and files that the pod cannot read, with the reason."""


@dataclass(frozen=True)
class Wanted:
    """A file to read from its byte `start`, and what the caller already has of it."""

    path: str
    offset: int
    """The caller has the bytes from `start` to here."""
    digest: str
    """SHA-256 of these bytes, in hexadecimal."""
    start: int = 0


@dataclass(frozen=True)
class Begin:
    """The start of a file; its bytes from `offset` follow. `offset` is `start` if the caller's bytes differ."""

    size: int
    offset: int
    mtime_ns: int


@dataclass(frozen=True)
class End:
    """All bytes were sent. `digest`: SHA-256 of the file from `start`, in hexadecimal."""

    digest: str


@dataclass(frozen=True)
class Failed:
    """The file cannot be read. `kind`: `changed` (while it was read), `gone` (deleted meanwhile), or `error`."""

    reason: str
    kind: str


class FileSource(Protocol):
    """Reads files of a job. All methods may raise BrokenConnectionError."""

    def close(self) -> None:
        """Closes the connection."""

    def files(self, folders: Sequence[str], skip: Sequence[str]) -> Listing:
        """All regular files below these folders, except for the paths in `skip` and what is below them."""

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Begin | bytes | End | Failed]:
        """The content of the files, in this order: of each Begin, pieces of bytes, and End; or Failed instead of the
        rest."""
