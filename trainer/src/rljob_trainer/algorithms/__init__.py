"""Advantages and losses as pure functions on flat tensors: no Ray, no clock, no randomness, no state.

1. `interfaces` defines what an advantage estimator and a policy loss are. Read it first.
2. The formulas: `advantages`, `token_advantages`, `policy_losses`, `sequence_losses`, `covariance_losses`,
   `value_losses`, `kl`, `rollout_correction`, `policy_filtration` and `aggregation`.
3. Their building blocks: `segments`, `discounted_sums`, `whitening` and `selection`.
4. `advantage_registry` and `loss_registry` choose the functions that a job names.
5. `functions`, `function_results`, `function_trial` and `several_workers` load, check and try a user's own functions.

A user's own function can import all types that it needs from this package.
"""

from rljob_trainer.algorithms.functions import policy_loss_function, token_advantage
from rljob_trainer.algorithms.interfaces import (
    AdvantageEstimator,
    LossInputs,
    OneWorker,
    PolicyLoss,
    Reduce,
    ResponseInputs,
    TokenAdvantages,
    TokenInputs,
    TokenLosses,
    WholeInputs,
)
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.whitening import whitened

__all__ = [
    "AdvantageEstimator",
    "LossInputs",
    "OneWorker",
    "PolicyLoss",
    "Reduce",
    "ResponseInputs",
    "Segments",
    "TokenAdvantages",
    "TokenInputs",
    "TokenLosses",
    "WholeInputs",
    "policy_loss_function",
    "token_advantage",
    "whitened",
]
