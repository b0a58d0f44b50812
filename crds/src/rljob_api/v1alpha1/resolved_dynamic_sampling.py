"""Dynamic sampling without open questions."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.dynamic_sampling import DynamicSampling, MaxRoundsPolicy

MAX_ROUNDS = 10
"""What verl's recipe of DAPO has."""


@dataclass(frozen=True, slots=True)
class ResolvedDynamicSampling:
    """`DynamicSampling` with its values, where it is on."""

    max_rounds: int = MAX_ROUNDS
    on_max_rounds: MaxRoundsPolicy = MaxRoundsPolicy.FAIL
    reward: str | None = None
    """None: the weighted sums alone are compared."""

    def as_written(self) -> DynamicSampling:
        """The job's form."""
        return DynamicSampling(max_rounds=self.max_rounds, on_max_rounds=self.on_max_rounds, reward=self.reward)


def resolve_dynamic_sampling(asked: DynamicSampling) -> ResolvedDynamicSampling | None:
    """With a value for every field; None where it is off."""
    if not asked.enabled:
        return None
    return ResolvedDynamicSampling(
        asked.max_rounds or MAX_ROUNDS, asked.on_max_rounds or MaxRoundsPolicy.FAIL, asked.reward
    )
