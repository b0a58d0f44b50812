"""Whether two runs gave the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rljob_trainer.observability.metrics import (
    ADVANTAGE_MEAN,
    KL_LOSS,
    POLICY_LOSS,
    PPO_KL,
    TIMING_PREFIX,
    TOKEN_IMBALANCE,
    TOKEN_IMBALANCE_BEFORE,
)

RELATIVE = 1e-5
CANCELLING = (POLICY_LOSS, PPO_KL, KL_LOSS, ADVANTAGE_MEAN)
"""In which numbers of about 1 cancel: their rounding is seen beside 1, not beside what is left."""
OF_WORKERS = (TOKEN_IMBALANCE, TOKEN_IMBALANCE_BEFORE)
"""Metrics that are about the number of workers."""

Tensors = Mapping[str, torch.Tensor]


def difference(found: Tensors, right: Tensors) -> float:
    """Norm of the difference of all tensors together, as a share of the norm of the right ones."""
    assert found.keys() == right.keys()
    norm = _norm(right)
    assert norm > 0
    return _norm({name: found[name] - right[name] for name in right}) / norm


def assert_bitwise(found: Tensors, right: Tensors) -> None:
    """Equal to the last bit."""
    assert found.keys() == right.keys()
    assert [name for name in right if not torch.equal(found[name], right[name])] == []


def assert_same_metrics(found: Mapping[str, float], right: Mapping[str, float]) -> None:
    """Equal to five digits, but for what is about the number of workers, and for seconds."""
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
