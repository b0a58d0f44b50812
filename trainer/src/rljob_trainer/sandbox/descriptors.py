"""The open descriptors of one run of a program, so that none is left open when the run ends."""

from __future__ import annotations

import os
from collections.abc import Iterable


class Descriptors:
    """Closes all of its descriptors at the end of the `with` block."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(set(self._open))

    def pipe(self) -> tuple[int, int]:
        """The reading and the writing end of a new pipe."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def file(self, data: bytes) -> int:
        """A file in memory with this data, to be read from its beginning."""
        descriptor = os.memfd_create("rljob", os.MFD_CLOEXEC)
        self._open.add(descriptor)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def add(self, descriptor: int) -> None:
        """Takes over a descriptor."""
        self._open.add(descriptor)

    def close(self, descriptors: Iterable[int]) -> None:
        """Closes these descriptors now."""
        for descriptor in descriptors:
            self._open.remove(descriptor)
            os.close(descriptor)
