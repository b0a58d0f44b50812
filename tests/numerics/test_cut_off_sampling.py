"""Top-k and top-p of the engine that generates with transformers: which tokens are drawn, how often, and with which
log-probabilities. `tests/ray/test_vllm_sampling.py` has the same tests for vLLM."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_testing.models import sampling_by_definition
from rljob_trainer.engines.rollout.base import GenerationRequest
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    model_folder, num_samples = sampling_by_definition.MODEL, sampling_by_definition.NUM_SAMPLES
    engine = HfEngine(HfSettings(model_folder, torch.device("cpu"), torch.float32, num_samples))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    engine.update_weights(model.named_parameters(), 0)
    return engine


@pytest.mark.parametrize("name", sampling_by_definition.SETTINGS)
def test_samples_follow_the_truncated_distribution(engine: HfEngine, name: str) -> None:
    for seed in range(sampling_by_definition.NUM_SAMPLES):
        engine.add(
            GenerationRequest(str(seed), sampling_by_definition.PROMPT, sampling_by_definition.SETTINGS[name], seed)
        )
    samples = [(each.token_ids[0], each.logprobs[0]) for each in engine.step()]
    sampling_by_definition.assert_samples_follow(
        samples, sampling_by_definition.distribution(sampling_by_definition.SETTINGS[name])
    )


def test_the_truncations_differ() -> None:
    sizes = {
        name: len(sampling_by_definition.distribution(sampling))
        for name, sampling in sampling_by_definition.SETTINGS.items()
    }
    assert sizes["all tokens"] == 64
    assert sizes["top-k"] == 4
    assert 1 < sizes["top-p of top-k"] < 6 < sizes["top-p"] < 64
