"""Checks whether two runs computed the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rljob_trainer.observability.metrics import (
    ADVANTAGE_MEAN,
    KL_LOSS,
    MICRO_BATCH_IMBALANCE,
    POLICY_LOSS,
    PPO_KL,
    TIMING_PREFIX,
    TOKEN_IMBALANCE,
    TOKEN_IMBALANCE_BEFORE,
)

RELATIVE = 1e-5
"""float32 rounds a number by at most 2^-24 = 6e-8 of itself. So another order of a sum of n numbers changes it by at
most n x 6e-8 of the sum of their sizes. The replayed steps add up 16 responses of at most 12 tokens: n = 192."""
CANCELLING = (POLICY_LOSS, PPO_KL, KL_LOSS, ADVANTAGE_MEAN)
"""Metrics that are small differences of numbers near 1. Their rounding error is relative to 1, not to the result."""
OF_WORKERS = (MICRO_BATCH_IMBALANCE, TOKEN_IMBALANCE, TOKEN_IMBALANCE_BEFORE)
"""Metrics that depend on the number of workers."""

Tensors = Mapping[str, torch.Tensor]


def relative_difference(found: Tensors, right: Tensors) -> float:
    """Norm of the difference of all tensors together, relative to the norm of the expected ones."""
    assert found.keys() == right.keys()
    norm = _norm(right)
    assert norm > 0
    return _norm({name: found[name] - right[name] for name in right}) / norm


def assert_bitwise_equal(found: Tensors, right: Tensors) -> None:
    """Asserts that all tensors are equal bit by bit."""
    assert found.keys() == right.keys()
    assert [name for name in right if not torch.equal(found[name], right[name])] == []


def assert_same_metrics(found: Mapping[str, float], right: Mapping[str, float]) -> None:
    """Asserts that all metrics agree to five digits, except times and metrics that depend on the number of workers."""
    assert found.keys() == right.keys()
    for name in right.keys() - OF_WORKERS:
        if name.startswith(TIMING_PREFIX):
            continue
        absolute = 1e-6 if name in CANCELLING else 0.0
        assert math.isclose(found[name], right[name], rel_tol=RELATIVE, abs_tol=absolute), (
            name,
            found[name],
            right[name],
        )


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))
