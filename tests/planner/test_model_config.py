"""Shapes from `config.json` have as many parameters as transformers' own models, for every known family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rljob_planner.errors import PlanError
from rljob_planner.known_models import known_configs
from rljob_planner.model_config import shape_of_config
from rljob_testing.models import tiny_models

Config = dict[str, object]

NOT_KNOWN = {"qwen3_next", "gpt2", "gpt_neox", "nemotron", "phi"}
FAMILIES = [name for name in tiny_models.ARCHITECTURES if name not in NOT_KNOWN]
REAL_SIZES = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "google/gemma-3-1b-pt")
LLAMA: Config = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def num_parameters(config: PreTrainedConfig) -> int:
    """Parameters of transformers' model; tied ones count once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shape_has_the_parameters_of_the_transformers_model(name: str) -> None:
    config = tiny_models.ARCHITECTURES[name]()
    expected = num_parameters(config)
    # A written file leaves out values that equal a default.
    for written in (config.to_dict(), config.to_diff_dict()):
        assert shape_of_config(written, name).num_parameters == expected


@pytest.mark.parametrize("name", REAL_SIZES)
def test_full_size_models_have_them_too(name: str) -> None:
    _, written = known_configs()[name.lower()]
    sizes = {key: value for key, value in written.items() if key != "model_type"}
    config: PreTrainedConfig = AutoConfig.for_model(str(written["model_type"]), **sizes)
    assert shape_of_config(written, name).num_parameters == num_parameters(config)


def test_biases_of_attention_and_mlp_are_counted() -> None:
    plain = shape_of_config(LLAMA, "llama").num_parameters
    both = shape_of_config({**LLAMA, "attention_bias": True, "mlp_bias": True}, "llama").num_parameters
    # Two layers: 64 each for queries, keys, values and outputs; two biases of 128 and one of 64 in the MLP.
    assert both - plain == 2 * (4 * 64 + 2 * 128 + 64)


def test_the_text_config_of_a_multimodal_model_is_read() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"head_dim": 16}
    found = shape_of_config({"model_type": "gemma3", "text_config": inner, "vision_config": {}}, "gemma")
    assert (found.num_layers, found.hidden_size, found.head_size) == (2, 64, 16)
    assert found.ties_head
    assert found.has_qk_norm


def test_windows_are_counted_by_layer() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512}
    found = shape_of_config(gemma, "gemma")
    assert (found.sliding_window, found.num_full_attention_layers) == (512, 4)  # every sixth of 26
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 512, "max_window_layers": 1}
    assert shape_of_config(qwen, "qwen").sliding_window is None  # use_sliding_window is not set
    found = shape_of_config({**qwen, "use_sliding_window": True}, "qwen")
    assert (found.sliding_window, found.num_full_attention_layers) == (512, 1)
    listed = {**LLAMA, "model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    assert shape_of_config(listed, "mistral").sliding_window is None


def test_a_mixture_of_experts_may_have_dense_layers() -> None:
    moe = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2}
    found = shape_of_config({**moe, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, "m")
    # Layers 1, 3 and 5 would have experts; layer 1 is excluded.
    assert (found.num_dense_layers, found.num_expert_layers) == (4, 2)
    assert (found.mlp_size, found.dense_mlp_size) == (32, 128)


def test_latent_attention_caches_the_low_rank_side() -> None:
    found = shape_of_config(tiny_models.ARCHITECTURES["deepseek_v3"]().to_dict(), "deepseek")
    assert found.kv_numbers_per_token == 32 + 16  # kv_lora_rank and qk_rope_head_dim
    plain = shape_of_config({**LLAMA, "num_key_value_heads": 2}, "llama")
    assert plain.kv_numbers_per_token == 2 * 2 * 16


def test_a_missing_size_is_named() -> None:
    lacking = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    with pytest.raises(PlanError, match=r"^mine: num_hidden_layers is missing in config.json.*--model-config"):
        shape_of_config(lacking, "mine")
    with pytest.raises(PlanError, match=r"hidden_size in config.json must be a whole number .*seen '64'\)"):
        shape_of_config({**LLAMA, "hidden_size": "64"}, "mine")
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 0, "v_head_dim": 0}
    heads = {"qk_rope_head_dim": 0, "qk_nope_head_dim": 0}
    for wrong in (
        {"num_attention_heads": 0},
        {"num_attention_heads": 10**6},
        {"num_hidden_layers": 10**8},
        latent | heads,
    ):
        with pytest.raises(PlanError, match=r"^mine: config.json does not describe a model \(seen "):
            shape_of_config({**LLAMA, **wrong}, "mine")
    with pytest.raises(PlanError, match=r"1,000,000,000 \(seen 10{30}\)"):
        shape_of_config({**LLAMA, "vocab_size": 10**30}, "mine")


@pytest.mark.parametrize("kind", ["linear_attention", "conv", "sparse"])
def test_unknown_layer_types_are_rejected_by_name(kind: str) -> None:
    mixed = {**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention", kind]}
    with pytest.raises(PlanError, match=rf"^mine: .* layer type .*layer_types: '{kind}'\); it knows"):
        shape_of_config(mixed, "mine")
    with pytest.raises(PlanError, match=rf"layer_types: '{kind}'"):
        shape_of_config({"model_type": "gemma3", "text_config": mixed}, "mine")


def test_quantised_weights_are_rejected_as_in_the_trainer() -> None:
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    expected = r"^mine: the weights are quantised, .* \(config.json, quantization_config: 'fp8'\)"
    for config in (LLAMA | quantised, {"model_type": "gemma3", "text_config": LLAMA} | quantised):
        with pytest.raises(PlanError, match=expected):
            shape_of_config(config, "mine")
    assert shape_of_config({**LLAMA, "quantization_config": None}, "mine") == shape_of_config(LLAMA, "mine")


def test_an_unknown_model_type_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"model_type: 'qwen3_next'\); it knows cohere, .*qwen3_moe.*--model-config"):
        shape_of_config({**LLAMA, "model_type": "qwen3_next"}, "mine")
