"""How the training model is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from transformers import GPT2Config

from rljob_trainer.engines.train.model import build_on_meta, transformer_layers, without_dropout
from rljob_trainer.errors import ConfigurationError


def test_every_dropout_is_switched_off() -> None:
    config = without_dropout(GPT2Config(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3, n_layer=2, n_embd=8, n_head=2))
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)


def test_a_model_is_built_without_memory_and_without_dropout(tmp_path: Path) -> None:
    GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=16).save_pretrained(tmp_path)
    model = build_on_meta(tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(transformer_layers(model)) == 3
    probabilities = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert probabilities == {0.0}


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.training\.model\.source: .* holds no causal language model"):
        build_on_meta(tmp_path)
