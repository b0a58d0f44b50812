"""Seeds of responses and of environments."""

from __future__ import annotations

import numpy as np
import torch

MAX_SEED = 2**31
"""Upper bound of seeds (exclusive)."""


def sample_seeds(job_seed: int, stream: int, step: int, count: int) -> torch.Tensor:
    """Returns [count] int64 seeds that depend only on the arguments, so that a resumed run draws the same ones.

    `stream` is a different number for each use, such as training and evaluation."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([job_seed, stream, step])))
    return torch.from_numpy(generator.integers(0, MAX_SEED, size=count, dtype=np.int64))
