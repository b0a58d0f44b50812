"""The order in which prompts are visited: a function of seed and epoch, so that a resumed run goes on exactly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag
from rljob_trainer.batch.shuffle import shuffled_order
from rljob_trainer.errors import ConfigurationError

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
    digest: str | None = None
    """Of the rows. None in checkpoints of earlier versions."""


class PromptCursor(Generic[Row]):
    """Endless batches over the rows. Every epoch visits each row once, in an order of its own when shuffling.

    A batch may reach over the end of an epoch, and over several when there are fewer rows than a batch takes.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool, digest: str | None = None) -> None:
        """`digest`: of the rows, to tell whether they are those of a checkpoint. Raises ConfigurationError if there are
        no rows."""
        if not rows:
            raise ConfigurationError("spec.training.dataset: no rows are left to train on; use another dataset")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._epoch = 0
        self._position = 0
        self._order = self._order_of_epoch()

    def next_batch(self, num_rows: int) -> list[Row]:
        """The next rows; moves on."""
        batch: list[Row] = []
        while len(batch) < num_rows:
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of_epoch()
            end = min(len(self._rows), self._position + num_rows - len(batch))
            batch += [self._rows[index] for index in self._order[self._position : end]]
            self._position = end
        return batch

    def give_back(self, num_rows: int) -> None:
        """Goes back: the last so many rows come again. As many must have been drawn. The state is then what it would be
        had they not been: at the end of an epoch, not at the beginning of the next."""
        if not num_rows:
            return
        self._position -= num_rows
        while self._position < 0 or (self._position == 0 and self._epoch > 0):
            assert self._epoch > 0, "more rows than were drawn"
            self._epoch, self._position = self._epoch - 1, self._position + len(self._rows)
            self._order = self._order_of_epoch()

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
        if state.digest and here.digest and state.digest != here.digest:
            log.warning("spec.training.dataset: the prompts are not those that the checkpoint's run began with")
        self._epoch, self._position = state.epoch, state.position
        self._order = self._order_of_epoch()

    def _order_of_epoch(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._rows)))
        return [int(index) for index in shuffled_order(len(self._rows), self._seed, self._epoch)]
