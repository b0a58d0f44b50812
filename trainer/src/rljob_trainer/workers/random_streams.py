"""Separate random streams for training and generation in one process, on the host and on its device.

A stream includes the generators of torch, NumPy and Python, because a user's function may use any of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

PythonState = tuple[int, tuple[int, ...], float | None]
NumpyState = tuple[str, NDArray[np.uint32], int, int, float]


@dataclass(frozen=True)
class RandomState:
    """The state of all global random generators of a process."""

    host: torch.Tensor
    """torch's generator on the CPU."""
    device: torch.Tensor | None
    """torch's generator on this process's GPU; None without a GPU."""
    python: PythonState
    numpy: NumpyState


class RandomStreams:
    """The training stream is active; the state of the generation stream is stored until `generation` activates this
    stream."""

    def __init__(self, device: torch.device, seed: int, training_rank: int, generation_rank: int) -> None:
        """Seeds both streams. Processes with the same `training_rank` get the same training stream, processes with the
        same `generation_rank` the same generation stream; all other streams differ. Replaces seeds of libraries."""
        self.device = device
        _seed(seed, 1, generation_rank)
        self._generation_state = self._state()
        _seed(seed, 0, training_rank)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Within this block the process uses the generation stream; the training stream is not affected."""
        training = self._state()
        self._set(self._generation_state)
        try:
            yield
        finally:
            self._generation_state = self._state()
            self._set(training)

    def _state(self) -> RandomState:
        device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        name, keys, position, has_gauss, gaussian = np.random.get_state(legacy=True)
        numpy: NumpyState = (str(name), np.asarray(keys, np.uint32), int(position), int(has_gauss), float(gaussian))
        return RandomState(torch.get_rng_state(), device, random.getstate(), numpy)

    def _set(self, state: RandomState) -> None:
        torch.set_rng_state(state.host)
        if state.device is not None:
            torch.cuda.set_rng_state(state.device, self.device)
        random.setstate(state.python)
        np.random.set_state(state.numpy)


def _seed(job_seed: int, stream: int, rank: int) -> None:
    drawn = np.random.SeedSequence([job_seed, stream, rank]).generate_state(2)
    # Seeds all GPUs of the process, too.
    torch.manual_seed(int(drawn[0]))
    np.random.seed(int(drawn[1]))
    random.seed(int(drawn[1]))
