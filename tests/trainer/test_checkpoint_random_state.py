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

CPU = torch.device("cpu")


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
    document = json.loads(json.dumps(capture_random_state(CPU)))
    second = draw()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert draw() != second
    restore_random_state(document, CPU)
    assert draw() == second != first


@pytest.mark.parametrize("document", [None, {}, {"torch_cpu": 1}, "text"])
def test_a_foreign_document_is_rejected(document: JsonValue) -> None:
    before = capture_random_state(CPU)
    with pytest.raises(CheckpointError, match=r"random state of the checkpoint: .*; the checkpoint was not written"):
        restore_random_state(document, CPU)
    assert capture_random_state(CPU) == before


def test_only_the_own_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sees all eight GPUs of its node, and saves the state of its own. On the next node the process may
    have another GPU, and the generators of its neighbours stay as they are."""
    states = {number: torch.full((16,), number, dtype=torch.uint8) for number in range(8)}

    def state_of(device: torch.device) -> torch.Tensor:
        return states[device.index]

    def set_state(state: torch.Tensor, device: torch.device) -> None:
        states[device.index] = state

    monkeypatch.setattr(torch.cuda, "get_rng_state", state_of)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    document = json.loads(json.dumps(capture_random_state(torch.device("cuda", 3))))
    restore_random_state(document, torch.device("cuda", 5))
    assert {number: state.tolist() for number, state in states.items()} == {
        number: [3 if number == 5 else number] * 16 for number in range(8)
    }
    # A run that continues on a CPU.
    restore_random_state(document, CPU)
    restore_random_state(capture_random_state(CPU), torch.device("cuda", 0))
    assert states[0].tolist() == [0] * 16
