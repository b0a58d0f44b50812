"""The floor of moving data: one thread copies it within this process's memory, into pages that are already
allocated."""

from __future__ import annotations

import time

import numpy as np


class MemoryCopy:
    """Buffers of `num_bytes`, which are copied from one to the next."""

    def __init__(self, num_bytes: int) -> None:
        self._buffers = [np.full(num_bytes, number, dtype=np.uint8) for number in range(4)]

    def measure(self, num_passes: int, num_calls: int) -> list[float]:
        """The seconds of `num_calls` calls, each with `num_passes` copies (at most 3) that read what the previous copy
        wrote."""
        seconds = []
        for _ in range(num_calls):
            start = time.perf_counter()
            for source, target in zip(self._buffers[:num_passes], self._buffers[1 : num_passes + 1], strict=True):
                np.copyto(target, source)
            seconds.append(time.perf_counter() - start)
        return seconds
