"""Which models can recompute activations, and in which layers. That recomputation changes no number is tested in
`tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rljob_trainer.controller.checks.fit import check_recomputation
from rljob_trainer.engines.train.model import build_on_meta, transformer_layers
from rljob_trainer.engines.train.sharded_model import recompute_activations
from rljob_trainer.errors import ConfigurationError

NUM_LAYERS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=NUM_LAYERS, num_attention_heads=2
    ).save_pretrained(tmp_path)
    return tmp_path


def recomputed(model: torch.nn.Module) -> list[int]:
    """Which of the model's layers are recomputed."""
    layers = transformer_layers(model)
    return [
        number
        for number, layer in enumerate(layers)
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    ]


@pytest.mark.parametrize(("every", "layers"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3]), (4, [0])])
def test_every_nth_layer_from_the_first_is_recomputed(every: int, layers: list[int], folder: Path) -> None:
    model = build_on_meta(folder)
    assert recomputed(model) == []
    recompute_activations(model, every)
    assert recomputed(model) == layers
    check_recomputation(folder, every)


def test_more_layers_than_the_model_has_are_rejected(folder: Path) -> None:
    wrong = r"gradientCheckpointingEveryNthLayer: the model has 4 layers \(seen: 5\); set at most 4, or remove it"
    with pytest.raises(ConfigurationError, match=wrong):
        check_recomputation(folder, 5)
    with pytest.raises(ConfigurationError, match=wrong):
        recompute_activations(build_on_meta(folder), 5)
    GPT2Config(n_layer=2).save_pretrained(folder)
    with pytest.raises(ConfigurationError, match=r"the model has 2 layers \(seen: 3\)"):
        check_recomputation(folder, 3)


def test_models_without_recomputable_layers_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of transformers are supported; the others here lack what is needed."""
    model = build_on_meta(folder)
    assert isinstance(model, PreTrainedModel)
    monkeypatch.setattr(model, "supports_gradient_checkpointing", False)
    with pytest.raises(
        ConfigurationError, match=r"gradientCheckpointing: a 'llama' model does not support recomputing activ"
    ):
        recompute_activations(model, 1)
    with pytest.raises(
        ConfigurationError, match=r"^spec\.training\.critic\.model\.gradientCheckpointing: a 'llama' model"
    ):
        recompute_activations(model, 1, "spec.training.critic.model.gradientCheckpointing")
    model = build_on_meta(folder)
    layers = model.model.layers  # type: ignore[union-attr]
    layers[2] = torch.nn.Linear(8, 8)  # type: ignore[index, operator]
    with pytest.raises(
        ConfigurationError, match=r"EveryNthLayer: a 'llama' model .* all layers or of none \(seen: 2\)"
    ):
        recompute_activations(model, 2)
