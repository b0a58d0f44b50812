"""Runs an agent's function in an environment process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.environments.description import ClassSpec, load_function
from rljob_trainer.environments.returned_values import as_result
from rljob_trainer.environments.user_calls import UserCall, UserCalls
from rljob_trainer.environments.user_objects import ERROR, CallError, Report, checked_result, result_of


@dataclass(frozen=True)
class AgentSession:
    """What an agent's function gets as `session`: where and how it talks with the policy."""

    base_url: str
    """Of an OpenAI-compatible endpoint, such as `http://127.0.0.1:40001/v1`."""
    api_key: str
    """The key of this session. It is invalid after the function has returned."""
    model: str
    """The name to use for the policy."""
    deadline: float
    """Unix time at which the policy stops answering."""
    seed: int
    """The same in all rollouts of a group. `random` and NumPy are seeded with it."""


@dataclass(frozen=True)
class LoadedAgent:
    """An agent's function."""

    function: Callable[..., object]
    spec: ClassSpec

    @classmethod
    def load(cls, spec: ClassSpec) -> LoadedAgent:
        """Imports the function. Raises ConfigurationError if it cannot be used."""
        return cls(load_function(spec), spec)


class AgentRuns:
    """Answers the requests to run a function."""

    def __init__(self, agents: Sequence[LoadedAgent], calls: UserCalls) -> None:
        self._agents = {each.spec.name: each for each in agents}
        self._calls = calls

    async def run(
        self,
        rollout: int,
        name: str,
        session: Mapping[str, object],
        row: Mapping[str, object],
        seed: int,
        report: Report,
    ) -> object:
        """Calls the function for a whole rollout, and returns its result. Raises CallError if it fails. `report`: see
        UserCall."""
        agent = self._agents[name]
        match session:
            case {
                "base_url": str() as url,
                "api_key": str() as key,
                "model": str() as model,
                "deadline": float() as end,
            }:
                given = AgentSession(url, key, model, end, seed)
            case _:
                raise CallError(ERROR, f"not a session: {session!r:.200}")
        self._calls.random_states.seed(rollout, seed)
        call = UserCall(rollout, report, agent.function, (given, dict(row)), dict(agent.spec.arguments))
        shown = agent.spec.path
        return checked_result(result_of(await self._calls.run(call), shown), shown, as_result)
