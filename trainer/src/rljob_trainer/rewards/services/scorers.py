"""Rewards that call a service. Only their scoring processes import the code that calls it, because event loops and HTTP
need time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.rewards.base import AsyncCalls
from rljob_trainer.rewards.services.settings import JudgeSettings, RemoteSettings


@dataclass(frozen=True)
class JudgeScorer(JudgeSettings):
    """A language model that scores responses by a rubric."""

    @property
    def name(self) -> str:
        """The judge's model."""
        return f"the judge {self.model}"

    def load(self) -> AsyncCalls:
        """Raises ConfigurationError if the variable of the key is not set."""
        from rljob_trainer.rewards.services.judge import Judge

        judge = Judge(self)
        return AsyncCalls(judge.scores, has_own_limits=True, probe=judge.probe)


@dataclass(frozen=True)
class RemoteScorer(RemoteSettings):
    """A reward server."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"the reward server {self.url}"

    def load(self) -> AsyncCalls:
        """Raises ConfigurationError if the variable of the key is not set."""
        from rljob_trainer.rewards.services.remote import RewardServer

        server = RewardServer(self)
        return AsyncCalls(server.scores, has_own_limits=True, probe=server.probe)
