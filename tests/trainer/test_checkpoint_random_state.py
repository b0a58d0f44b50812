"""Random generators continue after a restore as if nothing had happened."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from pydantic import JsonValue

from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.random_state import capture_random_state, restore_random_state


def draw() -> tuple[list[float], list[float], list[float]]:
    # One normal number each: the generators cache the second of a pair, which is part of their state.
    return (
        [torch.randn(1).item(), torch.rand(1).item()],
        [float(np.random.randn()), float(np.random.rand())],
        [random.gauss(0, 1), random.random()],
    )


def test_the_same_numbers_are_drawn_after_a_restore() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    first = draw()
    document = json.loads(json.dumps(capture_random_state()))
    second = draw()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert draw() != second
    restore_random_state(document)
    assert draw() == second != first


@pytest.mark.parametrize("document", [None, {}, {"torch_cpu": 1}, "text"])
def test_a_foreign_document_is_rejected(document: JsonValue) -> None:
    before = capture_random_state()
    with pytest.raises(CheckpointError, match=r"random state of the checkpoint: .*; the checkpoint was not written"):
        restore_random_state(document)
    assert capture_random_state() == before
