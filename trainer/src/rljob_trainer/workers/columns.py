"""Names of the columns that travel between controller and workers, and what they hold.

Legend: B sequences, T tokens of prompt and response, padded on the right.
"""

from __future__ import annotations

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Object column: tuple of int, the prompt's tokens."""
SAMPLE_SEEDS = "sample_seeds"
"""[B] int64: seed of each response."""

TOKENS = "tokens"
"""[B, T] int64: prompt, then response."""
RESPONSE_MASK = "response_mask"
"""[B, T] bool: the response's tokens, its end token included. These are what is learned from."""
ROLLOUT_LOGPROBS = "rollout_logprobs"
"""[B, T] float32: log-probability that the rollout engine gave to each response token when it sampled it, else 0."""
POLICY_VERSIONS = "policy_versions"
"""[B, T] int32: version of the weights that sampled each response token, else -1."""
OLD_LOGPROBS = "old_logprobs"
"""[B, T] float32: log-probability by the training engine before this step's updates. Absent when the first update is
the only one: then it equals the update's own forward pass."""
REF_LOGPROBS = "ref_logprobs"
"""[B, T] float32: log-probability by the reference policy."""
ADVANTAGES = "advantages"
"""[B, T] float32: advantage of each response token, else 0."""
RESPONSE_TEXTS = "response_texts"
"""Object column: the response as text, without the stop text."""
IS_TRUNCATED = "is_truncated"
"""[B] bool: the response ended at the limit of new tokens."""
