"""The floor of a training step: its operations at the speed of a large matrix product, and the weights read once per
decoded position of all responses together, at the speed of memory reads.

Legend: P parameters. A generated token takes 2P operations and a trained one 6P (Kaplan et al. 2020, arXiv 2001.08361,
section 2.1). Prompts take another 2P, because they are read before the first token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from rljob_bench.step_case import GENERATED_TOKENS, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, TRAINED_TOKENS

MATRIX_SIZES = {"cpu": 2048, "cuda": 8192}
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
NUM_CALLS = 3


class StepFloor:
    """Measures the speed of the device in one precision; it is a contender like the others."""

    def __init__(self, dtype: torch.dtype, num_parameters: int, num_threads: int, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.num_parameters = num_parameters
        self.bytes_per_parameter = dtype.itemsize
        self.operations_per_second: list[float] = []
        self.bytes_per_second: list[float] = []
        self._num_threads = num_threads
        self._size, self._read_bytes = MATRIX_SIZES[device_type], READ_BYTES[device_type]
        self._left, self._right = (torch.randn(self._size, self._size).to(device_type, dtype) for _ in range(2))
        self._read = torch.ones(self._read_bytes // 4, device=device_type)

    def turn(self) -> list[float]:
        """Seconds of one step at the highest speeds that were measured in this turn."""
        torch.set_num_threads(self._num_threads)
        self.operations_per_second.append(2 * self._size**3 / _fastest(lambda: self._left @ self._right))
        self.bytes_per_second.append(self._read_bytes / _fastest(lambda: self._read.sum()))
        return [self.generation_seconds() + self.update_seconds()]

    def generation_seconds(self) -> float:
        """Seconds of reading each prompt once and decoding: the slower of operations and memory reads."""
        prompts = 2 * self.num_parameters * NUM_PROMPTS * PROMPT_TOKENS / self.operations_per_second[-1]
        arithmetic = 2 * self.num_parameters * GENERATED_TOKENS / self.operations_per_second[-1]
        return prompts + max(arithmetic, self.reading_seconds())

    def reading_seconds(self) -> float:
        """Seconds of reading all weights, once per decoded position."""
        return self.bytes_per_parameter * self.num_parameters * NEW_TOKENS / self.bytes_per_second[-1]

    def update_seconds(self) -> float:
        """Seconds of forward and backward pass."""
        return 6 * self.num_parameters * TRAINED_TOKENS / self.operations_per_second[-1]

    def described(self) -> str:
        """The speeds as text."""
        operations, read = statistics.median(self.operations_per_second), statistics.median(self.bytes_per_second)
        return f"matrix products at {operations / 1e9:.0f} GFLOP/s, reading at {read / 1e9:.1f} GB/s"


def _fastest(call: Callable[[], torch.Tensor]) -> float:
    _finish(call())
    seconds = []
    for _ in range(NUM_CALLS):
        begin = time.perf_counter()
        _finish(call())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _finish(result: torch.Tensor) -> None:
    if result.is_cuda:
        torch.cuda.synchronize()
