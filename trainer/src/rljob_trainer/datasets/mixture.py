"""Draws prompts from several datasets in fixed proportions.

Among m datasets, a dataset that n prompts were drawn from is eligible for prompt number k (from 1) if its share is at
least n + c prompts of k, with c = 1 / (2m - 2). The next prompt is from the eligible dataset with the smallest
(n + 1 - c) / weight, at equal values from the first one in the list (Tijdeman, The chairman assignment problem,
Discrete Mathematics 32, 1980). So the order of the datasets is a function of the weights and of these numbers only.
Among the first k prompts, the number of prompts of a dataset differs from k x share by at most 1 - c (no method has a
smaller limit that holds for all shares). So among any consecutive prompts it differs by less than 2. The calculation
uses integers, because ties are common. Each dataset has an order and epochs of its own.

Prompts that are skipped when they are drawn do not count. If the weights or the names are changed, a resumed run starts
to count at 0, and each dataset continues at its position.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
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
        weights = [Fraction(str(source.weight)) for source in self.sources]
        scale = math.lcm(*(weight.denominator for weight in weights))
        self._weights = [int(weight * scale) for weight in weights]
        self._order = bytearray()
        """The dataset of each prompt since the run was started or resumed."""
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
        no later row had been drawn. Goes back at most to the restored position."""
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
        of a dataset that the job does not name any more is dropped. Raises ConfigurationError if the number of rows,
        the seed or the shuffle setting of a dataset has changed; other changes of its prompts are logged."""
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
                "new weights apply from this step on; each dataset continues at its saved position",
                *(_text(before), _text(now)),
            )

    def _draw(self) -> int:
        """Counts the next prompt, and returns the number of its dataset."""
        total, num_prompts = sum(self._weights), sum(self._num_drawn) + 1
        inverse = max(2, 2 * len(self.sources) - 2)  # 1 / c
        eligible = [
            ((count + 1) * inverse - 1, weight, number)
            for number, (weight, count) in enumerate(zip(self._weights, self._num_drawn, strict=True))
            if (weight * num_prompts - count * total) * inverse >= total
        ]
        priority, weight, number = eligible[0]
        for other in eligible[1:]:
            if other[0] * weight < priority * other[1]:
                priority, weight, number = other
        self._num_drawn[number] += 1
        self._order.append(number)
        return number

    def _undraw(self) -> int:
        """Reverts the last `_draw`."""
        assert self._order, "nothing was drawn since the run was resumed"
        number = self._order.pop()
        self._num_drawn[number] -= 1
        return number


def _text(sources: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name}: {weight:g}" for name, weight in sources)
