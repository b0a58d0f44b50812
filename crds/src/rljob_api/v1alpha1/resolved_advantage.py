"""The chosen advantage without open questions."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType, GroupRelative
from rljob_api.v1alpha1.user_function import Function


@dataclass(frozen=True, slots=True)
class ResolvedGroupRelative:
    """`GroupRelative` with its values."""

    normalize_by_std: bool


@dataclass(frozen=True, slots=True)
class ResolvedAdvantage:
    """The chosen advantage; the block that `type` names is there, and no other."""

    type: AdvantageType
    group_relative: ResolvedGroupRelative | None = None
    function: Function | None = None

    def as_written(self) -> Advantage:
        """The job's form."""
        relative = self.group_relative
        return Advantage(
            type=self.type,
            group_relative=GroupRelative(normalize_by_std=relative.normalize_by_std) if relative else None,
            function=self.function,
        )


def resolve_advantage(chosen: AdvantageType, written: Advantage, default: ResolvedGroupRelative) -> ResolvedAdvantage:
    """Advantage `chosen` with what the job has written; `default` are the recipe's settings."""
    if chosen is AdvantageType.FUNCTION:
        return ResolvedAdvantage(chosen, function=written.function)
    by_std = written.group_relative.normalize_by_std if written.group_relative else None
    by_std = default.normalize_by_std if by_std is None else by_std
    return ResolvedAdvantage(chosen, group_relative=ResolvedGroupRelative(normalize_by_std=by_std))
