"""Random models of two layers that are small enough for tests: a causal language model of each architecture, and the
quickstart's model as a sequence classifier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from rljob_trainer.engines.train.output_head import VALUE_WEIGHT

VOCABULARY = 120
WINDOW = 8
WEIGHT_SCALE = 0.15
"""Standard deviation of weight matrices; vectors vary by a third of it."""

COMMON: dict[str, int | None] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_SIZE = 32
BOTH_LAYER_TYPES = ["sliding_attention", "full_attention"]

FLAT: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**COMMON, tie_word_embeddings=False),
    "qwen2 tied": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2 window": lambda: Qwen2Config(
        **COMMON, tie_word_embeddings=False, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=HEAD_SIZE, tie_word_embeddings=False),
    "qwen3 tied": lambda: Qwen3Config(**COMMON, head_dim=HEAD_SIZE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False),
    "smollm2": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True, rope_theta=100_000.0),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON, head_dim=HEAD_SIZE, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=BOTH_LAYER_TYPES
    ),
    "granite": lambda: GraniteConfig(
        **COMMON, embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.3, logits_scaling=0.5
    ),
    "cohere": lambda: CohereConfig(**COMMON, logit_scale=0.25),
    "cohere2": lambda: Cohere2Config(
        **COMMON, logit_scale=0.25, sliding_window=WINDOW, layer_types=BOTH_LAYER_TYPES, tie_word_embeddings=True
    ),
    "phi": lambda: PhiConfig(**{**COMMON, "num_key_value_heads": 2}, partial_rotary_factor=0.5),
    "phi3": lambda: Phi3Config(**COMMON, sliding_window=WINDOW),
    "olmo2": lambda: Olmo2Config(**COMMON),
    "gpt_neox": lambda: GPTNeoXConfig(**{**COMMON, "num_key_value_heads": 2}),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON,
        head_dim=HEAD_SIZE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 2},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
}
"""Architectures that support rows without padding (flat rows)."""

PADDED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=HEAD_SIZE,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
        sliding_window=WINDOW,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON, head_dim=HEAD_SIZE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "nemotron": lambda: NemotronConfig(**COMMON, head_dim=HEAD_SIZE),
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON,
        head_dim=HEAD_SIZE,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}
"""Architectures that need padded rows."""

ARCHITECTURES = FLAT | PADDED


CLASSIFIER_SIZES: dict[str, int | None] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
"""Configuration of sequence classifiers with one output."""


def make(name: str) -> PreTrainedModel:
    """A model of one of ARCHITECTURES; see `make_from`."""
    return make_from(ARCHITECTURES[name]())


@torch.no_grad()
def make_from(config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 model with eager attention. The same configuration always gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * WEIGHT_SCALE
        if parameter.dim() > 1:
            parameter.copy_(noise)
        else:
            parameter.add_(noise / 3)
    return model.eval()


def save(name: str, folder: Path) -> Path:
    """Writes the model's configuration and weights into `folder` and returns it."""
    make(name).save_pretrained(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Gives the model in `folder` the tokenizer of the quickstart. The decoded texts have no meaning."""
    for file in QUICKSTART_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)


def save_deep(folder: Path, num_layers: int) -> Path:
    """Writes a Qwen3 with `num_layers` layers into `folder` and returns it."""
    config = Qwen3Config(**{**COMMON, "num_hidden_layers": num_layers}, head_dim=HEAD_SIZE, tie_word_embeddings=True)
    make_from(config).save_pretrained(folder)
    return folder


QUICKSTART_MODEL = Path(str(files("rljob_trainer"))) / "assets" / "sort_digits" / "model"
WEIGHTS = "model.safetensors"


def save_scoring(folder: Path, *, num_labels: int | None = 1, **config: object) -> Path:
    """Writes the quickstart's model as a sequence classifier with random output weights. `num_labels` and `config`
    change its config.json; None leaves the number of labels out."""
    shutil.copytree(QUICKSTART_MODEL, folder)
    weights = load_file(QUICKSTART_MODEL / WEIGHTS)
    if num_labels is not None:
        weights[VALUE_WEIGHT] = torch.randn(num_labels, 64, generator=torch.Generator().manual_seed(0)) / 8
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS)
    change_json(folder / "config.json", **config)
    return folder


def change_json(file: Path, **changes: object) -> None:
    """Changes these fields of the JSON object in `file`."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
