"""The hybrid of an actor and generation with transformers on a device: it generates with the trained weights.

Legend: R response tokens of all rows.
"""

from __future__ import annotations

import random
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training import engine_updates
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.weights.buckets import whole_tensors
from rljob_trainer.workers.columns import (
    PROMPT_TOKEN_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
    TOKENS,
    token_batch,
)
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
VOCABULARY = 64
SEED = 11
PROMPTS = ((4, 9, 5), (12, 7, 3, 8, 4, 6, 11, 5, 9), (3, 3, 7))
SAMPLING = SamplingSettings(1.0, 1.0, 0, 24, ())
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Largest difference between log-probabilities of an engine that generates with a cache and of the trainer."""


def made_hybrid(place: DeviceContext, dtype: torch.dtype) -> HybridWorker:
    """Actor and generator of the quickstart's model."""
    actor = engine_updates.build_actor(MODEL, place.context, dtype, Optimizer(learning_rate=1e-2))
    settings = HfSettings(MODEL, place.device, dtype, len(PROMPTS))
    make_engine = partial(HfEngine, settings)
    rollout = RolloutWorker(place.context, make_engine, 1)
    return HybridWorker(place.context, actor, rollout, dtype, seed=SEED)


def prompt_batch(seed: int = 0) -> DataProto:
    """Generates four responses to each prompt."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS for _ in range(4)]
    return DataProto(
        {SAMPLE_SEEDS: torch.arange(len(prompts)) + seed}, ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows(prompts)}
    )


def largest_difference(hybrid: HybridWorker, rollout: DataProto) -> float:
    """The largest difference between the trainer's and the generator's log-probabilities of a rollout."""
    mask = rollout.ragged_column(RESPONSE_MASK)
    rollout_N = rollout.ragged_column(ROLLOUT_LOGPROBS).values[mask.values]
    found_N = hybrid.actor.engine.forward(token_batch(rollout), SAMPLING.temperature).logprobs_N
    return float((found_N - rollout_N).abs().max())


def test_the_generator_has_the_weights_of_every_update(place: DeviceContext) -> None:
    for dtype, limit in LARGEST_DIFFERENCE.items():
        name = str(dtype).removeprefix("torch.")
        hybrid = made_hybrid(place, dtype)
        for step in range(2):
            rollout = hybrid.generate_sequences(prompt_batch(), SAMPLING, True)
            assert place.note(f"{name}, version {step}", largest_difference(hybrid, rollout)) < limit
            hybrid.actor.update_policy(engine_updates.random_rollout(VOCABULARY, step), step)
            # The update was large enough to be noticed if it were not synced.
            assert place.note(f"{name}, stale", largest_difference(hybrid, rollout)) > 2 * limit


def test_weights_are_synced_bitwise(place: DeviceContext) -> None:
    hybrid = made_hybrid(place, torch.float32)
    hybrid.actor.update_policy(engine_updates.random_rollout(VOCABULARY, 0), 0)
    with hybrid.generating():
        engine = hybrid.rollout.engine
        assert isinstance(engine, HfEngine)
        found = {name: each.detach().cpu() for name, each in engine.model.named_parameters()}
    shards = hybrid.actor.engine.named_shards()
    compare.assert_bitwise_equal(found, {name: each.cpu() for name, each in whole_tensors(shards, torch.float32)})


def test_training_and_generation_draw_from_separate_streams(place: DeviceContext) -> None:
    """On the host, on the device, and from Python's and NumPy's generators."""
    first = made_hybrid(place, torch.float32)
    with first.generating():
        generation = draws(place.device)
    # Only the first run has generated: training does not change.
    training = draws(place.device)
    second = made_hybrid(place, torch.float32)
    assert draws(place.device) == training
    with second.generating():
        assert draws(place.device) == generation
        later = draws(place.device)
    assert draws(place.device) != training
    for name, drawn in generation.items():
        assert len({tuple(each[name]) for each in (generation, training, later)}) == 3, drawn


def test_a_response_follows_from_its_seed(place: DeviceContext) -> None:
    """Not from the generators of the process, and not from other responses."""
    hybrid = made_hybrid(place, torch.float32)
    found = tokens_of(hybrid.generate_sequences(prompt_batch(), SAMPLING, True))
    with hybrid.generating():
        draws(place.device)
    assert tokens_of(hybrid.generate_sequences(prompt_batch(), SAMPLING, True)) == found
    assert tokens_of(hybrid.generate_sequences(prompt_batch().slice(4, 12), SAMPLING, True)) == found[4:]
    assert tokens_of(hybrid.generate_sequences(prompt_batch(seed=100), SAMPLING, True)) != found
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
