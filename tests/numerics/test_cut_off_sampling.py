"""Top-k and top-p of the engine that generates with transformers: which tokens come, how often, how likely they were.

vLLM is asked the same in `tests/ray/test_vllm_sampling.py`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_testing.cut_off_sampling import NUM_SAMPLES, PROMPT, SETTINGS, assert_follows, distribution
from rljob_testing.replayed_steps import MODEL
from rljob_trainer.engines.rollout.base import GenerationRequest
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    engine = HfEngine(HfSettings(MODEL, torch.device("cpu"), torch.float32, NUM_SAMPLES))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    engine.update_weights(model.named_parameters(), 0)
    return engine


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_follow_the_cut_distribution(engine: HfEngine, name: str) -> None:
    for seed in range(NUM_SAMPLES):
        engine.add(GenerationRequest(str(seed), PROMPT, SETTINGS[name], seed))
    samples = [(each.token_ids[0], each.logprobs[0]) for each in engine.step()]
    assert_follows(samples, distribution(MODEL, SETTINGS[name]))


def test_the_cuts_differ() -> None:
    sizes = {name: len(distribution(MODEL, sampling)) for name, sampling in SETTINGS.items()}
    assert sizes["all tokens"] == 64
    assert sizes["top-k"] == 4
    assert 1 < sizes["top-p of top-k"] < 6 < sizes["top-p"] < 64
