"""Computes top-k, top-p and temperature by their definitions, one token at a time, as the reference for an engine's
samples.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_testing.models.tiny_models import QUICKSTART_MODEL
from rljob_trainer.engines.rollout.base import SamplingSettings

MODEL = QUICKSTART_MODEL
NUM_SAMPLES = 600
PROMPT = (4, 9, 5, 12, 7)
# vLLM accepts temperatures up to 2.
SETTINGS = {
    "all tokens": SamplingSettings(2.0, 1.0, 0, 1, ()),
    "top-k": SamplingSettings(2.0, 1.0, 4, 1, ()),
    "top-p": SamplingSettings(2.0, 0.9, 0, 1, ()),
    "top-p of top-k": SamplingSettings(1.5, 0.8, 6, 1, ()),
}

Sample = tuple[int, float]
"""A token and the log-probability that the engine reported for it."""


@torch.no_grad()
def distribution(sampling: SamplingSettings) -> dict[int, float]:
    """The probability of each token that may follow the prompt, by MODEL in float32."""
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


def assert_samples_follow(samples: Sequence[Sample], right: dict[int, float]) -> None:
    """Asserts that NUM_SAMPLES samples follow a distribution: each token as often as expected (within four standard
    deviations), no other tokens, and the log-probabilities as reported."""
    counts = Counter(token for token, _ in samples)
    assert counts.total() == NUM_SAMPLES
    for token, probability in right.items():
        spread = math.sqrt(NUM_SAMPLES * probability * (1 - probability))
        assert counts[token] == pytest.approx(NUM_SAMPLES * probability, abs=4 * spread + 1)
    assert counts.keys() <= right.keys()
    for token, logprob in samples:
        assert logprob == pytest.approx(math.log(right[token]), abs=1e-5)
