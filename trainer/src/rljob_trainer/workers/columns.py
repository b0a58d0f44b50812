"""Names of the columns that travel between controller and workers, and what they hold.

What has a value per token is ragged: one row per sequence, as long as its prompt and response together, never padded.
It stays with the workers; the controller sees what has one value per sequence.

Legend: B sequences, T tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rljob_trainer.algorithms import interfaces
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.token_batch import TokenBatch

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Ragged int64: the prompt's tokens."""
PROMPT_TEXTS = "prompt_texts"
"""Object column: the prompt as text, up to where TURN_BEGINNINGS begins."""
TURN_BEGINNINGS = "turn_beginnings"
"""Object column: what the chat template has written of the assistant's turn, at the end of the prompt."""
PLAIN_TURN_BEGINNINGS = "plain_turn_beginnings"
"""Object column: the same without special tokens; for a reward model with another tokenizer."""
ANSWERS = "answers"
"""Object column: the expected answer, as the dataset has it."""
DATASET_ROWS = "dataset_rows"
"""Object column: the whole row of the dataset, a mapping."""
SAMPLE_SEEDS = "sample_seeds"
"""[B] int64: seed of each response."""

IS_GREEDY = "is_greedy"
"""[B] bool: the response is to be the greedy one, whatever the sampling settings say."""

TOKENS = "tokens"
"""Ragged int64: prompt, then response."""
RESPONSE_MASK = "response_mask"
"""Ragged bool: the response's tokens, its end token included. These are what is learned from."""
ROLLOUT_LOGPROBS = interfaces.ROLLOUT_LOGPROBS
"""Ragged float32: log-probability that the rollout engine gave to each response token when it sampled it, else 0."""
POLICY_VERSIONS = "policy_versions"
"""Ragged int32: version of the weights that sampled each response token, else -1."""
OLD_LOGPROBS = interfaces.OLD_LOGPROBS
"""Ragged float32: log-probability by the training engine before this step's updates. Absent when the first update is
the only one: then it equals the update's own forward pass."""
REF_LOGPROBS = interfaces.REF_LOGPROBS
"""Ragged float32: log-probability by the reference policy."""
RESPONSE_TEXTS = "response_texts"
"""Object column: the response as text with its special tokens, without end and padding tokens and the stop text."""
PLAIN_RESPONSE_TEXTS = "plain_response_texts"
"""Object column: the same without any special tokens; for a reward model with another tokenizer."""

FOUND = "found"
"""Object column: what rewards took from the response as its answer, a mapping by the reward's name. Rewards that do not
say are not in it."""

PROMPT_MESSAGES = "prompt_messages"
"""The chat of which the prompt was made, as a list of messages; None for one that is no chat."""
RESPONSE_LENGTHS = "response_lengths"
"""[B] int64: tokens of the response."""
IS_TRUNCATED = "is_truncated"
"""[B] bool: the response ended at the limit of new tokens."""
SCORES = "scores"
"""[B] float64: the weighted sum of what the rewards gave."""
KL_SUMS = "kl_sums"
"""[B] float32: KL estimate of old to reference policy, summed over the response."""
CORRECTION_WEIGHTS = "correction_weights"
"""Ragged float32: what rollout correction multiplies a token's policy loss by. Absent where there is none, and where
the old log-probabilities are those of the update's own forward pass."""
ADVANTAGES = "advantages"
"""[B] float32: advantage of each token of the response; ragged float32 where the estimator works on tokens."""
SQUARES = interfaces.SQUARES
"""Ragged float32: sum of the squared probabilities of all tokens of the vocabulary, by the training engine before this
step's updates."""
VALUES = interfaces.VALUES
"""Ragged float32: what the critic expected before this step's updates, by the token before each response token."""
RETURNS = "returns"
"""Ragged float32: what the critic's values are fitted to."""
REWARDS = "rewards"
"""[B] float32: the score; for estimators that work on tokens."""
GROUPS = "groups"
"""[B] int64: equal for responses to the same prompt; for estimators that work on tokens."""
IS_LEARNED = "is_learned"
"""[B] bool: whether the response takes part in the update. What does not costs no pass and is not counted."""


def score_column(reward: str) -> str:
    """[B] float64: what the reward of that name gave, before its weight."""
    return f"score/{reward}"


def status_column(reward: str) -> str:
    """[B] uint8: what became of scoring the response by the reward of that name, by its place in `RewardStatus`. Absent
    for rewards that cannot fail."""
    return f"reward_status/{reward}"


def token_batch(batch: DataProto, columns: Sequence[str] = ()) -> TokenBatch:
    """The rows as the training engine takes them, with these columns; what has one value per row has it at each of the
    row's tokens. Rows that IS_LEARNED, where there is one, leaves out have no response tokens."""
    tokens = batch.ragged_column(TOKENS)
    found = {name: _per_token(batch, name, tokens.lengths) for name in columns}
    return TokenBatch(tokens, learned_mask(batch), found)


def learned_mask(batch: DataProto) -> RaggedColumn:
    """RESPONSE_MASK, empty in the rows that IS_LEARNED, where there is one, leaves out."""
    mask = batch.ragged_column(RESPONSE_MASK)
    if IS_LEARNED not in batch.tensors:
        return mask
    return RaggedColumn(mask.values & torch.repeat_interleave(batch[IS_LEARNED], mask.lengths), mask.lengths)


def _per_token(batch: DataProto, name: str, lengths_B: torch.Tensor) -> RaggedColumn:
    if name in batch.tensors:
        return RaggedColumn(torch.repeat_interleave(batch[name], lengths_B), lengths_B)
    return batch.ragged_column(name)
