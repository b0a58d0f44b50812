"""The coefficient of the KL term from step to step."""

from __future__ import annotations

from rljob_api.v1alpha1.kl import Kl, KlControllerType
from rljob_trainer.algorithms.kl import next_coefficient


class KlCoefficient:
    """What the next step is made with."""

    def __init__(self, kl: Kl) -> None:
        self.kl = kl
        self.value = kl.coefficient

    @property
    def kept(self) -> float | None:
        """What a checkpoint has to keep of the controller."""
        return None if self.kl.controller.type is KlControllerType.FIXED else self.value

    def restore(self, kept: float | None) -> None:
        """As a checkpoint has it. What another controller has made of it does not bind the job's own."""
        if kept is not None and self.kept is not None:
            self.value = kept

    def learned(self, measured: float, num_learned: int) -> None:
        """After a step in which the policy learned from so many responses: `measured` is their KL per token."""
        self.value = next_coefficient(self.kl.controller, self.value, measured, num_learned)
