"""Rewards: each reward gives every response a score. The score of the response is the weighted sum of these scores.

All rewards except those in `IGNORED_FIELDS` run in separate processes with a hard time limit.
"""

from __future__ import annotations

import re
import warnings
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import LOCAL_SOURCE, cel_text, other_block_rule, rule, union_rules
from rljob_api.scalars import (
    REWARD_NAME,
    RUBRIC,
    EnvName,
    Flag,
    FunctionPath,
    HttpUrl,
    ModelSource,
    NonNegativeNumber,
    Number,
    PositiveCount,
    PositiveNumber,
    Quantity,
    ShortText,
    TimeLimit,
)


def _checked_pattern(pattern: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a valid regular expression of Python's `re` module: {error}") from None
    return pattern


def _pattern_with_group(pattern: str) -> str:
    num_groups = re.compile(_checked_pattern(pattern)).groups
    if num_groups != 1:
        raise ValueError(
            f"must have exactly one group, which matches the number or the label, such as `Score: ([0-9.]+)` (it has "
            f"{num_groups}; write `(?:...)` for other parentheses)"
        )
    return pattern


def _checked_labels(labels: dict[str, float]) -> dict[str, float]:
    if len({label.strip().casefold() for label in labels}) < len(labels):
        raise ValueError("must have different labels, whose letter case and surrounding white space do not count")
    return labels


def _checked_scale(scale: list[float]) -> list[float]:
    if len(scale) == 2 and scale[0] >= scale[1]:
        raise ValueError("must be the smallest and the largest number, such as [1, 5]")
    return scale


RewardName = Annotated[StrictStr, Field(max_length=63, pattern=REWARD_NAME)]
RegularExpression = Annotated[StrictStr, Field(min_length=1, max_length=1024), AfterValidator(_checked_pattern)]
PatternWithGroup = Annotated[StrictStr, Field(min_length=1, max_length=1024), AfterValidator(_pattern_with_group)]
Labels = Annotated[dict[StrictStr, Number], Field(max_length=64), AfterValidator(_checked_labels)]
Scale = Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(_checked_scale)]
Prices = Annotated[list[NonNegativeNumber], Field(min_length=2, max_length=2)]
Rubric = Annotated[StrictStr, Field(max_length=16_384, pattern=RUBRIC)]


class RewardType(StrEnum):
    """Kind of reward. Its settings, if it has any, are in the block with the name of the kind, for example
    `function`."""

    FUNCTION = "Function"
    """The result of a user-defined function."""
    MATH_ANSWER = "MathAnswer"
    """1 if the final mathematical answer of the response equals the answer of the row, else 0."""
    CODE = "Code"
    """How many of the row's tests the Python code in the response passes, from 0 to 1. It runs in a sandbox."""
    REASONING_GYM = "ReasoningGym"
    """The score that the task's scorer in reasoning-gym gives, from 0 to 1. Requires a ReasoningGym dataset."""
    FORMAT = "Format"
    """1 if the whole response matches a regular expression, else 0."""
    OVERLONG = "Overlong"
    """A penalty, 0 or below, for responses close to rollout.maxNewTokens. Computed without a scoring process."""
    REWARD_MODEL = "RewardModel"
    """The score that a reward model gives to prompt and response. The model runs on GPUs, see roles.rewardModel. At
    most one reward may have this type."""
    JUDGE = "Judge"
    """The score that a language model gives by a rubric, from 0 to 1 for a scale. The model is called over HTTP."""
    REMOTE = "Remote"
    """The score that an HTTP server of yours gives."""
    ENVIRONMENT = "Environment"
    """What `get_reward` of training.environment returns: a number, or the number of this reward's `name` if it returns
    several. If the class has `get_reward` and no reward has this type, one is added, with the name `environment` and
    weight 1; of several numbers it is the sum."""


class Takes(StrEnum):
    """What one call of a function gets."""

    RESPONSE = "Response"
    """`function(prompt, response, answer, row)` returns a number."""
    BATCH = "Batch"
    """`function(prompts, responses, answers, rows)` gets lists and returns a list of numbers."""
    GROUP = "Group"
    """`function(prompt, responses, answer, row)` gets all responses to a prompt and returns a list of numbers."""


class FunctionReward(WireModel):
    """A user-defined function in a module that Python can import (see spec.code)."""

    path: FunctionPath
    """`package.module:function`, for example `my_rewards:score`."""
    takes: Takes = Takes.RESPONSE
    """What a call gets: one response, several, or all to a prompt."""
    batch_size: PositiveCount = 64
    """Maximum size of a Batch."""
    max_concurrency: PositiveCount | None = None
    """Calls of an `async def` function at the same time; 64 by default.

    The processes of the reward share them."""


def _without_query(url: str) -> str:
    if "?" in url or "#" in url:
        raise ValueError("must have no `?` and no `#`, because `/chat/completions` is added at its end")
    return url


OWN_REQUEST_FIELDS = ("messages", "model", "stream")
"""Fields of a request to a judge that the trainer sets itself, or whose answer it could not read."""


def _without_own_fields(request: dict[str, JsonValue]) -> dict[str, JsonValue]:
    found = [name for name in OWN_REQUEST_FIELDS if name in request]
    if found:
        raise ValueError(
            f"must not have {' and '.join(f'`{name}`' for name in found)}: the message is `rubric`, the model is"
            " `model`, and the answer is not streamed"
        )
    return request


class JudgeReward(WireModel):
    """An OpenAI-compatible endpoint."""

    url: Annotated[HttpUrl, AfterValidator(_without_query)]
    """Such as `https://api.openai.com/v1`."""
    model: ShortText
    key_variable: EnvName | None = None
    """Environment variable with the API key."""
    rubric: Rubric
    """The request, with `{response}`, `{prompt}` and `{answer}`, or a file with it.

    Only `{response}` is required. A path starts with `./`, `../`, `/`, `~` or `package://`."""
    pattern: PatternWithGroup
    """Regular expression whose group matches the score, such as `Score: ([0-9.]+)`.

    The last match in the judge's answer counts."""
    scale: Scale | None = None
    """Lowest and highest number, which become 0 and 1; [0, 1] without labels."""
    labels: Labels | None = None
    """Scores of words, such as {good: 1, bad: 0}."""
    request: Annotated[dict[str, JsonValue], Field(max_length=64), AfterValidator(_without_own_fields)] = Field(
        default_factory=dict
    )
    """Further fields of each request, such as {max_tokens: 1024}.

    The defaults are `temperature: 0` and `max_tokens: 512`."""
    max_concurrency: PositiveCount = 64
    """Calls at the same time.

    The processes of the reward share them, and the limits per minute."""
    requests_per_minute: PositiveCount | None = None
    tokens_per_minute: PositiveCount | None = None
    prices: Prices | None = None
    """Per million prompt and completion tokens."""


class RemoteReward(WireModel):
    """A server that gets `{prompts, responses, answers, rows}` and returns `{scores}`.

    The protocol of OpenRLHF (`{query, prompts, labels}` and `{rewards}`) works, too."""

    url: HttpUrl
    key_variable: EnvName | None = None
    """Environment variable with a bearer token."""
    batch_size: PositiveCount = 64
    """Maximum size of a batch."""


class FormatReward(WireModel):
    """The required format of a response."""

    pattern: RegularExpression
    """A regular expression of Python's `re` module that the whole response must match, without leading and trailing
    white space, for example `<think>.*</think>.*`. `.` also matches line breaks.

    The response starts with the assistant's text from the chat template, such as `<think>`. It contains special tokens
    except end and padding tokens."""


class CodeScore(StrEnum):
    """How the results of the tests become a score."""

    ALL_PASSED = "AllPassed"
    """1 if all tests pass, else 0. The first failure ends the tests of the response."""
    FRACTION = "Fraction"
    """The fraction of the tests that pass."""


class CodeReward(WireModel):
    """How the Python code in the last fenced block of a response is tested.

    The row's answer has the tests, as an object or as JSON text: `{inputs, outputs}` (with `fn_name` for calls of a
    function), a list of `{input, output}`, a list of assert statements, or `{test, entry_point}`."""

    score: CodeScore = CodeScore.ALL_PASSED
    max_tests: PositiveCount = 15
    """Of more tests, those with the longest inputs are used."""
    test_timeout_seconds: TimeLimit = 4.0
    """Time limit of one test. All tests of a response share timeoutSeconds; unfinished tests then fail."""
    memory: Quantity = "1Gi"
    """Memory limit of one test."""


class OverlongPenalty(WireModel):
    """The soft overlong punishment of DAPO (arXiv 2503.14476, section 3.4): 0 up to rollout.maxNewTokens - bufferTokens
    tokens, then decreasing linearly to -penaltyFactor at rollout.maxNewTokens."""

    buffer_tokens: PositiveCount
    """Number of tokens below rollout.maxNewTokens over which the penalty grows, for example 4096."""
    penalty_factor: PositiveNumber = 1.0
    """Penalty of a response with rollout.maxNewTokens tokens, as a positive number."""


class RewardModel(WireModel):
    """A causal model that was trained as a sequence classifier with one label (`...ForSequenceClassification`), or
    whose files have the head of such a classifier (`score.weight`). The score is the output of the head at the last
    token.

    A reward model with the policy's tokenizer and chat template reads the generated tokens. Any other model reads text:
    chats in the model's chat template, with the response as the assistant's turn (as lines if the model has no
    template), and other prompts followed by the response."""

    source: ModelSource
    """Hugging Face repository, folder or `package://` path of the weights, as in training.model.source."""
    revision: ShortText | None = None
    """Commit, tag or branch of the Hugging Face repository."""
    offload: Flag = False
    """Keep the parameters in host memory while the model does not score."""


class ErrorPolicy(StrEnum):
    """What happens if a reward fails for a response."""

    FAIL = "Fail"
    """The run fails."""
    EXCLUDE = "Exclude"
    """The response has no score and is not used in the update. See training.maxFailureRate."""
    SCORE = "Score"
    """The response gets `errorScore` from this reward."""


class Reward(WireModel):
    """A reward with its weight and limits."""

    name: RewardName = "score"
    """Name of this reward in metrics and samples, for example `accuracy`. Must be unique among the rewards."""
    weight: Number = 1.0
    """Factor of this reward's score in the weighted sum, for example -0.5 for a penalty. With 0 the score is only
    reported."""
    type: RewardType
    function: FunctionReward | None = None
    format: FormatReward | None = None
    code: CodeReward | None = None
    overlong: OverlongPenalty | None = None
    reward_model: RewardModel | None = None
    judge: JudgeReward | None = None
    remote: RemoteReward | None = None
    timeout_seconds: TimeLimit = 10.0
    """Time limit for one call, in seconds. Time in which the process waits for a CPU core does not count. The process
    is killed at the limit.

    For types Judge and Remote: for one HTTP request. A call of an `async def` function is cancelled at the limit."""
    num_processes: PositiveCount = 2
    """Total number of scoring processes, rounded up so that all workers have the same number of them."""
    on_error: ErrorPolicy | None = None
    """What happens if the reward raises an exception or returns something other than a finite number. For type
    Environment: in `reset`, `respond` or `get_reward`. When unset: Exclude for types Judge and Remote, else Fail."""
    on_timeout: ErrorPolicy = ErrorPolicy.EXCLUDE
    """What happens if the reward exceeds `timeoutSeconds` or its process dies, and again in a second attempt. For type
    Environment: if a call exceeds `timeoutSeconds` of training.environment.

    If a service that the reward calls stays unreachable, Fail ends the run, and the other values exclude the
    response."""
    error_score: Number = 0.0
    """Score of a failed response with the policy Score, before the weight is applied."""

    @property
    def error_policy(self) -> ErrorPolicy:
        """The policy for errors. By default, an unusable reply of a service does not end a run."""
        default = ErrorPolicy.EXCLUDE if self.type in (RewardType.JUDGE, RewardType.REMOTE) else ErrorPolicy.FAIL
        return self.on_error or default


_LIMITS = ("timeoutSeconds", "numProcesses")
_FAILURES = ("onError", "onTimeout", "errorScore")
IGNORED_FIELDS = {
    RewardType.OVERLONG: (*_LIMITS, *_FAILURES),
    RewardType.REWARD_MODEL: (*_LIMITS, *_FAILURES),
    RewardType.ENVIRONMENT: _LIMITS,
}
"""For each type of reward without scoring processes: the fields that do not apply to it. An environment has its own
processes and time limits."""


def _has_default_limits(reward: Reward) -> bool:
    """Whether `_LIMITS` have their defaults. The API server fills in defaults, so a rule cannot see whether the job
    sets them."""
    return reward.timeout_seconds == 10 and reward.num_processes == 2


def _has_default_failures(reward: Reward) -> bool:
    """Whether `_FAILURES` have their defaults. Stored jobs may have `onTimeout: Score`, the default of earlier
    versions."""
    has_policies = reward.error_policy is ErrorPolicy.FAIL and reward.on_timeout is not ErrorPolicy.FAIL
    return has_policies and reward.error_score == 0


def _ignores_failures(reward: Reward) -> bool:
    return "onError" in IGNORED_FIELDS.get(reward.type, ())


REWARD_RULES = (
    *union_rules(
        Reward,
        (
            ("Function", "function", lambda reward: (reward.type, reward.function)),
            ("Format", "format", lambda reward: (reward.type, reward.format)),
            ("Overlong", "overlong", lambda reward: (reward.type, reward.overlong)),
            ("RewardModel", "reward_model", lambda reward: (reward.type, reward.reward_model)),
            ("Judge", "judge", lambda reward: (reward.type, reward.judge)),
            ("Remote", "remote", lambda reward: (reward.type, reward.remote)),
        ),
    ),
    other_block_rule(Reward, "Code", "code", lambda reward: (reward.type, reward.code)),
    rule(
        Reward,
        "Reward.limits",
        field="",
        cel="!(self.type in ['Overlong', 'RewardModel', 'Environment'])"
        " || (self.timeoutSeconds == 10.0 && self.numProcesses == 2)",
        wrong="timeoutSeconds and numProcesses are not allowed with type Overlong, RewardModel or Environment, which"
        " use no scoring processes and would ignore them",
        advice="remove these fields (training.environment has its own timeoutSeconds)",
        holds=lambda reward: reward.type not in IGNORED_FIELDS or _has_default_limits(reward),
    ),
    rule(
        Reward,
        "Reward.failures",
        field="",
        cel="!(self.type in ['Overlong', 'RewardModel'])"
        " || ((!has(self.onError) || self.onError == 'Fail') && self.onTimeout != 'Fail' && self.errorScore == 0.0)",
        wrong="onError, onTimeout and errorScore are not allowed with type Overlong or RewardModel, which would ignore"
        " them",
        advice="remove these fields",
        holds=lambda reward: not _ignores_failures(reward) or _has_default_failures(reward),
    ),
    rule(
        Reward,
        "Reward.errorScore",
        field=".errorScore",
        cel="self.errorScore == 0.0 || self.type in ['Overlong', 'RewardModel'] || self.onTimeout == 'Score'"
        " || has(self.onError) && self.onError == 'Score'",
        wrong="would be ignored, because neither onError nor onTimeout is Score",
        advice="remove it, or set onError or onTimeout to Score",
        holds=lambda reward: (
            reward.error_score == 0
            or _ignores_failures(reward)
            or ErrorPolicy.SCORE in (reward.on_error, reward.on_timeout)
        ),
    ),
    rule(
        RewardModel,
        "RewardModel.revision",
        field=".revision",
        cel=f"!has(self.revision) || !self.source.matches({cel_text(LOCAL_SOURCE)})",
        wrong="requires a Hugging Face repository, but source is a local path",
        advice="remove the revision",
        holds=lambda model: model.revision is None or re.search(LOCAL_SOURCE, model.source) is None,
    ),
)
