"""How a completed response is scored: each entry gives every response a number, and their weighted sum is learned from.

Every scorer that reads texts runs in processes of its own with a hard time limit.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import LOCAL_SOURCE, cel_text, rule, union_rules
from rljob_api.scalars import (
    REWARD_NAME,
    FiniteNumber,
    Flag,
    FunctionPath,
    LongText,
    Number,
    PositiveCount,
    PositiveNumber,
    ShortText,
)


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression of Python's `re`, and is none: {error}") from None
    return pattern


RewardName = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=REWARD_NAME)]
RegularExpression = Annotated[StrictStr, Field(min_length=1, max_length=1024), AfterValidator(_checked_pattern)]


class RewardType(StrEnum):
    """One block of the same name says the rest, where there is more to say."""

    FUNCTION = "Function"
    MATH_ANSWER = "MathAnswer"
    """1 if the response's final mathematical answer equals the row's, else 0 (math-verify)."""
    REASONING_GYM = "ReasoningGym"
    """The task's own scorer, 0 to 1; only with a ReasoningGym dataset."""
    FORMAT = "Format"
    """1 if the whole response has a form, else 0."""
    OVERLONG = "Overlong"
    """A penalty, 0 or below, for responses near rollout.maxNewTokens; needs no process."""
    REWARD_MODEL = "RewardModel"
    """What a model that was trained on preferences gives to prompt and response; runs on GPUs, see roles.rewardModel.
    At most one of the rewards."""


class FunctionReward(WireModel):
    """`function(prompt: str, response: str, answer: object, row: dict) -> float`, importable on PYTHONPATH."""

    path: FunctionPath


class FormatReward(WireModel):
    """The form of a response."""

    pattern: RegularExpression
    """A regular expression of Python's `re` that the whole response must match, without white space around it. `.`
    stands for line ends, too. The response begins with what the chat template has written of the assistant's turn, such
    as `<think>`, and has its special tokens, without end and padding tokens."""


class OverlongPenalty(WireModel):
    """The soft overlong punishment of DAPO (arXiv 2503.14476, section 3.4): 0 up to rollout.maxNewTokens - bufferTokens
    tokens, from there linearly down to -penaltyFactor at rollout.maxNewTokens."""

    buffer_tokens: PositiveCount
    """Tokens at the end of rollout.maxNewTokens in which the penalty grows."""
    penalty_factor: PositiveNumber = 1.0


class RewardModel(WireModel):
    """A causal model that was trained as a sequence classifier with one label (`...ForSequenceClassification`), or
    whose files hold the head of one (`score.weight`). The score is what its head gives at the last token.

    With the policy's tokens and chat template it reads the tokens that were generated. Another one is given texts:
    chats in its own chat template, with the response as the assistant's turn (as lines where it has none), other
    prompts with the response after them."""

    source: LongText
    """As training.model.source."""
    revision: ShortText | None = None
    """As training.model.revision."""
    offload: Flag = False
    """Keep its parameters in the host's memory between its passes."""


class ErrorPolicy(StrEnum):
    """What a scorer that fails does to the job."""

    FAIL = "Fail"
    SCORE = "Score"
    """The sample gets `errorScore` from this reward; counted in `reward/error_rate` or `reward/timeout_rate`."""


class Reward(WireModel):
    """A scorer, its weight and its limits."""

    name: RewardName = "score"
    """What metrics and samples call it; one of several needs a name of its own."""
    weight: Number = 1.0
    """Its factor in the sum that is learned from. Below 0 it takes away; with 0 it is measured only."""
    type: RewardType
    function: FunctionReward | None = None
    format: FormatReward | None = None
    overlong: OverlongPenalty | None = None
    reward_model: RewardModel | None = None
    timeout_seconds: Annotated[FiniteNumber, Field(gt=0, le=1_000_000)] = 10.0
    """For one response, without the time in which other processes had the cores; the process is killed then."""
    num_processes: PositiveCount = 2
    """Scoring processes in all. They run beside the workers, which share them out evenly; each has at least one."""
    on_error: ErrorPolicy = ErrorPolicy.FAIL
    """What a scorer that raises, or returns something that is no number, does to the job."""
    on_timeout: ErrorPolicy = ErrorPolicy.SCORE
    """What a scorer that runs longer than `timeoutSeconds` does to the job."""
    error_score: Number = 0.0
    """Before the weight."""


WITHOUT_PROCESSES = (RewardType.OVERLONG, RewardType.REWARD_MODEL)
LIMITS = ("timeoutSeconds", "numProcesses", "onError", "onTimeout", "errorScore")
"""Fields that count for rewards in processes alone."""


def _has_no_limits(reward: Reward) -> bool:
    """Of what is ignored only another value than the default can be told: the API server fills in defaults."""
    return (
        reward.timeout_seconds == 10
        and reward.num_processes == 2
        and reward.on_error is ErrorPolicy.FAIL
        and reward.on_timeout is ErrorPolicy.SCORE
        and reward.error_score == 0
    )


REWARD_RULES = (
    *union_rules(
        Reward,
        (
            ("Function", "function", lambda reward: (reward.type, reward.function)),
            ("Format", "format", lambda reward: (reward.type, reward.format)),
            ("Overlong", "overlong", lambda reward: (reward.type, reward.overlong)),
            ("RewardModel", "reward_model", lambda reward: (reward.type, reward.reward_model)),
        ),
    ),
    rule(
        Reward,
        "Reward.limits",
        field="",
        cel="!(self.type in ['Overlong', 'RewardModel']) || (self.timeoutSeconds == 10.0 && self.numProcesses == 2"
        " && self.onError == 'Fail' && self.onTimeout == 'Score' && self.errorScore == 0.0)",
        wrong="Overlong is computed from lengths and RewardModel on GPUs, not in processes: timeoutSeconds,"
        " numProcesses, onError, onTimeout and errorScore are ignored",
        advice="remove them",
        holds=lambda reward: reward.type not in WITHOUT_PROCESSES or _has_no_limits(reward),
    ),
    rule(
        RewardModel,
        "RewardModel.revision",
        field=".revision",
        cel=f"!has(self.revision) || !self.source.matches({cel_text(LOCAL_SOURCE)})",
        wrong="a revision means nothing for a local model",
        advice="remove it",
        holds=lambda model: model.revision is None or re.search(LOCAL_SOURCE, model.source) is None,
    ),
)
