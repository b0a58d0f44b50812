"""The engine that generates with transformers: its log-probabilities are the model's own, and of one version of the
weights. The expected values come from `from_pretrained` with eager attention, on whole sequences one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig, PreTrainedModel

from rljob_testing.models import tiny_models
from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.errors import ConfigurationError

PROMPTS = ((4, 9, 5), (12, 7, 30, 8, 44, 61, 19, 5, 9, 71, 33, 15, 90), (3, 3, 17, 21, 60))
"""Prompts shorter and longer than the models' windows."""
TEMPERATURES = (0.0, 0.7, 1.0, 1.6)
SAMPLING = SamplingSettings(1.0, 1.0, 0, 12, ())
REQUESTS = [
    GenerationRequest(f"{prompt[0]} {temperature}", prompt, replace(SAMPLING, temperature=temperature), seed)
    for seed, prompt in enumerate(PROMPTS)
    for temperature in TEMPERATURES
]


def folder_of(name: str, folder: Path) -> Path:
    """The folder of a tiny model with the tokenizer of another: its texts are meaningless."""
    tiny_models.save(name, folder)
    tiny_models.copy_tokenizer(folder)
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
def assert_own_logprobs(model: PreTrainedModel, request: GenerationRequest, found: FinishedSequence) -> None:
    sequence = torch.tensor([[*request.prompt_token_ids, *found.token_ids]])
    logits_NV = model(input_ids=sequence, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1]
    logprobs_NV = (logits_NV / (request.sampling.temperature or 1.0)).log_softmax(dim=-1)
    right_N = logprobs_NV.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), right_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "attention"), [("gemma2", "eager"), ("gemma3", "sdpa"), ("mistral", "sdpa")])
def test_logprobs_of_a_response_equal_those_of_the_models_own_forward(
    name: str, attention: str, tmp_path: Path
) -> None:
    folder = folder_of(name, tmp_path)
    reference = reference_model(folder)
    engine = HfEngine(HfSettings(folder, torch.device("cpu"), torch.float32, len(REQUESTS)))
    assert engine.model.config._attn_implementation == attention
    engine.update_weights(reference.named_parameters(), 0)
    finished = engine.generate(REQUESTS)
    for request in REQUESTS:
        assert_own_logprobs(reference, request, finished[request.request_id])
    assert sum(len(each.token_ids) > tiny_models.WINDOW for each in finished.values()) > len(REQUESTS) / 2


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_float32_head_does_not_round_logits(name: str, tmp_path: Path) -> None:
    """Log-probabilities are those of the same hidden states in BFloat16, with the head in float32."""
    folder = folder_of(name, tmp_path)
    reference = reference_model(folder)
    request = replace(REQUESTS[1], sampling=replace(SAMPLING, temperature=1.0))
    errors = {}
    for has_float32_head in (False, True):
        engine = HfEngine(HfSettings(folder, torch.device("cpu"), torch.bfloat16, 1, has_float32_head))
        engine.update_weights(reference.named_parameters(), 0)
        # A second pass over the whole row would not do: some CPUs round a product of 16-bit matrices by its shape.
        hidden: list[torch.Tensor] = []
        hook = engine.model.get_decoder().register_forward_hook(
            lambda *call, into=hidden: into.append(call[-1].last_hidden_state[0, -1])
        )
        found = engine.generate([request])[request.request_id]
        hook.remove()
        unrounded_N = logprobs_in_float32(engine.model, torch.stack(hidden), found)
        errors[has_float32_head] = (torch.tensor(found.logprobs) - unrounded_N).abs().mean()
    assert errors[True] < 1e-5
    assert errors[False] > 1e-3


@torch.no_grad()
def logprobs_in_float32(model: PreTrainedModel, hidden_ND: torch.Tensor, found: FinishedSequence) -> torch.Tensor:
    """[N]: by these hidden states and the weight of the head in float32."""
    logits_NV: torch.Tensor = hidden_ND.float() @ model.get_output_embeddings().weight.float().T
    return logits_NV.log_softmax(dim=-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]


def test_weights_are_replaced_between_sequences_only(tmp_path: Path) -> None:
    folder = folder_of("gemma2", tmp_path)
    reference = reference_model(folder)
    engine = HfEngine(HfSettings(folder, torch.device("cpu"), torch.float32, 1))
    engine.update_weights(reference.named_parameters(), 0)
    first, second, *_ = REQUESTS
    engine.add(first)
    assert engine.step() == []
    engine.add(second)
    for parameter in reference.parameters():
        parameter.data *= 1.1
    with pytest.raises(AssertionError, match="while 1 sequences are running"):
        engine.update_weights(reference.named_parameters(), 1)
    engine.abort([first.request_id])
    engine.update_weights(reference.named_parameters(), 1)
    found = engine.generate([])[second.request_id]
    assert_own_logprobs(reference, second, found)
    assert found.policy_versions == (1,) * len(found.token_ids)


def test_a_model_that_does_not_use_the_cache_is_rejected(tmp_path: Path) -> None:
    """Mamba has its cache under another name, and would see only the last token."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    tiny_models.copy_tokenizer(tmp_path)
    engine = HfEngine(HfSettings(tmp_path, torch.device("cpu"), torch.float32, 4))
    with pytest.raises(ConfigurationError, match=r"'mamba' model, .* HuggingFace differs"):
        engine.update_weights(model.named_parameters(), 0)


def test_the_comparison_stays_within_the_models_positions(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tiny_models.copy_tokenizer(tmp_path)
    engine = HfEngine(HfSettings(tmp_path, torch.device("cpu"), torch.float32, 4))
    engine.update_weights(model.named_parameters(), 0)
    assert not engine.has_unfinished()
