"""A critic's values equal those of transformers' own classes.

Legend: R response tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForTokenClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
)

from rljob_testing.models import tiny_models
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.output_head import VALUE_WEIGHT, Head
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import batch_of_rows


def settings_of(folder: Path) -> TrainEngineSettings:
    return TrainEngineSettings(folder, torch.device("cpu"), torch.float32, False, 64, None, head=Head.VALUE)


def random_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gemma2":
        config = Gemma2Config(
            **tiny_models.CLASSIFIER_SIZES,
            num_labels=1,
            sliding_window=4,
            attn_logit_softcapping=5.0,
            query_pre_attn_scalar=8,
        )
        return Gemma2ForTokenClassification(config)
    return Qwen3ForTokenClassification(
        Qwen3Config(**tiny_models.CLASSIFIER_SIZES, num_labels=1, tie_word_embeddings=True)
    )


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_values_equal_those_of_a_token_classifier(tmp_path: Path, kind: str) -> None:
    model = random_model(kind)
    # Zero in a model that was never trained.
    torch.nn.init.constant_(model.score.bias, 0.7)
    model.save_pretrained(tmp_path / "model")
    reference = type(random_model(kind)).from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 64, (length,), generator=generator) for length in (9, 2, 23)]
    values_N = TrainEngine(settings_of(tmp_path / "model")).values(batch_of_rows(rows))
    with torch.no_grad():
        expected = [reference(input_ids=row[None]).logits[0, :-1, 0] for row in rows]
    torch.testing.assert_close(values_N, torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert values_N.std() > 0.01


@pytest.mark.usefixtures("context")
def test_a_policy_becomes_a_critic_that_predicts_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    policy = Qwen3ForCausalLM(config)
    policy.save_pretrained(tmp_path / "model")
    engine = TrainEngine(settings_of(tmp_path / "model"))
    values_N = engine.values(batch_of_rows([torch.arange(2, 12)]))
    names = [name for name, _ in engine.named_shards()]
    assert torch.equal(values_N, torch.zeros(9))
    assert VALUE_WEIGHT in names
    assert not [name for name in names if "lm_head" in name]
    # The missing output head is no error.
    assert "they are ignored" not in caplog.text
