"""Environments of the `gymnasium` library whose state can be written as text, such as FrozenLake and Taxi."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rljob_trainer.environments.adapters.missing_package import MissingPackageError
from rljob_trainer.rewards.final_message import final_message

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise MissingPackageError("gymnasium", "gymnasium") from error

ANSI = "ansi"
_COLOURED = re.compile(r"\x1b\[(?:\d+;)*[34](\d)(?:;1)?m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class Gymnasium:
    """The policy writes an action into each turn, and reads the state after it. The reward is the sum of the rewards.

    The last number or name of an action in a turn counts. A turn without one changes nothing; the policy is told what
    it may write. The state is what the mode `ansi` shows if the environment has it, where a coloured letter is written
    as `[S red]`; otherwise it is the observation.
    """

    reusable = True

    def __init__(
        self,
        id: str,
        config: Mapping[str, object] | None = None,
        actions: Sequence[str] | None = None,
        instructions: str = "",
    ) -> None:
        """
        Args:
            id: Name of the environment, for example `FrozenLake-v1`; `package.module:Name-v0` imports the module first.
            config: Keyword arguments of `gymnasium.make`, for example `{is_slippery: false}`.
            actions: Names of the actions, in the order of their numbers. When unset, actions are numbers.
            instructions: Text before the first state.
        """
        settings = dict(config or {})
        self._environment = gymnasium.make(id, **settings)
        if "render_mode" not in settings and ANSI in self._environment.metadata.get("render_modes", []):
            self._environment = gymnasium.make(id, render_mode=ANSI, **settings)
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id} has the actions {space}; only environments with numbered actions can be used")
        if actions is not None and len(actions) != space.n:
            raise ValueError(f"`actions` must have {space.n} names, as many as {id} has actions (seen: {len(actions)})")
        numbers = range(int(space.start), int(space.start + space.n))
        self._numbers = {str(number): number for number in numbers}
        self._names = dict(zip(map(str.lower, actions or self._numbers), numbers, strict=True))
        words = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        self._action = re.compile(rf"(?<!\w)(?:-?\d+|{words})(?!\w)", re.IGNORECASE)
        self._instructions = instructions
        self._reward = 0.0

    def reset(self, seed: int, **row: object) -> str:
        """Begins with the state of this seed."""
        del row
        self._reward = 0.0
        observation, _ = self._environment.reset(seed=int(seed))
        return "\n".join(filter(None, [self._instructions, self._state(observation), self._allowed()]))

    def respond(self, message: Mapping[str, str]) -> str | None:
        """Takes the action."""
        found = self._action.findall(final_message(message["content"]))
        written = found[-1].lower() if found else ""
        number = self._names.get(written, self._numbers.get(written))
        if number is None:
            return f"There is no action in your answer. {self._allowed()}"
        observation, reward, is_terminated, is_truncated, _ = self._environment.step(number)
        self._reward += float(reward)
        return None if is_terminated or is_truncated else self._state(observation)

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self._reward

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()

    def _allowed(self) -> str:
        return f"Actions: {', '.join(self._names)}."

    def _state(self, observation: object) -> str:
        if self._environment.render_mode != ANSI:
            return str(observation)
        return _COLOURED.sub(
            lambda found: f"[{found[2]} {_COLOURS[int(found[1])]}]", self._environment.render()
        ).strip()
