"""The names and contents of the columns that controller and workers exchange.

Columns with a value per token are ragged: one row per sequence, of the length of its prompt and response (of the
prompt alone in PROMPT_TOKEN_IDS), never padded.
They stay on the workers; the controller reads columns with one value per sequence.

A response may have several rows, one after the other, with the same SAMPLE_IDS. Each of its sampled tokens is trained
on in exactly one of them. Numbers of the response are the same in all of its rows, texts are those of the last row.

Legend: B responses, R rows of responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rljob_trainer.algorithms import interfaces
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.engines.train.token_batch import TokenBatch

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Ragged int64: the prompt's tokens."""
PROMPT_TEXTS = "prompt_texts"
"""Object column: the prompt as text. Without the beginning of the assistant's turn, which is in TURN_BEGINNINGS."""
TURN_BEGINNINGS = "turn_beginnings"
"""Object column: the beginning of the assistant's turn that the chat template put at the end of the prompt, for example
`<think>\\n`."""
PLAIN_TURN_BEGINNINGS = "plain_turn_beginnings"
"""Object column: TURN_BEGINNINGS without special tokens, for a reward model with another tokenizer."""
ANSWERS = "answers"
"""Object column: the expected answer from the dataset."""
DATASET_ROWS = "dataset_rows"
"""Object column: the whole row of the dataset, a mapping."""
SAMPLE_IDS = "sample_ids"
"""[B] int64: identifies a response. The controller counts the responses of its run; no two have the same number."""
SAMPLE_SEEDS = "sample_seeds"
"""[B] int64: the random seed of each response."""
ENVIRONMENT_SEEDS = "environment_seeds"
"""[B] int64: the random seed of each rollout's environment, equal for the rollouts of a group. Only in jobs with an
environment."""

IS_GREEDY = "is_greedy"
"""[B] bool: the response is decoded greedily, whatever the sampling settings are."""

TOKENS = "tokens"
"""Ragged int64: the prompt's tokens, then the response's."""
RESPONSE_MASK = "response_mask"
"""Ragged bool: True for response tokens, including the end token; False for prompts, for messages between the turns of
a response, and for sampled tokens that another row of the response trains on. See also IS_TRAINED."""
ROLLOUT_LOGPROBS = interfaces.ROLLOUT_LOGPROBS
"""Ragged float32: log-probability of each response token by the rollout engine when it sampled the token; 0 for
prompts."""
POLICY_VERSIONS = "policy_versions"
"""Ragged int32: the version of the weights that sampled each response token; -1 for prompts."""
OLD_LOGPROBS = interfaces.OLD_LOGPROBS
"""Ragged float32: log-probability by the training engine before this step's updates. Absent if the step has a single
update: then the forward pass of the update computes the same. With `oldLogprobs: Rollout` equal to ROLLOUT_LOGPROBS."""
REF_LOGPROBS = interfaces.REF_LOGPROBS
"""Ragged float32: log-probability by the reference policy."""
RESPONSE_TEXTS = "response_texts"
"""Object column: the response as text with special tokens, but without end tokens, padding tokens and stop text."""
PLAIN_RESPONSE_TEXTS = "plain_response_texts"
"""Object column: RESPONSE_TEXTS without special tokens, for a reward model with another tokenizer."""

FOUND = "found"
"""Object column: for each response a mapping from the reward's name to the answer that the reward extracted from the
response. Rewards that do not report an answer are missing."""

SCORED_BY = "scored_by"
"""Object column: names of the rewards that score the response, separated by spaces. In batches without this column, all
rewards do."""
PROMPT_MESSAGES = "prompt_messages"
"""Object column: the chat from which the prompt was rendered, as a list of messages; None if the prompt is no chat."""
RESPONSE_LENGTHS = "response_lengths"
"""[B] int64: the number of response tokens, which are all sampled tokens of the response."""
PROMPT_LENGTHS = "prompt_lengths"
"""[B] int64: the number of tokens before the response's first sampled token."""
NUM_TOKENS = "num_tokens"
"""[R] int64: the number of tokens of a row."""
NUM_ROWS = "num_rows"
"""[B] int64: the number of rows of a response."""
RESPONSE_NUMBERS = "response_numbers"
"""[R] int64: the number of the row's response in the step, from 0. Absent if each response has one row."""
TRAINED_LENGTHS = "trained_lengths"
"""[R] int64: the number of tokens of the row's response that are trained on, in all of its rows. Absent if each
response has one row."""
OUTCOMES = "outcomes"
"""[B] uint8: how the rollout ended, an index into OUTCOME_LIST."""
OUTCOME_LIST = tuple(Outcome)
IS_TRUNCATED = "is_truncated"
"""[B] bool: `Outcome.is_truncated`."""
IS_LOST = "is_lost"
"""[B] bool: the outcome is INFRASTRUCTURE: the rollout engine or the environment could not complete the rollout, which
must not be trained on."""

MESSAGES = "messages"
"""Object column: all messages of a conversation with an environment, without the tools. Like the next ones only in jobs
with an environment."""
ENVIRONMENT_RESULTS = "environment_results"
"""Object column: what `get_reward` of the environment gave, as `[status, value, detail]`: the value is a number, a
mapping of names to numbers, or None."""
NUM_TURNS = "num_turns"
"""[B] int64: turns of the policy."""
NUM_TOOL_CALLS = "num_tool_calls"
"""[B] int64: tool calls."""
NUM_TOOL_ERRORS = "num_tool_errors"
"""[B] int64: tool calls that gave an error, or could not be read."""
IS_REWRITTEN = "is_rewritten"
"""[B] bool: the chat template would have written another text for this conversation; see Conversation.is_rewritten."""
ENVIRONMENT_SECONDS = "environment_seconds"
"""[B] float32: duration of the environment's calls."""
GENERATION_SECONDS = "generation_seconds"
"""[B] float32: time that the rollout waited for its turns."""
SCORES = "scores"
"""[B] float64: the weighted sum of the rewards' scores; NaN if a reward with a weight other than 0 gave no score."""
KL_SUMS = "kl_sums"
"""[B] float32: KL estimate of the old against the reference policy, summed over the response."""
CORRECTION_WEIGHTS = "correction_weights"
"""Ragged float32: the importance weight of rollout correction for each token's policy loss. Absent without rollout
correction, and if the step has a single update (no OLD_LOGPROBS): then the update computes the weights itself."""
ADVANTAGES = "advantages"
"""[B] float32: the advantage of all tokens of the response; ragged float32 if the estimator works on tokens."""
SQUARES = interfaces.SQUARES
"""Ragged float32: sum of the squared probabilities of the vocabulary, by the training engine before this step's
updates."""
VALUES = interfaces.VALUES
"""Ragged float32: for each response token, the critic's value given the preceding tokens, computed before the critic is
updated in this step."""
RETURNS = "returns"
"""Ragged float32: the targets of the critic's values."""
REWARDS = "rewards"
"""[B] float32: SCORES (without a KL penalty), for estimators that work on tokens."""
SCORED_GROUPS = "scored_groups"
"""[B] int64: equal for responses that rewards score together. Only if a reward sees whole groups."""
GROUPS = "groups"
"""[B] int64: equal for responses to the same prompt, for estimators that work on tokens."""
IS_TRAINED = "is_trained"
"""[B] bool: whether the response is trained on. The other responses get no forward pass and count in no mean of the
update."""
PASS_MICRO_BATCHES = "pass_micro_batches"
"""[B] int32: the number of the row's micro-batch in a pass over the worker's whole share of the batch, as the
controller planned it; -1 if it did not."""
UPDATE_MICRO_BATCHES = "update_micro_batches"
"""[B] int32: the same for the row's update."""
RECORDED_INDEX = "recorded_index"
"""[B] int16: the index of the conversation whose tokens are recorded from this row (see `workers/recorded_tokens`);
-1: the row is not recorded."""


def score_column(reward: str) -> str:
    """Returns the name of the column with a reward's unweighted scores, [B] float64; NaN for a response without a score
    from this reward."""
    return f"score/{reward}"


def status_column(reward: str) -> str:
    """Returns the name of the column with the status of scoring, [B] uint8: an index into the members of
    `RewardStatus`. The column is absent for rewards that need no scoring processes."""
    return f"reward_status/{reward}"


def outcome_columns(outcomes: Sequence[Outcome]) -> dict[str, torch.Tensor]:
    """Returns OUTCOMES and the columns that follow from it."""
    numbers = [OUTCOME_LIST.index(outcome) for outcome in outcomes]
    return {
        OUTCOMES: torch.tensor(numbers, dtype=torch.uint8),
        IS_TRUNCATED: torch.tensor([outcome.is_truncated for outcome in outcomes], dtype=torch.bool),
        IS_LOST: torch.tensor([each is Outcome.INFRASTRUCTURE for each in outcomes], dtype=torch.bool),
    }


def token_batch(batch: DataProto, columns: Sequence[str] = (), micro_batches: str = PASS_MICRO_BATCHES) -> TokenBatch:
    """Converts rows to the training engine's input, with these columns. `micro_batches`: the column, if there is one,
    with the planned micro-batches.

    A column with one value per row gets this value at each token of the row. If there is a column IS_TRAINED, rows that
    it excludes have no response tokens."""
    tokens = batch.ragged_column(TOKENS)
    found = {name: per_token(batch, name, tokens.lengths) for name in columns}
    return TokenBatch(tokens, trained_mask(batch), found, batch.tensors.get(micro_batches))


def trained_mask(batch: DataProto) -> RaggedColumn:
    """Returns RESPONSE_MASK; if there is a column IS_TRAINED, False in all rows that it excludes."""
    mask = batch.ragged_column(RESPONSE_MASK)
    if IS_TRAINED not in batch.tensors:
        return mask
    return RaggedColumn(mask.values & torch.repeat_interleave(batch[IS_TRAINED], mask.lengths), mask.lengths)


def num_marked(mask: RaggedColumn) -> tuple[int, ...]:
    """[B]: the number of marked tokens of each row."""
    return tuple(int(row.sum()) for row in mask.row_tensors())


def per_token(batch: DataProto, name: str, lengths_B: torch.Tensor) -> RaggedColumn:
    """Returns a column with a value per token; if it has one value per row, each token gets this value."""
    if name in batch.tensors:
        return RaggedColumn(torch.repeat_interleave(batch[name], lengths_B), lengths_B)
    return batch.ragged_column(name)
