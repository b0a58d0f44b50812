"""The choices of a set of roles that share GPUs: one of each role, whose memory fits together.

All states are there at once, and on top of them what the passes of one role need, or the rollout engine. Of the ways
that fit those count that no other one beats in every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add

from rljob_planner.search.options import StageSeconds, fastest, is_no_worse
from rljob_planner.search.role_choices import NO_SECONDS, RoleChoice


@dataclass(frozen=True, slots=True)
class SetChoice:
    """Roles on the same GPUs."""

    choices: tuple[RoleChoice, ...]
    seconds: StageSeconds


def fastest_that_fit(
    units: Sequence[Sequence[RoleChoice]], limit: float, fits: Callable[[SetChoice], bool]
) -> list[SetChoice]:
    """One choice of each unit. `limit`: bytes of one GPU. `fits` may refuse what fits by its sums; it is asked of those
    only that would be kept."""
    if not all(units):
        return []
    kept: list[SetChoice] = []
    for found in _Walk(units, limit).below((), NO_SECONDS, 0.0, kept):
        if fits(found):
            kept[:] = [each for each in kept if not is_no_worse(found.seconds, each.seconds)]
            kept.append(found)
    return kept


class _Walk:
    """Through all combinations but those that cannot fit, or are beaten by one that was kept."""

    def __init__(self, units: Sequence[Sequence[RoleChoice]], limit: float) -> None:
        self._units = units
        self._limit = limit
        at_best = [fastest(choice.seconds for choice in unit) for unit in units]
        self._seconds_after = [NO_SECONDS]
        self._state_after = [0.0]
        for unit, seconds in zip(reversed(units), reversed(at_best), strict=True):
            self._seconds_after.insert(0, tuple(map(add, seconds, self._seconds_after[0])))
            self._state_after.insert(0, min(choice.state for choice in unit) + self._state_after[0])

    def below(
        self, chosen: tuple[RoleChoice, ...], seconds: StageSeconds, state: float, kept: Sequence[SetChoice]
    ) -> Iterator[SetChoice]:
        """All combinations that begin with `chosen`; `kept` grows meanwhile."""
        place = len(chosen)
        if place == len(self._units):
            yield SetChoice(chosen, seconds)
            return
        for choice in self._units[place]:
            both = (*chosen, choice)
            total = state + choice.state
            if not self._may_fit(both, total + self._state_after[place + 1]):
                continue
            now = tuple(map(add, seconds, choice.seconds))
            at_best = tuple(map(add, now, self._seconds_after[place + 1]))
            if any(is_no_worse(each.seconds, at_best) for each in kept):
                continue
            yield from self.below(both, now, total, kept)

    def _may_fit(self, chosen: Sequence[RoleChoice], state: float) -> bool:
        asleep = max(choice.asleep for choice in chosen)
        awake = max(choice.awake for choice in chosen)
        active = max(choice.active for choice in chosen)
        return state + max(awake, asleep + active) <= self._limit
