"""Top-k and top-p of the engine that generates with transformers: which tokens come, how often, how likely they were.

Legend: N samples, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_testing.replayed_steps import MODEL
from rljob_trainer.engines.rollout.base import GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings

NUM_SAMPLES = 600
PROMPT = (4, 9, 5, 12, 7)
SETTINGS = {
    "all tokens": SamplingSettings(3.0, 1.0, 0, 1, ()),
    "top-k": SamplingSettings(3.0, 1.0, 4, 1, ()),
    "top-p": SamplingSettings(3.0, 0.6, 0, 1, ()),
    "top-p of top-k": SamplingSettings(1.5, 0.8, 6, 1, ()),
}


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    engine = HfEngine(HfSettings(MODEL, torch.device("cpu"), torch.float32, NUM_SAMPLES))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    engine.update_weights(model.named_parameters(), 0)
    return engine


@torch.no_grad()
def distribution(sampling: SamplingSettings) -> dict[int, float]:
    """Tokens that may follow the prompt, and their probabilities: the definitions, token by token."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    logits_V = model(torch.tensor([PROMPT])).logits[0, -1] / sampling.temperature
    ranked = sorted(enumerate(logits_V.softmax(dim=-1).tolist()), key=lambda each: -each[1])
    ranked = ranked[: sampling.top_k or len(ranked)]
    total = sum(probability for _, probability in ranked)
    kept: dict[int, float] = {}
    for token, probability in ranked:
        if sum(kept.values()) < sampling.top_p * total:
            kept[token] = probability
    return {token: probability / sum(kept.values()) for token, probability in kept.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_follow_the_cut_distribution(engine: HfEngine, name: str) -> None:
    sampling, right = SETTINGS[name], distribution(SETTINGS[name])
    for seed in range(NUM_SAMPLES):
        engine.add(GenerationRequest(str(seed), PROMPT, sampling, seed))
    finished = engine.step()
    counts = Counter(each.token_ids[0] for each in finished)
    assert counts.total() == NUM_SAMPLES
    for token, probability in right.items():
        spread = math.sqrt(NUM_SAMPLES * probability * (1 - probability))
        assert counts[token] == pytest.approx(NUM_SAMPLES * probability, abs=4 * spread + 1)
    assert counts.keys() <= right.keys()
    for each in finished:
        assert each.logprobs[0] == pytest.approx(math.log(right[each.token_ids[0]]), abs=1e-5)


def test_the_cuts_differ() -> None:
    sizes = {name: len(distribution(sampling)) for name, sampling in SETTINGS.items()}
    assert sizes["all tokens"] == 64
    assert sizes["top-k"] == 4
    assert 1 < sizes["top-p of top-k"] < 6 < sizes["top-p"] < 64
