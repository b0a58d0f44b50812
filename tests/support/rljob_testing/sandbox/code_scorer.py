"""The reward Code with limits for tests."""

from __future__ import annotations

from rljob_trainer.rewards.code import CodeScorer

SPEC = CodeScorer(
    "spec.training.rewards[0].type (reward score)",
    is_fraction=True,
    max_tests=15,
    test_seconds=2.0,
    response_seconds=10.0,
    memory_bytes=256 << 20,
)
