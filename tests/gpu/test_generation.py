"""The hybrid of an actor and generation with transformers on a device: it generates with the trained weights."""

from __future__ import annotations

import random

import numpy as np
import torch

from rljob_testing import compare
from rljob_testing.gpu import hybrids
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training import engine_updates
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.engines.rollout.hf_engine import HfEngine
from rljob_trainer.weights.buckets import whole_tensors
from rljob_trainer.workers.columns import TOKENS


def test_the_generator_has_the_weights_of_every_update(case: DeviceContext) -> None:
    for dtype, limit in hybrids.LARGEST_DIFFERENCE.items():
        name = str(dtype).removeprefix("torch.")
        hybrid = hybrids.hf_hybrid(case, dtype)
        for step in range(2):
            rollout = whole_rollout(hybrid, hybrids.prompt_batch(), hybrids.SAMPLING)
            assert case.note(f"{name}, version {step}", hybrids.largest_difference(hybrid, rollout)) < limit
            hybrid.actor.update_policy(engine_updates.random_rollout(hybrids.VOCABULARY, step), step)
            # The update was large enough to be noticed if it were not synced.
            assert case.note(f"{name}, stale", hybrids.largest_difference(hybrid, rollout)) > 2 * limit


def test_weights_are_synced_bitwise(case: DeviceContext) -> None:
    hybrid = hybrids.hf_hybrid(case, torch.float32)
    hybrid.actor.update_policy(engine_updates.random_rollout(hybrids.VOCABULARY, 0), 0)
    hybrid.begin_rollout(True)
    engine = hybrid.rollout.engine
    assert isinstance(engine, HfEngine)
    found = {name: each.detach().cpu() for name, each in engine.model.named_parameters()}
    shards = hybrid.actor.engine.named_shards()
    compare.assert_bitwise_equal(found, {name: each.cpu() for name, each in whole_tensors(shards, torch.float32)})


def test_training_and_generation_draw_from_separate_streams(case: DeviceContext) -> None:
    """On the host, on the device, and from Python's and NumPy's generators."""
    first = hybrids.hf_hybrid(case, torch.float32)
    with first.random_streams.generation():
        generation = draws(case.device)
    # Only the first run has generated: training does not change.
    training = draws(case.device)
    second = hybrids.hf_hybrid(case, torch.float32)
    assert draws(case.device) == training
    with second.random_streams.generation():
        assert draws(case.device) == generation
        later = draws(case.device)
    assert draws(case.device) != training
    for name, drawn in generation.items():
        assert len({tuple(each[name]) for each in (generation, training, later)}) == 3, drawn


def test_a_response_follows_from_its_seed(case: DeviceContext) -> None:
    """Not from the generators of the process, and not from other responses."""
    hybrid = hybrids.hf_hybrid(case, torch.float32)
    found = tokens_of(whole_rollout(hybrid, hybrids.prompt_batch(), hybrids.SAMPLING))
    with hybrid.random_streams.generation():
        draws(case.device)
    assert tokens_of(whole_rollout(hybrid, hybrids.prompt_batch(), hybrids.SAMPLING)) == found
    assert tokens_of(whole_rollout(hybrid, hybrids.prompt_batch().slice(4, 12), hybrids.SAMPLING)) == found[4:]
    assert tokens_of(whole_rollout(hybrid, hybrids.prompt_batch(seed=100), hybrids.SAMPLING)) != found
    # Responses to one prompt differ.
    assert len(set(found[:4])) > 1


def draws(device: torch.device) -> dict[str, list[float]]:
    """Some numbers from each generator of the process."""
    return {
        "host": torch.rand(4).tolist(),
        "device": torch.rand(4, device=device).tolist(),
        "numpy": np.random.rand(4).tolist(),
        "python": [random.random() for _ in range(4)],
    }


def tokens_of(rollout: DataProto) -> list[tuple[int, ...]]:
    """The tokens of each row."""
    return [tuple(row.tolist()) for row in rollout.ragged_column(TOKENS).row_tensors()]
