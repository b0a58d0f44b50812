"""The order in which rows are visited when they are shuffled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def shuffled_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """An order of the rows that depends on nothing but the arguments, none of which is negative.

    Raw Philox output is sorted: NumPy promises the stream of a bit generator to stay the same between versions, and
    that of a Generator's methods not (NEP 19)."""
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_rows)
    return np.argsort(keys, kind="stable")
