"""How the training model is built."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    Gemma3nTextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rljob_trainer.engines.train.model import (
    attention_cost,
    build_on_meta,
    check_bfloat16,
    materialize,
    transformer_layers,
    without_dropout,
)
from rljob_trainer.engines.train.weight_loading import load_weights
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.model_files import INDEX_FILE, SINGLE_FILE


def test_every_dropout_is_disabled() -> None:
    config = without_dropout(GPT2Config(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3, n_layer=2, n_embd=8, n_head=2))
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)


def test_a_model_is_built_on_the_meta_device_without_dropout(tmp_path: Path) -> None:
    GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=16).save_pretrained(tmp_path)
    model = build_on_meta(tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(transformer_layers(model)) == 3
    probabilities = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert probabilities == {0.0}


QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    num_experts=128,
)


@pytest.mark.parametrize(
    ("config", "used_parameters", "layers_times_query", "tolerance"),
    [
        # All except the embedding.
        (QWEN3_8B, 7.57e9, 36 * 4096, 0.01),
        # "A3B".
        (QWEN3_30B, 3.03e9, 48 * 4096, 0.01),
        # 12 layers of 7.08 million, and the head of 50,257 x 768. Its MLPs have two matrices, not three.
        (GPT2Config(), 123.5e6, 12 * 768, 0.2),
    ],
    ids=["Qwen3-8B", "Qwen3-30B-A3B", "GPT-2"],
)
def test_the_cost_of_attention_is_relative_to_the_weights_that_a_token_uses(
    config: PreTrainedConfig, used_parameters: float, layers_times_query: int, tolerance: float
) -> None:
    """Forward pass of a row of n tokens: 2 operations per weight and token, and 2 x query size x n² per layer."""
    assert attention_cost(config) == pytest.approx(layers_times_query / used_parameters, rel=tolerance)


def test_models_without_heads_and_with_layers_of_several_sizes_have_a_cost_of_attention() -> None:
    assert attention_cost(MambaConfig()) == 0
    assert 0 < attention_cost(Gemma3nTextConfig()) < 1e-4


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.training\.model\.source: .* holds no causal language model"):
        build_on_meta(tmp_path)


def test_quantised_weights_are_rejected_by_the_configuration(tmp_path: Path) -> None:
    GPT2Config(quantization_config={"quant_method": "fp8"}).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"\(quantization_config of config\.json: fp8\)"):
        build_on_meta(tmp_path)


def loaded(folder: Path, **tensors: Tensor | None) -> PreTrainedModel:
    """Loads a small Llama from files in which these tensors (`.` written as `__`) are replaced or missing."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    changed = {name.replace("__", "."): value for name, value in tensors.items()}
    held = {**load_file(folder / SINGLE_FILE), **changed}
    save_file({name: value for name, value in held.items() if value is not None}, folder / SINGLE_FILE)
    model = build_on_meta(folder)
    assert isinstance(model, PreTrainedModel)
    materialize(model, torch.device("cpu"))
    model.tie_weights()
    load_weights(model, model, folder, "")
    return model


UP = "model__layers__0__mlp__up_proj__weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({UP: torch.zeros(8, 8, dtype=torch.float8_e4m3fn)}, r"up_proj\.weight' in .* has dtype F8_E4M3: it is quanti"),
        ({UP: torch.zeros(8, 8, dtype=torch.int8)}, r"up_proj\.weight' in .* has dtype I8: it is quanti"),
        ({UP: torch.zeros(8, 9)}, r"has shape \[8, 9\], .*the model expects \[8, 8\]"),
        ({UP: None}, r"has no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"),
        (
            {"lm_head__weight": torch.zeros(16, 8)},
            r"ties 'lm_head\.weight' to 'model\.embed_tokens\.weight'.*tie_word_embeddings",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(
    tmp_path: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        loaded(tmp_path, **tensors)


def test_a_tied_tensor_may_occur_twice_and_other_extra_ones_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embeddings = loaded(tmp_path).state_dict()["lm_head.weight"].clone()
    assert caplog.text == ""
    loaded(tmp_path, lm_head__weight=embeddings)
    assert caplog.text == ""
    loaded(tmp_path, scales=torch.ones(3))
    assert "1 tensors that a 'llama' model does not have, such as scales" in caplog.text


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    for damaged in (b"", whole[:100], whole[:-1]):
        (tmp_path / SINGLE_FILE).write_bytes(damaged)
        with pytest.raises(
            ConfigurationError, match=r"cannot be read \(.*\); if files are missing or damaged, download"
        ):
            load_weights(model, model, tmp_path, "")
    (tmp_path / SINGLE_FILE).unlink()
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ConfigurationError, match="has no weight_map that can be read"):
        load_weights(model, model, tmp_path, "")
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"model.embed_tokens.weight": "not-there.safetensors"}}')
    with pytest.raises(ConfigurationError, match="if files are missing or damaged"):
        load_weights(model, model, tmp_path, "")


def test_the_single_file_is_used_even_if_there_is_an_index(tmp_path: Path) -> None:
    """As in `from_pretrained`."""
    loaded(tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {}}')
    model = build_on_meta(tmp_path)
    assert isinstance(model, PreTrainedModel)
    materialize(model, torch.device("cpu"))
    model.tie_weights()
    load_weights(model, model, tmp_path, "")


@pytest.mark.parametrize("has_units", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_is_rejected(monkeypatch: pytest.MonkeyPatch, has_units: bool) -> None:
    """torch also reports bfloat16 as supported where it is emulated, unless it is asked about hardware units only."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_units
    )
    if has_units:
        check_bfloat16(device)
        return
    with pytest.raises(ConfigurationError) as caught:
        check_bfloat16(device)
    assert str(caught.value).startswith("spec.training.model.dtype: Tesla T4 ")
    assert "Float32" in str(caught.value)
