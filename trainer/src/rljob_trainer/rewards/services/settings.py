"""The settings of rewards that call a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import variable_or_none


@dataclass(frozen=True)
class JudgeSettings:
    """The settings of a judge; the rate limits are those of one scoring process."""

    where: str
    """The field of the reward, such as `spec.training.rewards[0] (reward style)`."""
    url: str
    """Without `/chat/completions`."""
    model: str
    key_variable: str | None
    rubric: str
    pattern: str
    scale: tuple[float, float] | None
    """The numbers that become 0 and 1; None if the judge answers with a label."""
    labels: Mapping[str, float]
    request: Mapping[str, object]
    """Further fields of each request; they replace fields of DEFAULT_REQUEST with the same name."""
    timeout_seconds: float
    requests_per_minute: int | None
    tokens_per_minute: int | None
    prompt_price: float
    """Price of one million prompt tokens."""
    completion_price: float
    """Price of one million completion tokens."""

    @property
    def name(self) -> str:
        """The judge's name in messages."""
        return f"the judge {self.model}"


@dataclass(frozen=True)
class RemoteSettings:
    """The settings of a reward server."""

    where: str
    """The field of the reward, such as `spec.training.rewards[0] (reward style)`."""
    url: str
    key_variable: str | None
    timeout_seconds: float

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return f"the reward server {self.url}"


def key_of(variable: str | None, where: str) -> str | None:
    """The key in this environment variable. Raises ConfigurationError if the variable is not set."""
    if variable is None:
        return None
    # A Secret that was made from a file often ends with a line end.
    if not (key := (variable_or_none(variable) or "").strip()):
        raise ConfigurationError(
            f"{where}: keyVariable: the environment variable {variable} is not set; set it in spec.env, from a Secret"
        )
    return key
