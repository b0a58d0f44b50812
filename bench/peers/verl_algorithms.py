"""verl's losses and advantages on artificial responses, in the process of `verl_peer`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_policy_loss_vanilla,
    compute_reinforce_plus_plus_outcome_advantage,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from rljob_bench.loss_case import LOSS_CASES, LossCase
from rljob_bench.token_case import (
    ADVANTAGES,
    CLIPPED_BY_SEQUENCE,
    CLIPPED_WITH_KL,
    GAE,
    GAMMA,
    GROUP_RELATIVE,
    GROUP_RELATIVE_VECTORIZED,
    KL_COEFFICIENT,
    LAMBDA,
    REINFORCE_PLUS_PLUS,
    WHITENING,
    Outcome,
    TokenCase,
    outcome,
    random_tables,
)

ESTIMATORS = {
    GROUP_RELATIVE: compute_grpo_outcome_advantage,
    GROUP_RELATIVE_VECTORIZED: compute_grpo_vectorized_outcome_advantage,
}


class Tokens:
    """A case in verl's form: padded tables."""

    def __init__(self, case: TokenCase) -> None:
        tables = random_tables(case)
        self.tables = tables
        # The mask in the type of the losses, which is the fastest input for verl's functions.
        self.mask_BT = tables.mask_BT.float()
        self.logprobs_BT = tables.logprobs_BT.requires_grad_()
        self.rewards_BT = torch.zeros_like(self.mask_BT)
        last_B = tables.mask_BT.sum(dim=1) - 1
        self.rewards_BT[torch.arange(case.num_rows), last_B] = tables.rewards_B
        self.groups = np.array([f"prompt {group}" for group in tables.groups_B.tolist()], dtype=object)
        self.config = self._config(LossCase({}, "vanilla"))
        self.configs = {name: self._config(each) for name, each in LOSS_CASES.items()}

    def call(self, operation: str) -> Callable[[], object]:
        """A function that runs an operation once, with its gradient if it is a loss, and returns the loss or the
        values."""
        if operation == WHITENING:
            return lambda: masked_whiten(self.tables.advantages_BT, self.mask_BT)
        if operation == GAE:
            return lambda: compute_gae_advantage_return(
                self.rewards_BT, self.tables.values_BT, self.mask_BT, GAMMA, LAMBDA
            )[0]
        if operation == REINFORCE_PLUS_PLUS:
            config = AlgoConfig(gamma=GAMMA)
            return lambda: compute_reinforce_plus_plus_outcome_advantage(self.rewards_BT, self.mask_BT, config)[0]
        if operation in ESTIMATORS:
            return lambda: ESTIMATORS[operation](self.rewards_BT, self.mask_BT, self.groups)[0]
        if operation in LOSS_CASES:
            return lambda: self._named_loss(operation)
        return lambda: self._loss(operation)

    def outcome(self, operation: str) -> Outcome:
        """The result of one call, for comparison."""
        found = self.call(operation)()
        if operation in ADVANTAGES:
            values_N = found[self.tables.mask_BT]
            return outcome(float(values_N.sum()), values_N)
        return outcome(float(found), self.logprobs_BT.grad[self.tables.mask_BT])

    def _config(self, case: LossCase) -> ActorConfig:
        policy_loss = PolicyLossConfig(**case.policy_loss)
        config = ActorConfig(strategy="fsdp", rollout_n=8, use_dynamic_bsz=True, policy_loss=policy_loss, **case.actor)
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=int(self.mask_BT.sum()), global_batch_size=len(self.mask_BT)
        )
        return config

    def _named_loss(self, operation: str) -> torch.Tensor:
        case, tables = LOSS_CASES[operation], self.tables
        mode = "seq-mean-token-mean" if case.by_sequence else "token-mean"
        loss, _ = get_policy_loss_fn(case.mode)(
            tables.old_logprobs_BT,
            self.logprobs_BT,
            tables.advantages_BT,
            self.mask_BT,
            mode,
            self.configs[operation],
        )
        self.logprobs_BT.grad = None
        loss.backward()
        return loss.detach()

    def _loss(self, operation: str) -> torch.Tensor:
        mode = "seq-mean-token-mean" if operation == CLIPPED_BY_SEQUENCE else "token-mean"
        tables = self.tables
        loss, _ = compute_policy_loss_vanilla(
            tables.old_logprobs_BT, self.logprobs_BT, tables.advantages_BT, self.mask_BT, mode, self.config
        )
        if operation == CLIPPED_WITH_KL:
            kl_BT = kl_penalty(self.logprobs_BT, tables.reference_logprobs_BT, "low_var_kl")
            loss = loss + KL_COEFFICIENT * agg_loss(kl_BT, self.mask_BT, mode, **self.config.global_batch_info)
        self.logprobs_BT.grad = None
        loss.backward()
        return loss.detach()
