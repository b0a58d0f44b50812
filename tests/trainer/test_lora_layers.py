"""Which layers of a model get adapters (LoRA)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import FalconConfig, PhimoeConfig

from rljob_api.v1alpha1.model import Lora
from rljob_testing.models import tiny_models
from rljob_trainer.engines.train.lora import add_adapters, is_adapter, linear_layers, target_endings, target_layers
from rljob_trainer.engines.train.model import build_on_meta
from rljob_trainer.errors import ConfigurationError

LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def test_targets_are_linear_layers_of_the_decoder() -> None:
    model = build_on_meta(tiny_models.QUICKSTART_MODEL)
    assert {name.rpartition(".")[2] for name in linear_layers(model)} == set(LINEAR)
    assert target_layers(model, ("k_proj", "self_attn.v_proj")) == [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(len(model.model.layers))
        for name in ("k_proj", "v_proj")  # type: ignore[arg-type,union-attr]
    ]
    for target in ("proj", "lm_head", "embed_tokens", "model"):
        with pytest.raises(
            ConfigurationError,
            match=rf"lora\.targets: no linear layer .* is called '{target}'; name some of {', '.join(LINEAR)}, or",
        ):
            target_layers(model, (target, "q_proj"))


def test_routers_that_are_linear_layers_get_no_adapters(tmp_path: Path) -> None:
    """A router that also returns its choice has no product that an adapter's could be added to."""
    PhimoeConfig(**tiny_models.COMMON, num_local_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path)
    model = build_on_meta(tmp_path)
    assert isinstance(model.get_submodule("model.layers.0.mlp.router"), torch.nn.Linear)
    assert {name.rpartition(".")[2] for name in linear_layers(model)} == {"k_proj", "o_proj", "q_proj", "v_proj"}
    FalconConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16).save_pretrained(tmp_path)
    assert "transformer.h.0.self_attention.dense" in linear_layers(build_on_meta(tmp_path))


def test_every_linear_layer_of_the_decoder_gets_adapters(tmp_path: Path) -> None:
    for name, make_config in tiny_models.ARCHITECTURES.items():
        make_config().save_pretrained(tmp_path)
        model = build_on_meta(tmp_path)
        layers = linear_layers(model)
        assert layers
        assert {layer.rpartition(".")[2] for layer in layers} == set(target_endings(model, None)), name
        assert not any("embed" in layer or layer in ("lm_head", "embed_out") for layer in layers), name
        add_adapters(model, Lora(rank=2))
        assert [layer for layer, module in model.named_modules() if hasattr(module, "lora_A")] == layers, name
        assert all(is_adapter(each) is parameter.requires_grad for each, parameter in model.named_parameters()), name
