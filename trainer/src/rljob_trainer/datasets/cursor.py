"""The order in which prompts are drawn: a function of seed and epoch, so that a resumed run continues exactly.

All epochs together are one endless stream of rows. The *ordinal* of a row is its number in this stream, from 0: the
epoch times the number of rows, plus the position in the epoch's order.
"""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag
from rljob_trainer.datasets.pass_rates import MAX_GAP, PassRates
from rljob_trainer.errors import ConfigurationError, DatasetError

log = logging.getLogger(__name__)

Row = TypeVar("Row")


@dataclass(frozen=True)
class DrawnRow(Generic[Row]):
    """A row and its number in the stream. The same row has a different ordinal in each epoch: in a dataset of 100 rows,
    for example, 7 in the first epoch, and 183 in the second one."""

    ordinal: int
    row: Row


class StoredRows(Sequence[Row]):
    """Rows that are not in memory."""

    num_ahead: int
    """Rows that are read in advance."""

    @abstractmethod
    def read(self, positions: Sequence[int]) -> list[Row]:
        """Returns the rows at these positions, in this order."""

    @abstractmethod
    def expect(self, positions: Sequence[int], num_soon: int) -> None:
        """Begins to read rows in the background, if some of the first `num_soon` are not in memory. `positions`: of the
        rows that will probably be needed next, in this order."""


class PromptStream(Protocol[Row]):
    """An endless stream of rows: of one dataset (`PromptCursor`), or of several (`MixtureCursor`)."""

    def next_batch(self, num_rows: int) -> list[DrawnRow[Row]]:
        """Draws the next rows."""

    def rewind(self, ordinal: int) -> None:
        """Goes back: the stream continues directly after the drawn row with this ordinal."""


class CursorState(WireModel):
    """The position of a run in its data; part of each checkpoint."""

    ordinal: Count
    """Ordinal of the next row. It is also the number of rows that were drawn or skipped in all epochs."""
    num_rows: Count
    seed: Count
    shuffle: Flag
    digest: str
    """Digest of the rows (`Prompts.digest`)."""
    pass_rates: str | None = None
    """See `PassRates.state`; None if rows are drawn uniformly."""


class PromptCursor(Generic[Row]):
    """Draws batches from an endless stream of rows. Each epoch visits every row once, though some may be skipped (see
    below); with shuffling each epoch has another order.

    A batch may extend over the end of an epoch, and over several epochs if there are fewer rows than the batch size.

    `are_usable` may skip rows when they are drawn. A skipped row keeps its ordinal. Between two calls the cursor is at
    the beginning, or directly after a row that was used, and never after a skipped row. So its state follows from the
    last row that was used. `are_usable` must return the same values during a run. If it skips other rows in a resumed
    run, this run continues at the same ordinal, and only the rows that are drawn from there on differ.

    `pass_rates` skips rows in the same way. The pass rates may change between two steps, but not between a draw of rows
    and a `rewind` over these rows.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        seed: int,
        shuffle: bool,
        digest: str,
        are_usable: Callable[[Sequence[Row]], Sequence[bool]] | None = None,
        pass_rates: PassRates | None = None,
        where: str = "spec.training.dataset",
        name: str = "",
    ) -> None:
        """`digest`: a digest of the rows, to detect that the data has changed after a resume. `are_usable`: returns for
        each row whether to use it; None: all rows are used. `pass_rates`: decide in which epochs a row is drawn;
        None: in each. `where`: the dataset's field, for messages. `name`: the name of one of several datasets, each of
        which has an order of its own."""
        self._rows = rows
        self._where = where
        self._seed = seed
        self._order_seed = _seed_of(seed, name) if name else seed
        self._shuffle = shuffle
        self._digest = digest
        self._are_usable = are_usable
        self.pass_rates = pass_rates
        self._max_gap = 1 if pass_rates is None else MAX_GAP
        """Every usable row is drawn at least once in this number of epochs."""
        self.num_skipped = 0
        """Number of rows skipped so far. Rows that `rewind` has returned to the stream do not count."""
        self._ordinal = 0
        self._order_epoch = 0
        """The epoch of `_order`."""
        self._order = self._order_of_epoch(0)

    def next_batch(self, num_rows: int) -> list[DrawnRow[Row]]:
        """Draws the next rows. Raises DatasetError if no row is usable, and whatever `are_usable` raises."""
        batch: list[DrawnRow[Row]] = []
        num_seen = 0
        while len(batch) < num_rows:
            if not batch and num_seen > (self._max_gap + 1) * len(self._rows):
                # One more epoch than the gap, because drawing may have begun in the middle of an epoch.
                raise DatasetError(
                    f"{self._where}: all rows were skipped, because their answers cannot be scored; the log names the "
                    "first ones. Check answerField and the reward's type"
                )
            num_left_in_epoch = len(self._rows) - self._ordinal % len(self._rows)
            end = self._ordinal + min(num_left_in_epoch, num_rows - len(batch))
            drawn = self._rows_between(self._ordinal, end)
            usable = self._usable(drawn)
            batch += usable
            self.num_skipped += len(drawn) - len(usable)
            num_seen += len(drawn)
            self._ordinal = end
        if isinstance(self._rows, StoredRows):
            # The next batches probably have the same number of rows. Only rows of this epoch are expected, because the
            # order of the next epoch is not computed in advance.
            num_left_in_epoch = len(self._rows) - self._ordinal % len(self._rows)
            num_ahead = min(max(self._rows.num_ahead, num_rows), num_left_in_epoch)
            self._rows.expect(self._positions(self._ordinal, self._ordinal + num_ahead), 2 * num_rows)
        return batch

    def rewind(self, ordinal: int) -> None:
        """Goes back: the stream continues directly after the drawn row with this ordinal, or at its beginning (-1).
        Afterwards the state is as if no later row had been drawn. Raises whatever `are_usable` raises."""
        assert -1 <= ordinal < self._ordinal, f"row {ordinal} was not drawn, the next row is {self._ordinal}"
        later = self._rows_between(ordinal + 1, self._ordinal)
        self.num_skipped -= len(later) - len(self._usable(later))
        self._ordinal = ordinal + 1

    def go_back(self, num_rows: int) -> None:
        """Goes back by this number of rows that were used. Raises whatever `are_usable` raises."""
        last = self._ordinal - 1
        while num_rows and last >= 0:
            num_rows -= len(self._usable(self._rows_between(last, last + 1)))
            last -= 1
        # Directly after the row that was used before these.
        while last >= 0 and not self._usable(self._rows_between(last, last + 1)):
            last -= 1
        self.rewind(last)

    @property
    def epochs(self) -> float:
        """Epochs that were drawn, for example 1.5 after one and a half passes over the rows."""
        return self._ordinal / len(self._rows)

    def state(self) -> CursorState:
        """Returns the state for a checkpoint."""
        return CursorState(
            ordinal=self._ordinal,
            num_rows=len(self._rows),
            seed=self._seed,
            shuffle=self._shuffle,
            digest=self._digest,
            pass_rates=None if self.pass_rates is None else self.pass_rates.state(),
        )

    def restore(self, state: CursorState) -> None:
        """Restores a saved position. Raises ConfigurationError if the number of rows or their order has changed."""
        here = self.state()
        for name, saved, now in (
            ("number of rows", state.num_rows, here.num_rows),
            ("seed", state.seed, here.seed),
            ("shuffle setting", state.shuffle, here.shuffle),
        ):
            if saved != now:
                raise ConfigurationError(
                    f"{self._where}: the {name} was {saved} when the checkpoint was saved, but now it is "
                    f"{now}; resume with the same data and seed, or start a new job"
                )
        if state.digest != here.digest:
            log.warning(
                "%s: the prompts have changed since the checkpoint was saved; training continues with the new ones",
                self._where,
            )
        elif self.pass_rates is not None and state.pass_rates is not None:
            # Pass rates of other prompts would have no meaning.
            self.pass_rates.restore(state.pass_rates)
        self._ordinal = state.ordinal

    def _usable(self, drawn: list[DrawnRow[Row]]) -> list[DrawnRow[Row]]:
        if self.pass_rates is not None:
            drawn = [each for each in drawn if self._is_in_epoch(each.ordinal, self.pass_rates)]
        if self._are_usable is None:
            return drawn
        are_usable = self._are_usable([each.row for each in drawn])
        return [each for each, is_usable in zip(drawn, are_usable, strict=True) if is_usable]

    def _is_in_epoch(self, ordinal: int, pass_rates: PassRates) -> bool:
        return pass_rates.is_drawn(self._position(ordinal), ordinal // len(self._rows))

    def _rows_between(self, first: int, end: int) -> list[DrawnRow[Row]]:
        """Returns the rows with the ordinals from `first` up to, but not including, `end`."""
        positions = self._positions(first, end)
        rows = self._rows.read(positions) if isinstance(self._rows, StoredRows) else [self._rows[i] for i in positions]
        return [DrawnRow(ordinal, row) for ordinal, row in zip(range(first, end), rows, strict=True)]

    def _positions(self, first: int, end: int) -> list[int]:
        """Returns the positions of these rows in the data."""
        return [self._position(ordinal) for ordinal in range(first, end)]

    def _position(self, ordinal: int) -> int:
        epoch, position = divmod(ordinal, len(self._rows))
        if epoch != self._order_epoch:
            self._order_epoch, self._order = epoch, self._order_of_epoch(epoch)
        return int(self._order[position])

    def _order_of_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return shuffled_order(len(self._rows), self._order_seed, epoch)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def shuffled_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Returns a random order of the rows that only depends on the arguments, which must not be negative.

    The order sorts raw Philox output, because NumPy guarantees the same raw output of a bit generator in all versions,
    but not the same results of a Generator's methods (NEP 19)."""
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_rows)
    return np.argsort(keys, kind="stable")
