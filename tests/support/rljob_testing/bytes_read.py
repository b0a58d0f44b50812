"""How many bytes this process has asked the kernel to read, from the page cache or not: `rchar` of /proc/self/io."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class BytesRead:
    """Of a block; known after it."""

    count: int = 0


@contextmanager
def bytes_read() -> Iterator[BytesRead]:
    """Counts what all threads of this process read within the block."""
    result = BytesRead()
    before = _count()
    yield result
    result.count = _count() - before


def _count() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")]
    return int(line.removeprefix("rchar:"))
