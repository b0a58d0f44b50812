"""Adds up what the updates of one training step are reported by, over micro-batches, mini-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from rljob_trainer.engines.train.fsdp2 import Fsdp2Engine
from rljob_trainer.observability.metrics import (
    CLIP_FRACTION,
    ENTROPY,
    KL_LOSS,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    POLICY_LOSS,
    PPO_KL,
)


@dataclass
class UpdateSums:
    """Sums over response tokens; `policy_loss` is the sum of this rank's parts of the losses of all mini-batches."""

    num_tokens: float = 0.0
    num_clipped: float = 0.0
    ppo_kl_sum: float = 0.0
    policy_loss: float = 0.0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    num_kl_tokens: float = 0.0
    """Response tokens for which a KL to the reference was computed."""
    difference_sum: float = 0.0
    num_updates: float = 0.0
    difference_max: float = 0.0

    def add(
        self,
        *,
        num_tokens: float,
        num_clipped: float,
        ppo_kl_sum: float,
        policy_loss: float,
        entropy_sum: float,
        kl_sum: float | None,
        difference_sum: float,
        difference_max: float,
    ) -> None:
        """Adds one micro-batch."""
        self.num_tokens += num_tokens
        self.num_clipped += num_clipped
        self.ppo_kl_sum += ppo_kl_sum
        self.policy_loss += policy_loss
        self.entropy_sum += entropy_sum
        if kl_sum is not None:
            self.kl_sum += kl_sum
            self.num_kl_tokens += num_tokens
        self.difference_sum += difference_sum
        self.difference_max = max(self.difference_max, difference_max)

    def reduced(self, engine: Fsdp2Engine) -> dict[str, float]:
        """Collective. Metrics of the whole batch, equal on all ranks."""
        names = [field.name for field in fields(self) if field.name != "difference_max"]
        mine = torch.tensor([float(vars(self)[name]) for name in names], dtype=torch.float64)
        total = dict(zip(names, engine.sum_over_ranks(mine).tolist(), strict=True))
        num_tokens = max(1.0, total["num_tokens"])
        num_updates = max(1.0, total["num_updates"] / engine.mesh.size())
        kl = {KL_LOSS: total["kl_sum"] / total["num_kl_tokens"]} if total["num_kl_tokens"] else {}
        return {
            **kl,
            POLICY_LOSS: total["policy_loss"] / num_updates,
            CLIP_FRACTION: total["num_clipped"] / num_tokens,
            PPO_KL: total["ppo_kl_sum"] / num_tokens,
            ENTROPY: total["entropy_sum"] / num_tokens,
            LOGPROB_DIFF_MEAN: total["difference_sum"] / num_tokens,
            LOGPROB_DIFF_MAX: engine.max_over_ranks(self.difference_max),
        }
