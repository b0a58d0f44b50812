"""What the rollouts of agents share in one worker process: the endpoint and the chat templates."""

from __future__ import annotations

from rljob_trainer.environments.engine_client import EngineClient
from rljob_trainer.environments.environment_pool import EnvironmentProcesses
from rljob_trainer.environments.episode import EpisodeRequest
from rljob_trainer.environments.session import AgentEpisode, SessionTemplates
from rljob_trainer.environments.session_server import SessionServer
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.models.tokenizer import Tokenizer


class AgentHost:
    """Makes the rollouts of agents."""

    def __init__(self, tokenizer: Tokenizer, settings: EnvironmentSettings) -> None:
        self.server = SessionServer()
        self._templates = SessionTemplates(tokenizer, settings.tool_parser)
        self._settings = settings
        self._description = settings.descriptions[0]

    def episode(self, request: EpisodeRequest, processes: EnvironmentProcesses, engine: EngineClient) -> AgentEpisode:
        """Returns a rollout that has not begun. The server must have started."""
        return AgentEpisode(
            request,
            self._settings.limits,
            self._templates,
            processes,
            engine,
            self.server,
            name=self._description.name,
            needs_reward=self._description.has_reward,
            may_rewrite=self._settings.may_rewrite,
            starts_new_rows=self._settings.starts_new_rows,
        )
