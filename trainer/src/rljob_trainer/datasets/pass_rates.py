"""Pass rates of the rows of a dataset: rows that are always or never solved are drawn in fewer epochs.

A row with pass rate p has the weight max(MIN_WEIGHT, 4 p (1 - p)), which is 1 for p = 1/2. As long as its pass rate is
unknown, it has weight 1. The weight is the fraction of epochs in which the row is drawn. The row is drawn in epoch e if
the fractional part of (phase + e x weight) is below the weight; the phase is a fixed random number of the row, from 0
to 1. So each row is drawn at least once in any MAX_GAP epochs, and the first epoch has all rows. The rows of an epoch
are a function of seed, epoch and pass rates, so a resumed run draws the same rows.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MIN_WEIGHT = 0.1
MAX_GAP = 10
"""Epochs: the inverse of MIN_WEIGHT."""
UNKNOWN, MAX_LEVEL = 255, 254
"""Pass rates are stored as one byte per row: MAX_LEVEL x pass rate, or UNKNOWN. Checkpoints have these bytes, so a
resumed run continues with exactly the same numbers."""
PHASE_STREAM = 2**64 - 1
"""The random stream of the phases. The orders of the epochs use streams with the numbers of the epochs."""


class PassRates:
    """The pass rates of the rows of one dataset."""

    def __init__(self, row_indices: Sequence[int], seed: int) -> None:
        """`row_indices`: `PromptRow.index` of each row."""
        self._positions = {index: position for position, index in enumerate(row_indices)}
        self._levels = np.full(len(row_indices), UNKNOWN, np.uint8)
        raw = np.random.Philox(key=np.array([seed, PHASE_STREAM], np.uint64)).random_raw(len(row_indices))
        self._phases: npt.NDArray[np.float64] = np.asarray((raw >> np.uint64(11)) * 2.0**-53, np.float64)

    def is_drawn(self, position: int, epoch: int) -> bool:
        """Whether the row at this position is drawn in this epoch."""
        level = int(self._levels[position])
        if level == UNKNOWN:
            return True
        weight = max(MIN_WEIGHT, 4 * level * (MAX_LEVEL - level) / MAX_LEVEL**2)
        return float(self._phases[position] + epoch * weight) % 1.0 < weight

    def record(self, row_index: int, pass_rate: float) -> None:
        """Records the fraction of the responses to a row that pass. The row's pass rate becomes the mean of this value
        and its pass rate before."""
        position = self._positions[row_index]
        level = int(self._levels[position])
        before = pass_rate if level == UNKNOWN else level / MAX_LEVEL
        self._levels[position] = round(MAX_LEVEL * (before + pass_rate) / 2)

    def mean(self) -> float | None:
        """Returns the mean of the known pass rates; None if none is known."""
        known = self._levels[self._levels != UNKNOWN]
        return float(known.mean()) / MAX_LEVEL if len(known) else None

    def state(self) -> str:
        """Returns the pass rates for a checkpoint."""
        return base64.b64encode(self._levels.tobytes()).decode()

    def restore(self, state: str) -> None:
        """Restores saved pass rates of the same rows."""
        self._levels = np.frombuffer(base64.b64decode(state), np.uint8).copy()
