"""The program in the pod that reads a job's results. Its text is copied into the pod; nothing here imports it.

It needs only Python 3.8 and the standard library, because the pod uses the image of the job.

`wait SECONDS` is the main process of the container. It exits when no other process has run in the container for
that long, so that the pod also ends if the user's machine disappears.

`serve FOLDER` reads requests from standard input, one JSON object per line, and writes the responses to standard
output: lines of JSON, some of which are followed by bytes of a file.

    {"list": ["run"], "skip": ["run/logs"]}         list the files of these folders, without the skipped paths
    -> {"path": "run/a.log", "size": 5, "mtime_ns": 17...}   for each regular file
    -> {"failed": "run/b", "reason": "Permission denied"}         for what cannot be read
    -> {"end": true, "ignored": ["run/link"], "num_ignored": 1}   links and devices

    {"read": [["run/a.log", 3, "SHA-256 of bytes 1 and 2", 1]]}   read a file from byte 1; the caller has bytes 1 and 2
    -> {"begin": 5, "offset": 3, "mtime_ns": 17...}          the file has 5 bytes; `offset` is 1 if bytes 1 and 2 differ
    -> {"data": 2} and 2 bytes                               repeated
    -> {"end": "SHA-256 of bytes 1 to 4"}
    or {"failed": "reason", "kind": "changed"}               instead; the kind is `changed` (while it was read),
                                                             `gone` (deleted since it was listed) or `error`

`{"wait": true}` may come between the lines of a response: the program is still working.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import sys
import time

PIECE_BYTES = 1 << 20
REPORT_SECONDS = 2.0
"""After this time without output, the program writes a `wait` line, so that the caller knows that it is alive."""
REQUEST_TIMEOUT_SECONDS = 300
"""`serve` exits after this time without a request, and if nobody reads its output for so long. Otherwise the connection
of a machine that has disappeared could stay open for hours."""
MAX_FILES = 200_000
MAX_IGNORED_LISTED = 10


class Output:
    """Standard output as lines of JSON and raw bytes."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def line(self, value: dict[str, object]) -> None:
        """Writes one JSON object."""
        self._write(json.dumps(value).encode() + b"\n")

    def data(self, piece: bytes) -> None:
        """Writes bytes of a file, after a line with their number."""
        self._write(b'{"data": %d}\n' % len(piece))
        self._write(piece)

    def still_working(self) -> None:
        """Writes a `wait` line if nothing was written for a while."""
        if time.monotonic() - self._last > REPORT_SECONDS:
            self.line({"wait": True})

    def _write(self, piece: bytes) -> None:
        view = memoryview(piece)
        signal.alarm(REQUEST_TIMEOUT_SECONDS)
        while view:
            view = view[os.write(1, view) :]
        self._last = time.monotonic()


def list_files(root: str, folders: list[str], skip: set[str], output: Output) -> None:
    """Writes a line for each regular file. Links are not followed."""
    ignored: list[str] = []
    num_files, waiting = 0, [path for path in folders if path not in skip]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            output.line({"failed": folder, "reason": error.strerror or str(error)})
            continue
        for entry in entries:
            path = folder + "/" + entry.name
            if path in skip:
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                output.line({"failed": path, "reason": error.strerror or str(error)})
                continue
            if stat.S_ISDIR(found.st_mode):
                waiting.append(path)
            elif stat.S_ISREG(found.st_mode):
                if num_files == MAX_FILES:
                    for left in [folder, *waiting]:
                        output.line({"failed": left, "reason": f"there are more than {MAX_FILES} files"})
                    waiting = []
                    break
                output.line({"path": path, "size": found.st_size, "mtime_ns": found.st_mtime_ns})
                num_files += 1
            else:
                ignored.append(path)
            output.still_working()
    output.line({"end": True, "ignored": sorted(ignored)[:MAX_IGNORED_LISTED], "num_ignored": len(ignored)})


def open_file(root: str, path: str) -> int:
    """Opens a regular file. A link anywhere in the path is an error, also if it has just replaced a folder."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    *parents, name = path.split("/")
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        # O_NONBLOCK: opening a named pipe would wait for its writer.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError("is not a regular file")
    return opened


def hash_bytes(file: int, start: int, end: int, output: Output) -> hashlib._Hash:
    """The hash object of the bytes from `start` to `end`; the position in the file is then `end`."""
    digest = hashlib.sha256()
    os.lseek(file, start, os.SEEK_SET)
    while start < end:
        piece = os.read(file, min(PIECE_BYTES, end - start))
        if not piece:
            break
        digest.update(piece)
        start += len(piece)
        output.still_working()
    return digest


def send_file(file: int, offset: int, known_digest: str, start: int, output: Output) -> None:
    """Sends the bytes from `offset` to the size that the file has now. What is appended meanwhile is left out."""
    before = os.fstat(file)
    size = before.st_size
    digest = hash_bytes(file, start, offset if offset <= size else start, output)
    if offset > size or (offset > start and digest.hexdigest() != known_digest):
        offset, digest = start, hash_bytes(file, start, start, output)
    output.line({"begin": size, "offset": offset, "mtime_ns": before.st_mtime_ns})
    position = offset
    while position < size:
        piece = os.read(file, min(PIECE_BYTES, size - position))
        if not piece:
            output.line({"failed": "became shorter while it was read", "kind": "changed"})
            return
        digest.update(piece)
        output.data(piece)
        position += len(piece)
    after = os.fstat(file)
    is_same = (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, size)
    # A file that was only appended to still has the same beginning.
    if not is_same and hash_bytes(file, start, size, output).digest() != digest.digest():
        output.line({"failed": "was changed while it was read", "kind": "changed"})
        return
    output.line({"end": digest.hexdigest()})


def read_files(root: str, requests: list[tuple[str, int, str, int]], output: Output) -> None:
    """Sends the requested files one after another."""
    for path, offset, known_digest, start in requests:
        try:
            file = open_file(root, path)
        except OSError as error:
            kind = "gone" if isinstance(error, FileNotFoundError) else "error"
            output.line({"failed": error.strerror or str(error), "kind": kind})
            continue
        try:
            send_file(file, offset, known_digest, start, output)
        except OSError as error:
            # If writing the output has failed, this fails, too, and the program ends.
            output.line({"failed": error.strerror or str(error), "kind": "error"})
        finally:
            os.close(file)


def serve(root: str) -> None:
    """Handles requests until standard input ends."""
    output = Output()
    signal.alarm(REQUEST_TIMEOUT_SECONDS)
    for line in sys.stdin.buffer:
        signal.alarm(REQUEST_TIMEOUT_SECONDS)
        request = json.loads(line)
        if "list" in request:
            list_files(root, request["list"], set(request["skip"]), output)
        else:
            read_files(root, request["read"], output)


def has_other_processes() -> bool:
    """Whether another process runs in this container."""
    return any(name.isdigit() and int(name) != os.getpid() for name in os.listdir("/proc"))


def wait(idle_seconds: float) -> None:
    """Returns when no other process has run for `idle_seconds`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    last = time.monotonic()
    while time.monotonic() - last < idle_seconds:
        time.sleep(1)
        if has_other_processes():
            last = time.monotonic()


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait(float(sys.argv[2]))
    else:
        serve(sys.argv[2])
