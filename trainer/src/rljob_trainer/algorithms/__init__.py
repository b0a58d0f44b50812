"""The learning rules as pure functions on flat tensors: no Ray, no clock, no randomness, no state.

Read `interfaces` first (what an advantage and a loss are), then `advantages`, `token_advantages`, `policy_losses`,
`sequence_losses`, `covariance_losses`, `value_losses`, `kl` and `aggregation` (the formulas), `segments`,
`discounted_sums`, `whitening` and `selection` (what they are written with),
`advantage_registry` and `loss_registry` (from a job to them), and `functions`, `function_results`, `function_trial`,
`several_workers` (the user's own).

What the user's own functions import is here.
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
