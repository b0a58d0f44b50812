"""Reads a model's shape from its `config.json`, with the same rules by which transformers 5.19 builds the model.

A key that such files often leave out has the default of transformers' configuration class for the `model_type`. If
another key is missing, the file is rejected. The numbers of parameters are exactly those of transformers' models;
`tests/planner/test_model_config.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rljob_planner.errors import PlanError
from rljob_planner.model_shape import ModelShape

Config = Mapping[str, object]
_LARGEST_NUMBER = 10**9
_MOST_LAYERS = 10_000
_KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class _Family:
    """Properties that all models of one `model_type` share. Some can be overridden by a key of the configuration."""

    ties_head: bool = False
    num_norms: int = 2
    """Norms per layer."""
    qk_norm: Literal["none", "heads", "whole"] = "none"
    """Norms of queries and keys. `heads`: one scale per element of a head, shared by all heads; `whole`: one scale per
    element of all heads."""
    qk_norm_key: str | None = None
    """The key that turns these norms on; None: they are always used."""
    attention_bias: Literal["none", "inputs", "all"] = "none"
    """Which projections have a bias. `inputs`: those of queries, keys and values; `all`: also the output projection."""
    attention_bias_key: str | None = "attention_bias"
    """The key that turns these biases on or off. If the field `attention_bias` is none, the value true means `all`."""
    mlp_bias_key: str | None = None
    """The key that turns biases of the MLP on."""
    every_nth_layer_is_full: int | None = None
    """In models with sliding windows: every nth layer has full attention, if the configuration has no key that says
    which layers have it. None: without such a key, no layer has full attention."""
    window_key: str | None = None
    """The key that turns sliding windows on; None: a window that the configuration has is always used."""
    has_whole_experts: bool = False
    """See ModelShape.has_whole_experts."""
    defaults: Config = field(default_factory=dict)
    """Values of keys that the configuration may leave out."""


_PLAIN = _Family(attention_bias_key=None)
_LLAMA = _Family(mlp_bias_key="mlp_bias")
_QWEN2 = _Family(attention_bias="inputs", attention_bias_key=None, window_key="use_sliding_window")
_QWEN3 = _Family(qk_norm="heads", window_key="use_sliding_window")
_GEMMA = _Family(ties_head=True, defaults={"head_dim": 256})
_GEMMA2 = {"head_dim": 256, "sliding_window": 4096}
_GEMMA3 = _GEMMA2 | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
_OLMO2 = _Family(qk_norm="whole", every_nth_layer_is_full=4)
_COHERE = replace(_OLMO2, ties_head=True, num_norms=1, qk_norm_key="use_qk_norm")

_FAMILIES: Mapping[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _PLAIN,
    "ministral3": _PLAIN,
    "smollm3": replace(_LLAMA, ties_head=True),
    "granite": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, num_norms=4, every_nth_layer_is_full=2, defaults=_GEMMA2),
    "gemma3_text": replace(_GEMMA, num_norms=4, qk_norm="heads", every_nth_layer_is_full=6, defaults=_GEMMA3),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "phi3": _PLAIN,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "mixtral": replace(_PLAIN, has_whole_experts=True),
    "qwen2_moe": replace(_QWEN2, attention_bias_key="qkv_bias", has_whole_experts=True),
    "qwen3_moe": replace(_QWEN3, has_whole_experts=True),
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(),
    "gpt_oss": _Family(attention_bias="all", every_nth_layer_is_full=2),
}


def shape_of_config(config: Config, name: str) -> ModelShape:
    """The shape that a `config.json` describes; for a multimodal model, that of its `text_config`.

    Raises:
        PlanError: unknown `model_type` or layer type, quantised weights, or a required key that is missing or has an
            impossible value.
    """
    _reject_quantised(config, name)
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        # A `text_config` without a type gets its type from that of the whole model (`gemma3` -> `gemma3_text`).
        return shape_of_config({**outer, "model_type": f"{config.get('model_type')}_text", **nested}, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise PlanError(
            f"{name}: the planner does not know this model type (config.json, model_type: {model_type!r}); it knows"
            f" {', '.join(sorted(_FAMILIES))}; for an estimate of the policy, use --model-config FILE with the"
            " config.json of a model that has one of these types and a similar size"
        )
    _reject_unknown_layers(config, name)
    reader = _Reader(config, _FAMILIES[model_type], name)
    shape = replace(_with_experts(reader, _dense(reader)), model_type=model_type)
    return _with_latent_attention(reader, shape) if model_type.startswith("deepseek") else shape


class _Reader:
    """Reads keys of a configuration. A missing key has the default of the model's family, if there is one."""

    def __init__(self, config: Config, family: _Family, name: str) -> None:
        self.family, self.name, self.is_gpt_oss = family, name, config.get("model_type") == "gpt_oss"
        self.config: Config = {**family.defaults, **config}

    def number(self, key: str) -> int:
        """The whole number under a required key. Raises PlanError if the key is missing, or if
        its value is not a whole number or is out of range."""
        found = self.optional(key)
        if found is None:
            raise PlanError(
                f"{self.name}: {key} is missing in config.json; use the model's complete config.json (for the policy:"
                " --model-config FILE)"
            )
        return found

    def optional(self, *keys: str) -> int | None:
        """The whole number under the first of these keys that exists and is not null; None if there is none. Raises
        PlanError if it is not a whole number or out of range."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_NUMBER:
                raise PlanError(
                    f"{self.name}: {key} in config.json must be a whole number from 0 to {_LARGEST_NUMBER:,} (seen"
                    f" {value!r}); correct it"
                )
            return value
        return None

    def flag(self, key: str | None, otherwise: bool) -> bool:
        """The boolean under this key; `otherwise` if there is no key, or no boolean under it."""
        value = self.config.get(key) if key is not None else None
        return value if isinstance(value, bool) else otherwise

    def list_of(self, key: str) -> tuple[object, ...]:
        """The entries of the list under this key; empty if there is no list."""
        value = self.config.get(key)
        return tuple(value) if isinstance(value, list | tuple) else ()

    def no_model(self, seen: str) -> PlanError:
        return PlanError(f"{self.name}: config.json does not describe a model (seen {seen}); correct it")


def _dense(reader: _Reader) -> ModelShape:
    """The shape without the keys of experts and of latent attention."""
    family = reader.family
    hidden, heads, layers = (reader.number(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if min(heads, layers, hidden) == 0 or layers > _MOST_LAYERS:
        raise reader.no_model(f"{layers} layers, {heads} heads, hidden size {hidden}")
    mlp, vocabulary = reader.number("intermediate_size"), reader.number("vocab_size")
    head_size = reader.optional("head_dim") or hidden // heads
    kv_heads = reader.optional("num_key_value_heads") or heads
    if head_size == 0:
        raise reader.no_model(f"{heads} heads for a hidden size of {hidden}")
    query, kv = heads * head_size, kv_heads * head_size
    has_qk_norm = family.qk_norm != "none" and (family.qk_norm_key is None or reader.flag(family.qk_norm_key, False))
    has_bias = reader.flag(family.attention_bias_key, family.attention_bias != "none")
    # The output projection has a bias, too, unless the family has biases at the inputs only.
    bias = query + 2 * kv + (0 if family.attention_bias == "inputs" else hidden)
    # Biases of the MLP; scales of whole-width norms of queries and keys, beyond those that ModelShape counts;
    # attention sinks.
    others = 2 * mlp + hidden if reader.flag(family.mlp_bias_key, False) else 0
    others += query + kv - 2 * head_size if has_qk_norm and family.qk_norm == "whole" else 0
    others += heads if reader.is_gpt_oss else 0
    window, num_full = _windows(reader, layers)
    return ModelShape(
        name=reader.name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=mlp,
        vocabulary_size=vocabulary,
        ties_head=reader.flag("tie_word_embeddings", family.ties_head),
        has_qk_norm=has_qk_norm,
        attention_bias_size=bias if has_bias else 0,
        num_norms_per_layer=family.num_norms,
        sliding_window=window,
        num_full_attention_layers=num_full,
        max_positions=reader.optional("max_position_embeddings"),
        other_layer_parameters=others,
    )


def _with_experts(reader: _Reader, dense: ModelShape) -> ModelShape:
    """The shape with its experts; unchanged if the model has none."""
    count = reader.optional("num_local_experts", "num_experts", "n_routed_experts") or 0
    if not count:
        return dense
    width = reader.optional("moe_intermediate_size") or dense.mlp_size
    shared = reader.optional("shared_expert_intermediate_size") or 0
    biases = count * (1 + 2 * width + dense.hidden_size) if reader.is_gpt_oss else 0
    num_dense = reader.optional("first_k_dense_replace")
    if num_dense is None:
        every, without = reader.optional("decoder_sparse_step") or 1, reader.list_of("mlp_only_layers")
        num_dense = sum(layer in without or (layer + 1) % every != 0 for layer in range(dense.num_layers))
    return replace(
        dense,
        mlp_size=width,
        num_experts=count,
        experts_per_token=reader.number("num_experts_per_tok"),
        has_whole_experts=reader.family.has_whole_experts,
        shared_expert_size=shared or (reader.optional("n_shared_experts") or 0) * width,
        num_dense_layers=min(num_dense, dense.num_layers),
        dense_mlp_size=dense.mlp_size,
        # A shared expert whose width is set separately also has a gate.
        other_expert_layer_parameters=biases + (dense.hidden_size if shared else 0),
    )


def _windows(reader: _Reader, layers: int) -> tuple[int | None, int | None]:
    """The window in tokens, and the number of layers with full attention. None and None if all layers have full
    attention."""
    family = reader.family
    window = reader.optional("sliding_window")
    if window is None or (family.window_key is not None and not reader.flag(family.window_key, False)):
        return None, None
    if types := reader.list_of("layer_types"):
        num_full = types.count("full_attention")
    elif family.window_key is not None:
        num_full = min(reader.optional("max_window_layers") or 0, layers)
    else:
        every = reader.optional("sliding_window_pattern", "_sliding_window_pattern") or family.every_nth_layer_is_full
        num_full = layers // every if every else 0
    return (window, num_full) if num_full < layers else (None, None)


def _with_latent_attention(reader: _Reader, plain: ModelShape) -> ModelShape:
    """The shape of DeepSeek-V2 and V3. Queries, keys and values are computed through low-rank matrices, and the KV
    cache holds the low-rank vectors (arXiv 2405.04434, section 2.1)."""
    hidden, heads, query_rank = plain.hidden_size, plain.num_heads, reader.optional("q_lora_rank") or 0
    rotary, value, latent = (reader.number(key) for key in ("qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    head_size = reader.number("qk_nope_head_dim") + rotary
    if min(head_size, value, latent) == 0:
        raise reader.no_model(f"heads of size {head_size} and {value}, kv_lora_rank {latent}")
    query = heads * head_size
    matrices = query_rank * (hidden + query) if query_rank else hidden * query
    matrices += hidden * (latent + rotary) + latent * heads * (head_size - rotary + value) + heads * value * hidden
    has_bias = reader.flag("attention_bias", False)
    return replace(
        plain,
        num_kv_heads=heads,
        head_size=head_size,
        attention_bias_size=query_rank + latent + rotary + hidden if has_bias else 0,
        other_layer_parameters=query_rank + latent,
        attention_matrix_parameters=matrices,
        kv_cache_size=latent + rotary,
    )


def _reject_quantised(config: Config, name: str) -> None:
    """Raises PlanError for quantised weights. They cannot be trained, and the trainer also rejects them (`read_config`
    in engines/train/model.py)."""
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise PlanError(
            f"{name}: the weights are quantised, so they cannot be trained (config.json, quantization_config:"
            f" {str(method)[:60]!r}); choose a version of the model in 16 or 32 bits"
        )


def _reject_unknown_layers(config: Config, name: str) -> None:
    """Raises PlanError for layers other than attention, because they have other parameters, caches and speeds than the
    planner's formulas assume."""
    types = config.get("layer_types")
    unknown = (
        [str(each)[:60] for each in types if each not in _KNOWN_LAYER_TYPES] if isinstance(types, list | tuple) else []
    )
    if unknown:
        raise PlanError(
            f"{name}: the planner does not know this layer type (config.json, layer_types: {unknown[0]!r}); it knows"
            f" {' and '.join(_KNOWN_LAYER_TYPES)}; for an estimate of the policy, use --model-config FILE"
            " with the config.json of a model of similar size that has only these layer types"
        )
