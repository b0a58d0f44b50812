"""Names of the columns that travel between controller and workers, and what they hold.

What has a value per token is ragged: one row per sequence, as long as its prompt and response together, never padded.
It stays with the workers; the controller sees what has one value per sequence.

Legend: B sequences, T tokens of the longest of them.
"""

from __future__ import annotations

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Ragged int64: the prompt's tokens."""
PROMPT_TEXTS = "prompt_texts"
"""Object column: the prompt as text."""
ANSWERS = "answers"
"""Object column: the expected answer, as the dataset has it."""
DATASET_ROWS = "dataset_rows"
"""Object column: the whole row of the dataset, a mapping."""
SAMPLE_SEEDS = "sample_seeds"
"""[B] int64: seed of each response."""

TOKENS = "tokens"
"""Ragged int64: prompt, then response."""
RESPONSE_MASK = "response_mask"
"""Ragged bool: the response's tokens, its end token included. These are what is learned from."""
ROLLOUT_LOGPROBS = "rollout_logprobs"
"""Ragged float32: log-probability that the rollout engine gave to each response token when it sampled it, else 0."""
POLICY_VERSIONS = "policy_versions"
"""Ragged int32: version of the weights that sampled each response token, else -1."""
OLD_LOGPROBS = "old_logprobs"
"""Ragged float32: log-probability by the training engine before this step's updates. Absent when the first update is
the only one: then it equals the update's own forward pass."""
REF_LOGPROBS = "ref_logprobs"
"""Ragged float32: log-probability by the reference policy."""
RESPONSE_TEXTS = "response_texts"
"""Object column: the response as text, without the stop text."""

RESPONSE_LENGTHS = "response_lengths"
"""[B] int64: tokens of the response."""
IS_TRUNCATED = "is_truncated"
"""[B] bool: the response ended at the limit of new tokens."""
SCORES = "scores"
"""[B] float64: what the reward gave."""
IS_REWARD_ERROR = "is_reward_error"
"""[B] bool: the reward failed on the response."""
IS_REWARD_TIMEOUT = "is_reward_timeout"
"""[B] bool: the reward took too long."""
KL_SUMS = "kl_sums"
"""[B] float32: KL estimate of old to reference policy, summed over the response."""
ADVANTAGES = "advantages"
"""[B] float32: advantage of each token of the response."""
IS_LEARNED = "is_learned"
"""[B] bool: whether the response takes part in the update."""


def padded(batch: DataProto) -> DataProto:
    """The batch with every ragged column as a tensor [B, T], filled with zeros on the right."""
    width = max((int(column.lengths.max()) for column in batch.ragged.values() if len(column)), default=0)
    tensors = {name: column.padded(width, 0) for name, column in batch.ragged.items()}
    return batch.without(list(batch.ragged)).with_columns(tensors)


def unpadded_like(values_BT: torch.Tensor, column: RaggedColumn) -> RaggedColumn:
    """[B, T] as a ragged column with rows as long as another's."""
    return RaggedColumn.unpadded(values_BT, column.lengths)
