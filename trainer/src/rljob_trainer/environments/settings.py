"""The settings of the environments of a worker process. The controller makes them and sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.environments.description import ClassSpec, EnvironmentDescription
from rljob_trainer.environments.environment_process import START_TIMEOUT_SECONDS


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of every rollout; see `spec.training.environment`."""

    max_turns: int
    max_context_tokens: int
    max_turn_tokens: int | None
    max_seconds: float
    retries: int


@dataclass(frozen=True)
class EnvironmentSettings:
    """The settings of an EnvironmentHost."""

    classes: tuple[ClassSpec, ...]
    descriptions: tuple[EnvironmentDescription, ...]
    limits: EpisodeLimits
    max_open: int
    """Largest number of rollouts at the same time; the others wait."""
    rollouts_per_process: int
    timeout_seconds: float
    """Time limit of one call of the environment."""
    tool_parser: str | None
    starts_new_rows: bool
    """See Conversation; `onRewrite: NewRow`."""
    model_folder: Path
    """The folder of the policy's tokenizer."""
    log_folder: Path
    variables: Mapping[str, str]
    """Environment variables of the processes."""

    @property
    def is_agent(self) -> bool:
        """Whether the rollouts are sessions of an agent."""
        return self.classes[0].is_agent

    @property
    def run_seconds(self) -> float:
        """Time limit of an agent's function: after the last turn it gets the time of one call for its reward."""
        return self.limits.max_seconds + self.timeout_seconds

    @property
    def longest_wait_seconds(self) -> float:
        """The longest time in which all rollouts may wait for their environments, so that no turn is generated."""
        return (1 + self.limits.retries) * (START_TIMEOUT_SECONDS + self.run_seconds)
