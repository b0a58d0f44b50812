"""Environments: a rollout is a conversation of several turns with an object of the user's class, such as a game."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, JsonValue, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import rule, union_rules, unique_rule
from rljob_api.scalars import (
    MAX_COUNT,
    REWARD_NAME,
    Count,
    FunctionPath,
    Integer,
    PositiveCount,
    ShortText,
    TimeLimit,
)

ClassName = Annotated[StrictStr, Field(max_length=63, pattern=REWARD_NAME)]


class EnvironmentType(StrEnum):
    """Kind of environment."""

    CLASS = "Class"
    """Objects of a user-defined Python class, one for each rollout, in processes of their own."""
    SESSION = "Session"
    """A user-defined agent that asks the policy for turns over HTTP."""


class EnvironmentClass(WireModel):
    """A user-defined class in a module that Python can import (see spec.code). It imports nothing from RLJob.

    `reset` begins a conversation. Other public methods with type hints and a docstring are tools of the model.
    `respond`, `get_reward` and `close` are optional and no tools: `respond(message)` returns the next user message or
    None for the end, `get_reward()` the score, and `close()` is called at the end."""

    name: ClassName = "environment"
    """Name of the class. If there are several classes, the row's column `environment` names the class to use."""
    path: FunctionPath
    """For example `my_games:GuessNumber`."""
    arguments: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor, for example `{highest: 100}`."""


class EnvironmentSession(WireModel):
    """A function in a module that Python can import. `run(session, row)` sends chat completions to `session.base_url`
    with the key `session.api_key`, and returns the score."""

    path: FunctionPath
    """For example `my_agent:run`."""
    arguments: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class RewritePolicy(StrEnum):
    """What happens if the chat template changes earlier turns of a conversation, for example removes their thinking."""

    KEEP = "Keep"
    """The earlier turns stay as they were sampled."""
    NEW_ROW = "NewRow"
    """A new sequence begins, with the conversation as the template writes it. Not with the advantage GAE."""
    FAIL = "Fail"
    """The run fails at its start."""


class Environment(WireModel):
    """An environment, with which the policy has a conversation of several turns: the policy's turns are sampled and
    trained, the environment's messages (user, tool) are not. Prompts always use the chat template."""

    type: EnvironmentType
    classes: Annotated[tuple[EnvironmentClass, ...], Field(min_length=1, max_length=16)] | None = None
    """The classes."""
    session: EnvironmentSession | None = None
    """The agent."""
    max_turns: PositiveCount = 8
    """Largest number of the policy's turns in a rollout."""
    max_context_tokens: Annotated[Integer, Field(ge=2, le=MAX_COUNT)]
    """Largest length of a conversation in tokens: prompt, turns and messages, for example 2048.

    rollout.maxNewTokens limits the sampled tokens among them. A conversation ends if the next message does not fit."""
    max_turn_tokens: PositiveCount | None = None
    """Largest length of one turn in tokens. When unset, only rollout.maxNewTokens limits it.

    A turn that reaches the limit is truncated and ends the rollout."""
    max_seconds: TimeLimit = 600.0
    """Largest duration of a rollout in seconds."""
    timeout_seconds: TimeLimit = 60.0
    """Time limit for one call of the environment, in seconds.

    Time in which the process waits for a CPU core does not count. The process is killed at the limit. An
    agent has this time after maxSeconds."""
    rollouts_per_process: PositiveCount = 1
    """Number of rollouts that share an environment process.

    If the process dies, or is killed because one of them exceeds its time limit, the others begin again."""
    retries: Count = 2
    """Number of further attempts of a rollout after a failure that the policy did not cause.

    An example is a process that died. After the last attempt the rollout is excluded; see
    training.maxFailureRate."""
    on_rewrite: RewritePolicy = RewritePolicy.KEEP
    """What happens if the chat template changes earlier turns."""
    tool_parser: ShortText | None = None
    """Name of one of vLLM's tool parsers, for example `hermes`, for a model whose tokenizer has no response template.
    """


ENVIRONMENT_RULES = (
    *union_rules(
        Environment,
        (
            ("Class", "classes", lambda environment: (environment.type, environment.classes)),
            ("Session", "session", lambda environment: (environment.type, environment.session)),
        ),
    ),
    unique_rule(
        Environment,
        "classes",
        "name",
        lambda environment: [each.name for each in environment.classes or ()],
        "give each class a different name (the default is environment)",
    ),
    rule(
        Environment,
        "Environment.timeoutSeconds",
        field=".timeoutSeconds",
        cel="self.timeoutSeconds <= self.maxSeconds",
        wrong="must be at most maxSeconds, the limit of the whole rollout",
        advice="reduce timeoutSeconds, or increase maxSeconds",
        holds=lambda environment: environment.timeout_seconds <= environment.max_seconds,
    ),
)
