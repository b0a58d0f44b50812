"""The order in which prompts are drawn: a function of seed and epoch, so that a resumed run continues exactly."""

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
    """The position of a run in its data; part of each checkpoint."""

    epoch: Count
    position: Count
    """Number of rows of this epoch that were already drawn."""
    num_rows: Count
    seed: Count
    shuffle: Flag
    digest: str
    """Digest of the rows (`Prompts.digest`)."""


class PromptCursor(Generic[Row]):
    """Endless batches over the rows. Every epoch visits each row once; with shuffling each epoch has another order.

    A batch may extend over the end of an epoch, and over several epochs if there are fewer rows than the batch size.

    `are_usable` may skip rows when they are drawn. A skipped row keeps its position in the order. The cursor is always
    directly after a row that was used, or at the very beginning. It is never directly after a skipped row, so the same
    used rows always lead to the same state. `are_usable` must return the same values during a run. If a resumed run
    skips other rows, it continues at the same position, and only rows after it differ.
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
        """`digest`: a digest of the rows, to detect that the data has changed after a resume. `are_usable`: returns for
        each row whether to use it; None: all rows are used. Raises ConfigurationError if there are no rows."""
        if not rows:
            raise ConfigurationError("spec.training.dataset: no rows are left to train on; use another dataset")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._are_usable = are_usable
        self.num_left_out = 0
        """Number of rows skipped so far. Rows that `return_rows` has returned do not count."""
        self._epoch = 0
        self._position = 0
        self._order = self._order_of_epoch()

    def next_batch(self, num_rows: int) -> list[Row]:
        """Draws the next rows. Raises DatasetError if no row is usable, and whatever `are_usable` raises."""
        batch: list[Row] = []
        num_seen = 0
        while len(batch) < num_rows:
            if not batch and num_seen > 2 * len(self._rows):
                # Two epochs from any position contain every row at least once.
                raise DatasetError("spec.training.dataset: no row is usable, all were skipped; see the log for reasons")
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

    def return_rows(self, num_rows: int) -> None:
        """Returns the last `num_rows` rows to the stream, so that they are drawn again. At least as many must have been
        drawn. Afterwards the state is as if they had not been drawn. At an epoch boundary the position is the end of
        the old epoch, not the beginning of the new one."""
        if not num_rows:
            return
        # Goes back over rows that were skipped, too: the next batch skips them again. Goes back one usable row too far
        # and then forward by one, because the position after that row may be the end of an epoch.
        num_rows += 1
        while num_rows and (self._epoch or self._position):
            if self._usable([self._step_back()]):
                num_rows -= 1
            else:
                self.num_left_out -= 1
        assert num_rows <= 1, "more rows returned than were drawn"
        if not num_rows:
            self._position += 1

    def state(self) -> CursorState:
        """Returns the state for a checkpoint."""
        return CursorState(
            epoch=self._epoch,
            position=self._position,
            num_rows=len(self._rows),
            seed=self._seed,
            shuffle=self._shuffle,
            digest=self._digest,
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
                    f"spec.training.dataset: the {name} was {saved} when the checkpoint was saved, but now it is "
                    f"{now}; resume with the same data and seed, or start a new job"
                )
        if state.digest != here.digest:
            log.warning("spec.training.dataset: the prompts differ from those of the checkpoint's run")
        self._epoch, self._position = state.epoch, state.position
        self._order = self._order_of_epoch()

    def _usable(self, rows: list[Row]) -> list[Row]:
        if self._are_usable is None:
            return rows
        return [row for row, is_usable in zip(rows, self._are_usable(rows), strict=True) if is_usable]

    def _step_back(self) -> Row:
        """Moves the cursor back by one row, and returns that row."""
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
    """Returns a random order of the rows that only depends on the arguments, which must not be negative.

    The order sorts raw Philox output, because NumPy guarantees the same raw output of a bit generator in all versions,
    but not the same results of a Generator's methods (NEP 19)."""
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_rows)
    return np.argsort(keys, kind="stable")
