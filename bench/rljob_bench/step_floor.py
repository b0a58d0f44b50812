"""The floor of a training step: its arithmetic at the speed of a large matrix product, and the weights read once for
every decoded token of all responses together, at the speed of reading memory.

Legend: P parameters. A generated token takes 2P operations and a trained one 6P (Kaplan et al. 2020, arXiv 2001.08361,
section 2.1), prompts take 2P once more when they are read before the first token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from rljob_bench.step_case import GENERATED_TOKENS, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, TRAINED_TOKENS

MATRIX_SIZE = 2048
READ_BYTES = 1 << 28
NUM_CALLS = 3


class StepFloor:
    """Measures what the machine can do in a precision; a contender beside the others."""

    def __init__(self, dtype: torch.dtype, num_parameters: int, num_threads: int) -> None:
        self.num_parameters = num_parameters
        self.bytes_per_parameter = dtype.itemsize
        self.operations_per_second: list[float] = []
        self.bytes_per_second: list[float] = []
        self._num_threads = num_threads
        self._left, self._right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE).to(dtype) for _ in range(2))
        self._read = torch.ones(READ_BYTES // 4)

    def turn(self) -> list[float]:
        """Seconds of one step at the fastest speeds that were seen in this turn."""
        torch.set_num_threads(self._num_threads)
        self.operations_per_second.append(2 * MATRIX_SIZE**3 / _fastest(lambda: self._left @ self._right))
        self.bytes_per_second.append(READ_BYTES / _fastest(lambda: self._read.sum()))
        return [self.generation_seconds() + self.update_seconds()]

    def generation_seconds(self) -> float:
        """Of reading the prompts, each once, and decoding: arithmetic or reading, whichever takes longer."""
        prompts = 2 * self.num_parameters * NUM_PROMPTS * PROMPT_TOKENS / self.operations_per_second[-1]
        arithmetic = 2 * self.num_parameters * GENERATED_TOKENS / self.operations_per_second[-1]
        return prompts + max(arithmetic, self.reading_seconds())

    def reading_seconds(self) -> float:
        """Of all weights, once for every decoded position."""
        return self.bytes_per_parameter * self.num_parameters * NEW_TOKENS / self.bytes_per_second[-1]

    def update_seconds(self) -> float:
        """Of forward and backward pass."""
        return 6 * self.num_parameters * TRAINED_TOKENS / self.operations_per_second[-1]

    def described(self) -> str:
        """The speeds, for people."""
        operations, read = statistics.median(self.operations_per_second), statistics.median(self.bytes_per_second)
        return f"matrix products at {operations / 1e9:.0f} GFLOP/s, reading at {read / 1e9:.1f} GB/s"


def _fastest(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(NUM_CALLS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
