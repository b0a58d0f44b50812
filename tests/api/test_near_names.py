"""What "did you mean" is said of: slips of the keyboard, not other things with a similar name."""

from __future__ import annotations

import pytest

from rljob_api.near_names import near_names
from rljob_api.v1alpha1.algorithm import AlgorithmType
from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.policy_loss import LossType


@pytest.mark.parametrize(
    ("written", "known", "meant"),
    [
        ("GPRO", AlgorithmType, "GRPO"),
        ("grpo", AlgorithmType, "GRPO"),
        ("Dr.GRPO", AlgorithmType, "DrGRPO"),
        ("REINFORCE++", AlgorithmType, "ReinforcePlusPlus"),
        ("remax", AlgorithmType, "ReMax"),
        ("Cliped", LossType, "Clipped"),
        ("kl-cov", LossType, "KLCov"),
        ("float-32", Dtype, "Float32"),
        ("nodess", ["name", "nodes"], "nodes"),
        ("gpusPerNod", ["gpuResource", "gpusPerNode"], "gpusPerNode"),
        ("max_new_tokens", ["maxNewTokens", "maxPromptTokens"], "maxNewTokens"),
        ("naem", ["name", "nodes"], "name"),
        ("stepz", ["steps", "seed"], "steps"),
    ],
)
def test_a_slip_is_understood(written: str, known: list[str], meant: str) -> None:
    assert near_names(written, known) == [meant]


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("DPO", AlgorithmType),
        ("ORPO", AlgorithmType),
        ("VAPO", AlgorithmType),
        ("REINFORCE", AlgorithmType),
        ("PPO", LossType),
        ("Float16", Dtype),
        ("BFloat32", Dtype),
        ("topN", ["topK", "topP"]),
        ("start", ["status", "stop", "list"]),
        ("", ["name"]),
    ],
)
def test_another_thing_is_not_a_slip(written: str, known: list[str]) -> None:
    assert near_names(written, known) == []


def test_the_nearest_comes_first() -> None:
    assert near_names("scores", ["scorer", "score", "other", "store"], max_names=2) == ["score", "scorer"]
