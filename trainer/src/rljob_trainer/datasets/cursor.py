"""The order in which prompts are visited: a function of seed and epoch, so that a resumed run goes on exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag
from rljob_trainer.errors import ConfigurationError, DatasetError

log = logging.getLogger(__name__)

Row = TypeVar("Row")


class CursorState(WireModel):
    """Where a run is in its data; part of each checkpoint."""

    epoch: Count
    position: Count
    """Rows of this epoch that have been used."""
    num_rows: Count
    seed: Count
    shuffle: Flag
    digest: str
    """Of the rows."""


class PromptCursor(Generic[Row]):
    """Endless batches over the rows. Every epoch visits each row once, in an order of its own when shuffling.

    A batch may reach over the end of an epoch, and over several when there are fewer rows than a batch takes.

    `are_usable` may leave rows out when they are drawn. Such a row has its position in the order like any other, and
    the cursor always stands right behind a row that was used, or at the very beginning: so a state means the same
    whether a row was left out before it or not. `are_usable` must give the same in one run each time. Where a resumed
    run leaves out other rows, it goes on from the same place, and only rows from there on differ.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        seed: int,
        shuffle: bool,
        digest: str,
        are_usable: Callable[[Sequence[Row]], Sequence[bool]] | None = None,
    ) -> None:
        """`digest`: of the rows, to tell whether they are those of a checkpoint. `are_usable`: one value for each of
        the rows that it is given; without it all are. Raises ConfigurationError if there are no rows."""
        if not rows:
            raise ConfigurationError("spec.training.dataset: no rows are left to train on; use another dataset")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._are_usable = are_usable
        self.num_left_out = 0
        """Rows that were passed over so far, without those of batches that were given back."""
        self._epoch = 0
        self._position = 0
        self._order = self._order_of_epoch()

    def next_batch(self, num_rows: int) -> list[Row]:
        """The next rows; moves on. Raises DatasetError if none is usable, and what `are_usable` raises."""
        batch: list[Row] = []
        num_seen = 0
        while len(batch) < num_rows:
            if not batch and num_seen > 2 * len(self._rows):
                # Two epochs from wherever it stood hold every row at least once.
                raise DatasetError("spec.training.dataset: no row can be used, all are left out; see the log")
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of_epoch()
            end = min(len(self._rows), self._position + num_rows - len(batch))
            drawn = [self._rows[index] for index in self._order[self._position : end]]
            usable = self._usable(drawn)
            batch += usable
            self.num_left_out += len(drawn) - len(usable)
            num_seen += len(drawn)
            self._position = end
        return batch

    def give_back(self, num_rows: int) -> None:
        """Goes back: the last so many rows come again. As many must have been drawn. The state is then what it would be
        had they not been: at the end of an epoch, not at the beginning of the next."""
        if not num_rows:
            return
        # Back to the last usable row that is kept, over what was left out behind it: the next batch passes over that
        # again. One row too far, so that the place behind it is found, which may be the end of an epoch.
        num_rows += 1
        while num_rows and (self._epoch or self._position):
            if self._usable([self._step_back()]):
                num_rows -= 1
            else:
                self.num_left_out -= 1
        assert num_rows <= 1, "more rows than were drawn"
        if not num_rows:
            self._position += 1

    def state(self) -> CursorState:
        """To be saved with a checkpoint."""
        return CursorState(
            epoch=self._epoch,
            position=self._position,
            num_rows=len(self._rows),
            seed=self._seed,
            shuffle=self._shuffle,
            digest=self._digest,
        )

    def restore(self, state: CursorState) -> None:
        """Goes to a saved place. Raises ConfigurationError if the rows or their order are not those of then."""
        here = self.state()
        for name, saved, now in (
            ("rows", state.num_rows, here.num_rows),
            ("seed", state.seed, here.seed),
            ("shuffle", state.shuffle, here.shuffle),
        ):
            if saved != now:
                raise ConfigurationError(
                    f"spec.training.dataset: the checkpoint was made with {name} {saved}, and now it is {now}; resume "
                    "with the same data and seed, or start a new job"
                )
        if state.digest != here.digest:
            log.warning("spec.training.dataset: the prompts are not those that the checkpoint's run began with")
        self._epoch, self._position = state.epoch, state.position
        self._order = self._order_of_epoch()

    def _usable(self, rows: list[Row]) -> list[Row]:
        if self._are_usable is None:
            return rows
        return [row for row, is_usable in zip(rows, self._are_usable(rows), strict=True) if is_usable]

    def _step_back(self) -> Row:
        """The row before the cursor, which stands before it now."""
        if self._position == 0:
            self._epoch, self._position = self._epoch - 1, len(self._rows)
            self._order = self._order_of_epoch()
        self._position -= 1
        return self._rows[self._order[self._position]]

    def _order_of_epoch(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._rows)))
        return [int(index) for index in shuffled_order(len(self._rows), self._seed, self._epoch)]


def shuffled_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """An order of the rows that depends on nothing but the arguments, none of which is negative.

    Raw Philox output is sorted: NumPy promises the stream of a bit generator to stay the same between versions, and
    that of a Generator's methods not (NEP 19)."""
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_rows)
    return np.argsort(keys, kind="stable")
