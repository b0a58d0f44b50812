"""The best options of sets that are given, each on a kind of GPU that is given, by labels.

A label is a choice of options for the first sets: how many GPUs it takes, and the longest seconds of each stage so far.
Of two labels for the same sets, one that takes as many GPUs or more and is as slow or slower in every stage can be
forgotten: whatever is added to it, the other one is no worse with it, because the cost does not fall where a stage gets
longer (`options.Cost`). So what is found is the best there is, as if all choices had been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from rljob_planner.search.options import Cost, Payload, SetOption, StageSeconds, fastest, is_no_worse, longest

Choices = Sequence[SetOption[Payload]]
"""Options of one set, all of one kind."""


@dataclass(frozen=True, slots=True)
class _Label(Generic[Payload]):
    num_gpus: int
    """Of the kind that is being handed out; of kinds that are through nothing needs to be known."""
    seconds: StageSeconds
    """Those of the sets that are through, and no less than what the others will need at least."""
    chosen: tuple[SetOption[Payload], ...]


def best_choice(
    sets: Sequence[Choices[Payload]], capacity: Sequence[int], cost: Cost, below: float
) -> tuple[SetOption[Payload], ...] | None:
    """One option for each set, in their order, whose cost is the least of all choices within the `capacity` of each
    kind; None where no choice costs less than `below`."""
    kept = _worthwhile(sets, capacity, cost, below)
    if kept is None:
        return None
    # Sets of one kind follow each other. Those with few options come first: fewer labels on the way.
    order = sorted(range(len(kept)), key=lambda place: (kept[place][0].kind, len(kept[place])))
    found = _by_labels([kept[place] for place in order], capacity, cost, below)
    if found is None:
        return None
    by_place = dict(zip(order, found, strict=True))
    return _frugal([kept[place] for place in range(len(kept))], [by_place[place] for place in range(len(kept))])


def _worthwhile(
    sets: Sequence[Choices[Payload]], capacity: Sequence[int], cost: Cost, below: float
) -> list[list[SetOption[Payload]]] | None:
    """The options that could be part of something cheaper than `below`: those that leave enough GPUs for the other
    sets, and are cheap enough if all others were at their fastest at once. None where a set has none left."""
    kept = [list(options) for options in sets]
    while True:
        if not all(kept):
            return None
        num_before = sum(map(len, kept))
        fewest = [min(option.num_gpus for option in options) for options in kept]
        at_best = [fastest(option.seconds for option in options) for options in kept]
        for place, options in enumerate(kept):
            kind = options[0].kind
            others = [other for other in range(len(kept)) if other != place]
            room = capacity[kind] - sum(fewest[other] for other in others if kept[other][0].kind == kind)
            beside = longest([at_best[other] for other in others]) if others else at_best[place]
            kept[place] = [
                option
                for option in options
                if option.num_gpus <= room and cost(tuple(map(max, option.seconds, beside))) < below
            ]
            if not kept[place]:
                return None
        if sum(map(len, kept)) == num_before:
            return kept


def _by_labels(
    sets: Sequence[Choices[Payload]], capacity: Sequence[int], cost: Cost, below: float
) -> tuple[SetOption[Payload], ...] | None:
    num_stages = len(sets[0][0].seconds)
    labels: list[_Label[Payload]] = [_Label(0, (0.0,) * num_stages, ())]
    for place, options in enumerate(sets):
        kind = options[0].kind
        rest = _Rest(sets[place + 1 :], kind, num_stages)
        room = capacity[kind] - rest.fewest
        fresh: list[tuple[float, _Label[Payload]]] = []
        for label in labels:
            for option in options:
                num_gpus = label.num_gpus + option.num_gpus
                if num_gpus > room:
                    continue
                seconds = tuple(map(max, label.seconds, option.seconds, rest.fastest_within(capacity[kind] - num_gpus)))
                bound = cost(seconds)
                if bound < below:
                    fresh.append((bound, _Label(num_gpus, seconds, (*label.chosen, option))))
        if place + 1 == len(sets):
            return min(fresh, key=lambda each: each[0])[1].chosen if fresh else None
        is_last_of_kind = sets[place + 1][0].kind != kind
        labels = _pareto([label for _, label in fresh], forgets_gpus=is_last_of_kind)
    return None


class _Rest(Generic[Payload]):
    """What sets that have no option yet need at least."""

    def __init__(self, sets: Sequence[Choices[Payload]], kind: int, num_stages: int) -> None:
        self._same = [options for options in sets if options[0].kind == kind]
        self._fewest = [min(option.num_gpus for option in options) for options in self._same]
        self.fewest = sum(self._fewest)
        others = [fastest(option.seconds for option in options) for options in sets if options[0].kind != kind]
        none = (0.0,) * num_stages
        self._others = tuple(map(max, none, none, *others))
        self._known: dict[int, StageSeconds] = {}

    def fastest_within(self, num_gpus: int) -> StageSeconds:
        """Of each stage, if every one of them had all that the others do not need of so many GPUs of this kind."""
        known = self._known.get(num_gpus)
        if known is None:
            known = self._others
            for options, fewest in zip(self._same, self._fewest, strict=True):
                room = num_gpus - self.fewest + fewest
                possible = [option for option in options if option.num_gpus <= room]
                known = tuple(map(max, known, fastest(option.seconds for option in possible)))
            self._known[num_gpus] = known
        return known


def _pareto(labels: list[_Label[Payload]], *, forgets_gpus: bool) -> list[_Label[Payload]]:
    """Those that no other one beats or equals; `forgets_gpus`: the kind is through, and what it took does not matter
    any more."""
    if forgets_gpus:
        labels = [_Label(0, label.seconds, label.chosen) for label in labels]
    fewest: dict[StageSeconds, _Label[Payload]] = {}
    for label in labels:
        known = fewest.get(label.seconds)
        if known is None or label.num_gpus < known.num_gpus:
            fewest[label.seconds] = label
    kept: list[_Label[Payload]] = []
    for label in sorted(fewest.values(), key=lambda each: (each.num_gpus, sum(each.seconds))):
        if not any(is_no_worse(each.seconds, label.seconds) for each in kept):
            kept.append(label)
    return kept


def _frugal(sets: Sequence[Choices[Payload]], choice: Sequence[SetOption[Payload]]) -> tuple[SetOption[Payload], ...]:
    """As fast in every stage, with as few GPUs as that takes: no set needs to be faster than the slowest one."""
    limit = longest(option.seconds for option in choice)
    return tuple(
        min(
            (option for option in options if is_no_worse(option.seconds, limit)),
            key=lambda option: (option.num_gpus, sum(option.seconds)),
        )
        for options in sets
    )
