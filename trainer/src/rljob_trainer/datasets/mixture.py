"""Draws prompts from several datasets in fixed proportions.

The next prompt is from the dataset with the smallest (n + 1/2) / weight, where n is the number of prompts that were
drawn from it (Webster's method; at equal values the first one in the list). So the order of the datasets is a function
of the weights and of these numbers only, and every range of consecutive prompts has the right proportions: with m
datasets, the first k prompts have k x share +- (1/2 + m x share / 2) prompts of each. Each dataset has an order and
epochs of its own.

Prompts that are skipped when they are drawn do not count. If the weights or the names are changed, a resumed run counts
anew from there on, and each dataset continues at its position.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count, PositiveNumber, ShortText
from rljob_trainer.datasets.cursor import CursorState, DrawnRow, PromptCursor, Row

log = logging.getLogger(__name__)


class SourceState(WireModel):
    """The position in one dataset."""

    name: ShortText
    weight: PositiveNumber
    num_drawn: Count
    """Prompts that were drawn from it since the weights or names were changed last."""
    cursor: CursorState


class MixtureState(WireModel):
    """The position of a run in several datasets; part of each checkpoint."""

    ordinal: Count
    """Number of prompts that were drawn from all datasets."""
    sources: Annotated[tuple[SourceState, ...], Field(max_length=16)]


@dataclass(frozen=True)
class Source(Generic[Row]):
    """A dataset of a mixture."""

    name: str
    weight: float
    cursor: PromptCursor[Row]


class MixtureCursor(Generic[Row]):
    """The stream of prompts of several datasets. The ordinal of a row is its number in this stream."""

    def __init__(self, sources: Sequence[Source[Row]]) -> None:
        self.sources = tuple(sources)
        self._num_drawn = [0] * len(self.sources)
        """Prompts drawn from each dataset since the weights were changed last."""
        self._ordinal = 0

    @property
    def num_skipped(self) -> int:
        """Number of rows skipped so far, see `PromptCursor.num_skipped`."""
        return sum(source.cursor.num_skipped for source in self.sources)

    @property
    def epochs(self) -> Mapping[str, float]:
        """Epochs of each dataset that were drawn, by name."""
        return {source.name: source.cursor.epochs for source in self.sources}

    def next_batch(self, num_rows: int) -> list[DrawnRow[Row]]:
        """Draws the next rows. Raises DatasetError if no row of a dataset is usable."""
        order = [self._draw() for _ in range(num_rows)]
        counts = Counter(order)
        rows = {each: iter(self.sources[each].cursor.next_batch(count)) for each, count in counts.items()}
        first, self._ordinal = self._ordinal, self._ordinal + num_rows
        return [DrawnRow(ordinal, next(rows[each]).row) for ordinal, each in enumerate(order, first)]

    def rewind(self, ordinal: int) -> None:
        """Goes back: the stream continues directly after the drawn row with this ordinal. Afterwards the state is as if
        no later row had been drawn. Goes back at most to the first row after the weights were changed."""
        assert -1 <= ordinal < self._ordinal, f"row {ordinal} was not drawn, the next row is {self._ordinal}"
        counts = Counter(self._undraw() for _ in range(self._ordinal - ordinal - 1))
        for source, count in counts.items():
            self.sources[source].cursor.go_back(count)
        self._ordinal = ordinal + 1

    def state(self) -> MixtureState:
        """Returns the state for a checkpoint."""
        sources = (
            SourceState(name=source.name, weight=source.weight, num_drawn=count, cursor=source.cursor.state())
            for source, count in zip(self.sources, self._num_drawn, strict=True)
        )
        return MixtureState(ordinal=self._ordinal, sources=tuple(sources))

    def restore(self, state: MixtureState) -> None:
        """Restores a saved position. A dataset that the checkpoint does not know begins at its start, and the position
        of a dataset that the job does not name any more is dropped. Raises ConfigurationError if the rows of a dataset
        have changed."""
        saved = {each.name: each for each in state.sources}
        for source in self.sources:
            if source.name in saved:
                source.cursor.restore(saved[source.name].cursor)
        self._ordinal = state.ordinal
        self._num_drawn = [each.num_drawn for each in state.sources]
        before = [(each.name, each.weight) for each in state.sources]
        now = [(source.name, source.weight) for source in self.sources]
        if before != now:
            self._num_drawn = [0] * len(self.sources)
            log.warning(
                "spec.training.datasets: names or weights were %s when the checkpoint was saved, and are %s now; the "
                "new proportions hold from here on, and each dataset continues at its position",
                *(_text(before), _text(now)),
            )

    def _draw(self) -> int:
        """Counts the next prompt, and returns the number of its dataset."""
        priorities = [
            ((count + 0.5) / source.weight, number)
            for number, (source, count) in enumerate(zip(self.sources, self._num_drawn, strict=True))
        ]
        number = min(priorities)[1]
        self._num_drawn[number] += 1
        return number

    def _undraw(self) -> int:
        """Reverts the last `_draw`: its value was the largest one so far."""
        priorities = [
            ((count - 0.5) / source.weight, number)
            for number, (source, count) in enumerate(zip(self.sources, self._num_drawn, strict=True))
            if count
        ]
        assert priorities, "nothing was drawn since the weights were changed"
        number = max(priorities)[1]
        self._num_drawn[number] -= 1
        return number


def _text(sources: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name}: {weight:g}" for name, weight in sources)
