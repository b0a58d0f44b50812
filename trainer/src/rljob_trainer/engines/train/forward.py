"""The policy as FSDP2 sees it: one module whose forward gives log-probabilities of chosen tokens, never whole logits.

Legend: B sequences, T tokens of a row (prompt and response, padded on the right), N chosen tokens of all rows,
D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rljob_trainer.engines.train.logprobs import token_logprobs_and_entropy

LOGITS_CHUNK_TOKENS = 2048
"""Logits exist for at most so many tokens at a time (x V x 4 bytes); with more they are recomputed for the gradient."""


class PolicyModel(nn.Module):
    """Wraps a Hugging Face causal language model.

    Padding is on the right, so under the causal mask no real token sees a padded one and no mask is passed."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(
        self, tokens_BT: torch.Tensor, predicted_BT: torch.Tensor, temperature: float, with_entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [N] of the tokens marked in `predicted_BT` (bool; column 0 is never marked).

        N runs over rows, then positions. Probabilities are those of the temperature-scaled distribution. Entropy
        carries a gradient only if asked for."""
        body = self.language_model.get_decoder()  # type: ignore[operator]
        hidden_BTD = body(input_ids=tokens_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden_BTD[:, :-1][predicted_BT[:, 1:]]
        targets_N = tokens_BT[:, 1:][predicted_BT[:, 1:]]
        num_chunks = max(1, -(-hidden_ND.shape[0] // LOGITS_CHUNK_TOKENS))
        results = []
        for hidden, targets in zip(hidden_ND.tensor_split(num_chunks), targets_N.tensor_split(num_chunks), strict=True):
            if num_chunks == 1:
                results.append(self._score(hidden, targets, temperature, with_entropy_gradient))
            else:
                results.append(
                    checkpoint(self._score, hidden, targets, temperature, with_entropy_gradient, use_reentrant=False)
                )
        logprobs, entropies = zip(*results, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperature: float, with_entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = self.language_model.get_output_embeddings()(hidden_ND)  # type: ignore[operator]
        logprobs_1N, entropy_1N = token_logprobs_and_entropy(
            logits_NV[None],
            targets_N[None],
            temperature,
            with_entropy=True,
            differentiable_entropy=with_entropy_gradient,
        )
        assert entropy_1N is not None
        return logprobs_1N[0], entropy_1N[0]
