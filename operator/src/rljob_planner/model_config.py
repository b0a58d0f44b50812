"""A model's shape from its `config.json`, as transformers 5.19 builds the model from it.

What a configuration leaves out is what transformers' class for its `model_type` has. The sums of `model_shape` are
those of transformers' own models, to the last parameter: `tests/planner/test_model_config.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rljob_planner.errors import PlanError
from rljob_planner.model_shape import ModelShape

Config = Mapping[str, object]
_LARGEST = 10**9
_MOST_LAYERS = 10_000
_KNOWN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class _Family:
    """What models of a `model_type` have in common, unless a key of the configuration says it."""

    ties_head: bool = False
    num_norms: int = 2
    """Of a layer."""
    norms_have_bias: bool = False
    qk_norm: Literal["none", "heads", "whole"] = "none"
    """One scale for all heads, two times the head size; or one for every number of queries and keys."""
    qk_norm_key: str | None = None
    """The key by which it is turned on; None: it is always there."""
    attention_bias: Literal["none", "inputs", "all"] = "none"
    """Of queries, keys and values, or of the output, too."""
    attention_bias_key: str | None = "attention_bias"
    """The key that turns all biases of the attention on or off, or those of its inputs where those are the default."""
    has_mlp_gate: bool = True
    mlp_bias: bool = False
    mlp_bias_key: str | None = None
    has_head_bias: bool = False
    every_nth_layer_is_full: int | None = None
    """Of layers with a sliding window; None: no layer is full, unless `layer_types` says so."""
    window_key: str | None = None
    """The key without which a window is not used."""
    defaults: Config = field(default_factory=dict)
    """Of keys that configurations leave out."""


_PLAIN = _Family(attention_bias_key=None)
_LLAMA = _Family(mlp_bias_key="mlp_bias")
_QWEN2 = _Family(attention_bias="inputs", attention_bias_key=None, window_key="use_sliding_window")
_QWEN3 = _Family(qk_norm="heads", window_key="use_sliding_window")
_GEMMA = _Family(ties_head=True, defaults={"head_dim": 256})
_GEMMA2 = {"head_dim": 256, "sliding_window": 4096}
_GEMMA3 = _GEMMA2 | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
_OLMO2 = _Family(qk_norm="whole", every_nth_layer_is_full=4)
_COHERE = replace(_OLMO2, ties_head=True, num_norms=1, qk_norm_key="use_qk_norm")
_GPT_NEOX = _Family(norms_have_bias=True, attention_bias="all", has_mlp_gate=False, mlp_bias=True)

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
    "phi": replace(_GPT_NEOX, num_norms=1, attention_bias_key=None, has_head_bias=True),
    "phi3": _PLAIN,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "gpt_neox": _GPT_NEOX,
    "gpt2": replace(_GPT_NEOX, ties_head=True, attention_bias_key=None),
    "nemotron": _Family(norms_have_bias=True, has_mlp_gate=False, mlp_bias_key="mlp_bias"),
    "mixtral": _PLAIN,
    "qwen2_moe": replace(_QWEN2, attention_bias_key="qkv_bias"),
    "qwen3_moe": _QWEN3,
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(),
    "gpt_oss": _Family(attention_bias="all", every_nth_layer_is_full=2),
}


def shape_of_config(config: Config, name: str) -> ModelShape:
    """The shape that a `config.json` describes; that of its `text_config`, where it is one of more than text.

    Raises PlanError where the `model_type` or a type of layers is not known here, where the weights are quantised, and
    where a key is missing or no number.
    """
    _refuse_quantised(config, name)
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        return shape_of_config({**outer, **_text_config(config, nested)}, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise PlanError(
            f"{name}: the planner does not know models of this type (config.json, model_type: {model_type!r});"
            f" it knows {', '.join(sorted(_FAMILIES))}; --model-config FILE can name the config.json of a model of one"
            " of these types and of about the same sizes"
        )
    _refuse_unknown_layers(config, name)
    reader = _Reader(_with_gpt2_names(config) if model_type == "gpt2" else config, _FAMILIES[model_type], name)
    if model_type.startswith("deepseek"):
        return _latent_attention(reader)
    return _shape(reader)


def _text_config(config: Config, nested: Config) -> Config:
    """The part on text. Its type is that of the whole where it says none (`gemma3` -> `gemma3_text`)."""
    if "model_type" in nested:
        return nested
    return {"model_type": f"{config.get('model_type')}_text", **nested}


def _with_gpt2_names(config: Config) -> Config:
    names = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
    }
    renamed = {names.get(key, key): value for key, value in config.items()}
    width = renamed.get("hidden_size")
    if renamed.get("intermediate_size") is None and isinstance(width, int):
        renamed["intermediate_size"] = 4 * width
    return renamed


class _Reader:
    """Asks a configuration, and what its family has where it says nothing."""

    def __init__(self, config: Config, family: _Family, name: str) -> None:
        self.config = config
        self.family = family
        self.name = name

    def number(self, *keys: str) -> int:
        """The first of these keys that is there."""
        found = self.optional(*keys)
        if found is None:
            raise PlanError(
                f"{self.name}: the config.json has no {' or '.join(keys)};"
                " name the config.json of the model itself with --model-config FILE"
            )
        return found

    def optional(self, *keys: str) -> int | None:
        """None where none of these keys is there, or the first is null."""
        for key in keys:
            value = self.config.get(key, self.family.defaults.get(key))
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise PlanError(
                    f"{self.name}: {key} of the config.json must be a whole number, at most {_LARGEST:,} (seen"
                    f" {value!r}); correct it"
                )
            return value
        return None

    def flag(self, key: str | None, otherwise: bool) -> bool:
        """What a key says; `otherwise` where there is no such key."""
        value = self.config.get(key) if key is not None else None
        return value if isinstance(value, bool) else otherwise

    def list_of(self, key: str) -> tuple[object, ...]:
        """Empty where there is none."""
        value = self.config.get(key)
        return tuple(value) if isinstance(value, list | tuple) else ()


def _shape(reader: _Reader) -> ModelShape:
    family = reader.family
    hidden, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    layers, mlp = reader.number("num_hidden_layers"), reader.number("intermediate_size")
    vocabulary = reader.number("vocab_size")
    if min(heads, layers, hidden) == 0 or layers > _MOST_LAYERS:
        raise PlanError(
            f"{reader.name}: the config.json is of no model (seen {layers} layers, {heads} heads, size {hidden});"
            " correct it"
        )
    head_size = reader.optional("head_dim") or hidden // heads
    kv_heads = reader.optional("num_key_value_heads") or heads
    if head_size == 0:
        raise PlanError(
            f"{reader.name}: the config.json is of no model (seen {heads} heads for a size of {hidden}); correct it"
        )
    experts = _experts(reader, layers, mlp)
    has_qk_norm = family.qk_norm != "none" and (family.qk_norm_key is None or reader.flag(family.qk_norm_key, False))
    query, kv = heads * head_size, kv_heads * head_size
    window, num_full = _windows(reader, layers)
    positions = reader.optional("max_position_embeddings")
    is_gpt2 = reader.config.get("model_type") == "gpt2"
    return ModelShape(
        name=reader.name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=experts.width or mlp,
        vocabulary_size=vocabulary,
        ties_head=reader.flag("tie_word_embeddings", family.ties_head),
        has_mlp_gate=family.has_mlp_gate,
        has_qk_norm=has_qk_norm,
        attention_bias_size=_attention_bias(reader, query, kv, hidden),
        num_norms_per_layer=family.num_norms,
        num_experts=experts.count,
        experts_per_token=experts.per_token,
        shared_expert_size=experts.shared_width,
        num_dense_layers=experts.num_dense_layers,
        dense_mlp_size=mlp if experts.count else 0,
        sliding_window=window,
        num_full_attention_layers=num_full,
        max_positions=positions,
        other_layer_parameters=_other_of_layer(reader, has_qk_norm=has_qk_norm, query=query, kv=kv, mlp=mlp),
        other_expert_layer_parameters=experts.other,
        other_root_parameters=(hidden if family.norms_have_bias else 0)
        + (vocabulary if family.has_head_bias else 0)
        + ((positions or 0) * hidden if is_gpt2 else 0),
    )


def _attention_bias(reader: _Reader, query: int, kv: int, hidden: int) -> int:
    family = reader.family
    inputs = query + 2 * kv
    if family.attention_bias == "inputs":
        return inputs if reader.flag(family.attention_bias_key, True) else 0
    is_there = reader.flag(family.attention_bias_key, family.attention_bias == "all")
    return inputs + hidden if is_there else 0


def _other_of_layer(reader: _Reader, *, has_qk_norm: bool, query: int, kv: int, mlp: int) -> int:
    """Biases of norms and of the MLP; norms of queries and keys beyond those of one head."""
    family, hidden = reader.family, reader.number("hidden_size")
    num = family.num_norms * hidden if family.norms_have_bias else 0
    if reader.flag(family.mlp_bias_key, family.mlp_bias):
        num += (2 if family.has_mlp_gate else 1) * mlp + hidden
    head_size = reader.optional("head_dim") or hidden // reader.number("num_attention_heads")
    if has_qk_norm and family.qk_norm == "whole":
        num += query + kv - 2 * head_size
    if reader.flag("qk_layernorm", False):
        num += 4 * head_size
    if reader.config.get("model_type") == "gpt_oss":
        num += reader.number("num_attention_heads")
    return num


@dataclass(frozen=True)
class _Experts:
    count: int = 0
    per_token: int = 0
    width: int = 0
    shared_width: int = 0
    num_dense_layers: int = 0
    other: int = 0


def _experts(reader: _Reader, layers: int, mlp: int) -> _Experts:
    count = reader.optional("num_local_experts", "num_experts", "n_routed_experts") or 0
    if not count:
        return _Experts()
    hidden = reader.number("hidden_size")
    width = reader.optional("moe_intermediate_size") or mlp
    shared = reader.optional("shared_expert_intermediate_size") or 0
    other = hidden if shared else 0
    if (num_shared := reader.optional("n_shared_experts") or 0) and not shared:
        shared = num_shared * width
    if reader.config.get("model_type") == "gpt_oss":
        other += count * (1 + 2 * width + hidden)
    return _Experts(
        count=count,
        per_token=reader.number("num_experts_per_tok"),
        width=width,
        shared_width=shared,
        num_dense_layers=_num_dense_layers(reader, layers),
        other=other,
    )


def _num_dense_layers(reader: _Reader, layers: int) -> int:
    if (first := reader.optional("first_k_dense_replace")) is not None:
        return min(first, layers)
    every = reader.optional("decoder_sparse_step") or 1
    without = reader.list_of("mlp_only_layers")
    return sum(1 for layer in range(layers) if layer in without or (layer + 1) % every != 0)


def _windows(reader: _Reader, layers: int) -> tuple[int | None, int | None]:
    """The window, and how many layers have none; None and None where all layers see everything."""
    family = reader.family
    window = reader.optional("sliding_window")
    if window is None or (family.window_key is not None and not reader.flag(family.window_key, False)):
        return None, None
    if types := reader.list_of("layer_types"):
        num_full = sum(1 for each in types if each == "full_attention")
    elif family.window_key is not None:
        num_full = min(reader.optional("max_window_layers") or 0, layers)
    else:
        every = reader.optional("sliding_window_pattern", "_sliding_window_pattern") or family.every_nth_layer_is_full
        num_full = layers // every if every else 0
    return (window, num_full) if num_full < layers else (None, None)


def _latent_attention(reader: _Reader) -> ModelShape:
    """DeepSeek-V2 and V3: queries, keys and values through narrow matrices, of which the cache holds the narrow side
    (arXiv 2405.04434, section 2.1)."""
    plain = _shape(reader)
    hidden, heads = plain.hidden_size, plain.num_heads
    rotary, value = reader.number("qk_rope_head_dim"), reader.number("v_head_dim")
    head_size = reader.number("qk_nope_head_dim") + rotary
    latent = reader.number("kv_lora_rank")
    query_rank = reader.optional("q_lora_rank")
    if min(head_size, value, latent) == 0:
        raise PlanError(
            f"{reader.name}: the config.json is of no model (seen heads of {head_size} and {value}, a rank of"
            f" {latent}); correct it"
        )
    query = heads * head_size
    matrices = query_rank * (hidden + query) if query_rank else hidden * query
    matrices += hidden * (latent + rotary) + latent * heads * (head_size - rotary + value) + heads * value * hidden
    has_bias = reader.flag("attention_bias", False)
    return replace(
        plain,
        num_kv_heads=heads,
        head_size=head_size,
        attention_bias_size=((query_rank or 0) + latent + rotary + hidden) if has_bias else 0,
        other_layer_parameters=(query_rank or 0) + latent,
        attention_matrix_parameters=matrices,
        kv_cache_size=latent + rotary,
    )


def _refuse_quantised(config: Config, name: str) -> None:
    """As the trainer does (`read_config` of engines/train/model.py)."""
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise PlanError(
            f"{name}: its weights are quantised, and codes cannot be trained (config.json, quantization_config:"
            f" {str(method)[:60]!r}); choose the model in 16 or 32 bits"
        )


def _refuse_unknown_layers(config: Config, name: str) -> None:
    """Their parameters, their cache and their seconds would be those of attention."""
    types = config.get("layer_types")
    listed = types if isinstance(types, list | tuple) else ()
    unknown = [str(each)[:60] for each in listed if each not in _KNOWN_LAYERS]
    if unknown:
        raise PlanError(
            f"{name}: the planner does not know layers of this type (config.json, layer_types: {unknown[0]!r});"
            f" it knows {' and '.join(_KNOWN_LAYERS)}; --model-config FILE can name the config.json of a model with"
            " these and of about the same sizes"
        )
