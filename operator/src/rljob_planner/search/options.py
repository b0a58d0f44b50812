"""What a set of roles may cost on some GPUs: the search's only knowledge of models.

A stage is a part of a step that all sets go through together: it lasts as long as the slowest of them. The names of
stages do not matter here; a set's seconds have one number for each, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Generic, TypeVar

from rljob_planner.search.partitions import RoleSet

Payload = TypeVar("Payload")

StageSeconds = tuple[float, ...]
Cost = Callable[[StageSeconds], float]
"""Of the longest seconds of each stage. It must not fall where one of them rises: the search rests on it."""


@dataclass(frozen=True, slots=True)
class SetOption(Generic[Payload]):
    """A way to run a set of roles."""

    kind: int
    """Of its GPUs: all of a set are of one kind."""
    num_gpus: int
    seconds: StageSeconds
    payload: Payload
    """What it is, for whoever made it."""


Tables = Mapping[RoleSet, Sequence[SetOption[Payload]]]
"""Of each set of roles that may be together its options, of all kinds and numbers of GPUs."""


def is_no_worse(seconds: StageSeconds, other: StageSeconds) -> bool:
    """In every stage."""
    return all(map(le, seconds, other))


def undominated(options: Iterable[SetOption[Payload]]) -> list[SetOption[Payload]]:
    """Without those that another of their kind beats or equals in GPUs and in every stage; the first of equal ones
    stays. Fewest GPUs first."""
    kept: dict[int, list[SetOption[Payload]]] = {}
    for option in sorted(options, key=lambda each: (each.num_gpus, sum(each.seconds))):
        same_kind = kept.setdefault(option.kind, [])
        if not any(is_no_worse(each.seconds, option.seconds) for each in same_kind):
            same_kind.append(option)
    return [option for same_kind in kept.values() for option in same_kind]


def fastest(seconds: Iterable[StageSeconds]) -> StageSeconds:
    """Of each stage the least."""
    return tuple(map(min, zip(*seconds, strict=True)))


def longest(seconds: Iterable[StageSeconds]) -> StageSeconds:
    """Of each stage the most."""
    return tuple(map(max, zip(*seconds, strict=True)))
