"""The chosen advantage without open questions."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.advantage import (
    Advantage,
    AdvantageType,
    Gae,
    GroupRelative,
    GroupRelativePassAtK,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
)
from rljob_api.v1alpha1.user_function import Function


@dataclass(frozen=True, slots=True)
class ResolvedGroupRelative:
    """`GroupRelative` with its values."""

    normalize_by_std: bool


@dataclass(frozen=True, slots=True)
class ResolvedAdvantage:
    """The chosen advantage; the block that `type` names is there, and no other. Blocks whose defaults no recipe changes
    are as a job writes them."""

    type: AdvantageType
    group_relative: ResolvedGroupRelative | None = None
    group_relative_pass_at_k: GroupRelativePassAtK | None = None
    reinforce_plus_plus: ReinforcePlusPlus | None = None
    gae: Gae | None = None
    optimal_token_baseline: OptimalTokenBaseline | None = None
    function: Function | None = None

    def as_written(self) -> Advantage:
        """The job's form."""
        relative = self.group_relative
        return Advantage(
            type=self.type,
            group_relative=GroupRelative(normalize_by_std=relative.normalize_by_std) if relative else None,
            group_relative_pass_at_k=self.group_relative_pass_at_k,
            reinforce_plus_plus=self.reinforce_plus_plus,
            gae=self.gae,
            optimal_token_baseline=self.optimal_token_baseline,
            function=self.function,
        )


def resolve_advantage(chosen: AdvantageType, written: Advantage, default: ResolvedGroupRelative) -> ResolvedAdvantage:
    """Advantage `chosen` with what the job has written; `default` are the recipe's settings."""
    match chosen:
        case AdvantageType.GROUP_RELATIVE:
            by_std = written.group_relative.normalize_by_std if written.group_relative else None
            by_std = default.normalize_by_std if by_std is None else by_std
            return ResolvedAdvantage(chosen, group_relative=ResolvedGroupRelative(normalize_by_std=by_std))
        case AdvantageType.GROUP_RELATIVE_PASS_AT_K:
            block = written.group_relative_pass_at_k or GroupRelativePassAtK()
            return ResolvedAdvantage(chosen, group_relative_pass_at_k=block)
        case AdvantageType.REINFORCE_PLUS_PLUS:
            return ResolvedAdvantage(chosen, reinforce_plus_plus=written.reinforce_plus_plus or ReinforcePlusPlus())
        case AdvantageType.GAE:
            return ResolvedAdvantage(chosen, gae=written.gae or Gae())
        case AdvantageType.OPTIMAL_TOKEN_BASELINE:
            tail = written.optimal_token_baseline or OptimalTokenBaseline()
            return ResolvedAdvantage(chosen, optimal_token_baseline=tail)
        case AdvantageType.FUNCTION:
            return ResolvedAdvantage(chosen, function=written.function)
        case _:
            return ResolvedAdvantage(chosen)
