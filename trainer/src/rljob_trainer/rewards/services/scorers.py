"""Scorers that call a service. Only the scoring processes of these rewards import the code that calls it, because
asyncio and aiohttp take time and memory to load."""

from __future__ import annotations

from rljob_trainer.rewards.base import AsyncCalls
from rljob_trainer.rewards.services.settings import JudgeSettings, RemoteSettings


class JudgeScorer(JudgeSettings):
    """Scores responses with a judge."""

    def load(self) -> AsyncCalls:
        """Raises ConfigurationError if the environment variable of the key is not set."""
        from rljob_trainer.rewards.services.judge import Judge

        judge = Judge(self)
        return AsyncCalls(judge.scores, has_own_limits=True, probe=judge.probe)


class RemoteScorer(RemoteSettings):
    """Scores responses with a reward server."""

    def load(self) -> AsyncCalls:
        """Raises ConfigurationError if the environment variable of the key is not set."""
        from rljob_trainer.rewards.services.reward_server import RewardServer

        server = RewardServer(self)
        return AsyncCalls(server.scores, has_own_limits=True, probe=server.probe)
