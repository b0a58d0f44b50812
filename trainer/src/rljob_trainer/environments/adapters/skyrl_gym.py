"""Environments of the `skyrl-gym` library: those that it has, and classes that were written for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_trainer.environments.adapters.missing_package import MissingPackageError

try:
    import omegaconf
    import skyrl_gym
    from skyrl_gym.envs.registration import EnvSpec
except ModuleNotFoundError as error:
    raise MissingPackageError("skyrl-gym", "skyrl-gym") from error

Messages = Sequence[Mapping[str, str]]


class SkyRLGym:
    """One object of the library for each rollout. The reward is the sum of the rewards of the turns."""

    def __init__(
        self,
        id: str,
        entry_point: str | None = None,
        config: Mapping[str, object] | None = None,
        prompt_field: str = "prompt",
    ) -> None:
        """
        Args:
            id: Name of the environment, for example `gsm8k_multi_turn`.
            entry_point: `package.module:Class` of an environment that the library does not have.
            config: The `env_config` of the environment.
            prompt_field: The column with the prompt: a string or a list of messages. The constructor gets the whole row
                as `extras`.
        """
        self._spec = skyrl_gym.spec(id) if entry_point is None else EnvSpec(id, entry_point)
        self._config = omegaconf.OmegaConf.create(dict(config or {}))
        self._prompt_field = prompt_field
        self._reward = 0.0

    def reset(self, **row: object) -> Messages:
        """Makes the environment of this row."""
        self._environment = self._spec.make(env_config=self._config, extras=row)
        prompt = row.get(self._prompt_field, [])
        messages, _ = self._environment.init(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        return list(messages)

    def respond(self, message: Mapping[str, str]) -> Messages | None:
        """Makes a step with the text of the turn."""
        result = self._environment.step(message["content"])
        self._reward += float(result["reward"] or 0.0)
        return None if result["done"] else list(result["observations"])

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self._reward

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()
