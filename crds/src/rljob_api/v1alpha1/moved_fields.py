"""Fields of earlier versions that have another place now, so that a file with an old name can be told the new one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

Place = tuple[str, ...]

_ALGORITHM = ("spec", "training", "algorithm")
_CLIPPED = (*_ALGORITHM, "loss", "clipped")
_REWARD = ("spec", "training", "reward")
_REWARDS = ("spec", "training", "rewards")

MOVED_FIELDS: Mapping[Place, Place] = MappingProxyType(
    {
        (*_ALGORITHM, "grpo", "normalizeByStd"): (*_ALGORITHM, "advantage", "groupRelative", "normalizeByStd"),
        (*_ALGORITHM, "grpo", "dropZeroVarianceGroups"): (*_ALGORITHM, "dropZeroVarianceGroups"),
        (*_ALGORITHM, "clipRatioLow"): (*_CLIPPED, "clipRatioLow"),
        (*_ALGORITHM, "clipRatioHigh"): (*_CLIPPED, "clipRatioHigh"),
        (*_ALGORITHM, "dualClipRatio"): (*_CLIPPED, "dualClipRatio"),
        (*_ALGORITHM, "lossAggregation"): (*_ALGORITHM, "aggregation"),
        _REWARD: _REWARDS,
    }
)
"""Old place to new place, in wire names."""

ENTRY_IS_NOW: Mapping[Place, str] = MappingProxyType(
    {_REWARD: "as an entry of a list, `rewards: [{type: MathAnswer}]`,"}
)
"""Of a field that is an entry of a list now: how that is written in the new place."""

NULL_IS_NOW: Mapping[Place, str] = MappingProxyType({(*_ALGORITHM, "dualClipRatio"): "0"})
"""Of a field whose null had a meaning: how that is written in the new place."""


def was_a_block(place: tuple[str | int, ...]) -> bool:
    """Whether fields that have moved once stood below this place, where nothing may stand now."""
    return any(len(place) < len(old) and old[: len(place)] == place for old in MOVED_FIELDS)


def is_told_its_new_name(place: tuple[str | int, ...], others: Iterable[tuple[str | int, ...]]) -> bool:
    """Whether what is missing at this place stands at its old one, which is among the others."""
    return any(MOVED_FIELDS.get(tuple(map(str, other))) == place for other in others)
