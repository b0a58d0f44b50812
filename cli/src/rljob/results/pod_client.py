"""Sends requests to the program in the pod (`pod_file_server`), and parses its responses.

The responses are not trusted, because the job's own code may have changed the image.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rljob.results.connection import BrokenConnectionError, Connection
from rljob.results.file_source import Begin, End, Failed, Listing, RemoteFile, Wanted

_MAX_LINE_BYTES = 1 << 20
_MAX_FILES = 1_000_000
_MAX_LISTING_CHARACTERS = 1 << 26
_MAX_NUMBER = 2**63 - 1
"""Of bytes and of nanoseconds, here and in file systems."""
Line = Mapping[str, object]


class PodClient:
    """Reads files through one connection. All methods may raise BrokenConnectionError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = b""

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def files(self, folders: Sequence[str], skip: Sequence[str]) -> Listing:
        """All regular files below these folders, except for the paths in `skip` and what is below them."""
        self._send({"list": list(folders), "skip": list(skip)})
        files: list[RemoteFile] = []
        unreadable: dict[str, str] = {}
        num_characters = 0
        while "end" not in (line := self._line()):
            if "failed" in line:
                unreadable[_text(line, "failed")] = _text(line, "reason")
            else:
                files.append(RemoteFile(_text(line, "path"), _size(line, "size"), _time(line)))
            num_characters += sum(len(text) for text in line.values() if isinstance(text, str))
            if len(files) + len(unreadable) > _MAX_FILES or num_characters > _MAX_LISTING_CHARACTERS:
                raise BrokenConnectionError("the pod lists too many files")
        ignored = line.get("ignored")
        names = [str(name) for name in ignored] if isinstance(ignored, list) else []
        return Listing(files, names, _size(line, "num_ignored"), unreadable)

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Begin | bytes | End | Failed]:
        """The content of the files, in this order: of each Begin, pieces of bytes, and End; or Failed instead of the
        rest."""
        self._send({"read": [[each.path, each.offset, each.digest, each.start] for each in wanted]})
        for _ in wanted:
            is_over = False
            while not is_over:
                line = self._line()
                if "data" in line:
                    yield from self._bytes(_size(line, "data"))
                elif "begin" in line:
                    yield Begin(_size(line, "begin"), _size(line, "offset"), _time(line))
                elif "end" in line:
                    is_over = True
                    yield End(_text(line, "end"))
                else:
                    is_over = True
                    yield Failed(_text(line, "failed"), _text(line, "kind"))

    def _send(self, request: Line) -> None:
        self._connection.send(json.dumps(request).encode() + b"\n")

    def _line(self) -> Line:
        """The next line, except for those which only say that the program is working."""
        while True:
            pieces = [self._buffer]
            while b"\n" not in pieces[-1]:
                pieces.append(self._connection.receive())
                if sum(map(len, pieces)) > _MAX_LINE_BYTES and b"\n" not in pieces[-1]:
                    raise BrokenConnectionError("the pod sent a line that is too long")
            line, _, self._buffer = b"".join(pieces).partition(b"\n")
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise BrokenConnectionError("the pod sent something that cannot be parsed")
            if "wait" not in found:
                return found

    def _bytes(self, count: int) -> Iterator[bytes]:
        left = count
        while left > 0:
            piece = self._buffer or self._connection.receive()
            self._buffer = piece[left:]
            yield piece[:left]
            left -= min(len(piece), left)


def _size(line: Line, name: str) -> int:
    value = _number(line, name)
    if not 0 <= value <= _MAX_NUMBER:
        raise BrokenConnectionError(f"the pod sent an invalid number ({name})")
    return value


def _time(line: Line) -> int:
    """The time of a file in ns, the nearest one that can be represented. It may be before 1970."""
    return max(-_MAX_NUMBER, min(_number(line, "mtime_ns"), _MAX_NUMBER))


def _number(line: Line, name: str) -> int:
    value = line.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BrokenConnectionError(f"the pod sent an invalid number ({name})")
    return value


def _text(line: Line, name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise BrokenConnectionError(f"the pod sent an invalid string ({name})")
    return value
