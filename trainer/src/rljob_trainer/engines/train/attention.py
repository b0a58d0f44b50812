"""Attention of a Hugging Face model over flat (packed) rows, through transformers' attention interface.

If a model's layers mix tokens only by plain attention (full, or with a sliding window), its decoder is called with all
rows as one: `decoder(input_ids=[1, M], position_ids=rows.position_ids_1M, use_cache=False, flat_rows=rows)`.
transformers passes `flat_rows` to every layer, also when activations are recomputed. transformers builds no mask,
because this attention implementation has no mask function. Every other model gets a batch that is padded on the right.
The batch needs no padding mask, because with causal attention no token sees the padding after it.

Legend: M tokens of all rows, H query heads, K key and value heads, D head size, E head size of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rljob_trainer.engines.train.attention_kernels import FlatRows, attend, choose_kernel
from rljob_trainer.errors import ConfigurationError

FLAT_IMPLEMENTATION = "rljob_flat_rows"
"""The name of the attention for flat rows in transformers' attention interface."""
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
PADDED_TYPES = {
    "camembert": "its positions do not begin at 0",
    "data2vec-text": "its positions do not begin at 0",
    "doge": "its masks depend on the tokens",
    "moshi": "its layers do not know where rows begin",
    "nemotron": "its layers do not know where rows begin",
    "phimoe": "its attention does not get the sliding window",
    "recurrent_gemma": "it has recurrent layers",
    "roberta": "its positions do not begin at 0",
    "roberta-prelayernorm": "its positions do not begin at 0",
    "xlm-roberta": "its positions do not begin at 0",
    "xlm-roberta-xl": "its positions do not begin at 0",
}
"""Model types that do not support flat rows, and why. Neither their configuration nor their class shows it
(transformers 5.19)."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "cache", "indices", "block_indices")
"""Arguments that change what attention computes and that are not supported here."""


@dataclass(frozen=True)
class AttentionPlan:
    """How a model's forward is called."""

    is_flat: bool
    """True: flat rows; False: a batch padded on the right, without a padding mask."""
    implementation: str
    """The `attn_implementation` that the model is built with."""
    reason: str
    """Why the batch must be padded; empty for flat rows."""
    max_row_tokens: int | None
    """The largest accepted number of tokens of a row; longer rows would change the rotary frequencies of all rows in
    the same pass. None: no limit."""


def choose_attention(config: PreTrainedConfig) -> AttentionPlan:
    """The plan for a causal language model, from its configuration and class.

    Some incompatibilities show in neither; `check_logprob_parity` finds them later."""
    text = config.get_text_config()
    limit = _rope_limit(text)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    fields = text.to_dict()
    if fields.get("attn_logit_softcapping") is not None:
        return AttentionPlan(False, "eager", "its attention is soft-capped", limit)
    if not model_class._supports_sdpa:
        return AttentionPlan(False, "eager", "its attention is not torch's scaled dot product", limit)
    if text.model_type in PADDED_TYPES:
        return AttentionPlan(False, "sdpa", PADDED_TYPES[text.model_type], limit)
    others = sorted(set(fields.get("layer_types") or ()) - SUPPORTED_LAYER_TYPES)
    if others:
        return AttentionPlan(False, "sdpa", f"it has layers of type {', '.join(others)}", limit)
    if not model_class._supports_attention_backend:
        return AttentionPlan(False, "sdpa", "its layers do not use transformers' attention interface", limit)
    return AttentionPlan(True, FLAT_IMPLEMENTATION, "", limit)


def register_flat_attention() -> None:
    """Registers FLAT_IMPLEMENTATION in transformers. May be called repeatedly."""
    AttentionInterface.register(FLAT_IMPLEMENTATION, _flat_attention)


def use_attention(language_model: nn.Module, implementation: str) -> str:
    """Switches the model to an attention implementation; returns the previous one."""
    before: str = language_model.config._attn_implementation  # type: ignore[union-attr,assignment]
    language_model.set_attn_implementation(implementation)  # type: ignore[operator]
    return before


def _rope_limit(text: PreTrainedConfig) -> int | None:
    """The number of tokens beyond which the rotary frequencies depend on the longest row of a pass (types `dynamic` and
    `longrope`); None for other types."""
    fields = text.to_dict()
    parameters = fields.get("rope_parameters") or {}
    limits: list[int] = []
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif "dynamic" in str(rope.get("rope_type")):
            limits.append(fields["max_position_embeddings"])
    return min(limits, default=None)


def _window_of(module: nn.Module) -> int | None:
    """The sliding window of a layer in tokens, from its configuration; None if it has none. Needed for models that use
    the window only in masks and do not pass it to attention."""
    fields = vars(module)
    config, layer = fields.get("config"), fields.get("layer_idx")
    if not isinstance(config, PreTrainedConfig) or not isinstance(layer, int):
        return None
    layer_types: list[str] | None = vars(config).get("layer_types")
    is_sliding = layer_types is not None and layer_types[layer] == "sliding_attention"
    return vars(config).get("sliding_window") if is_sliding else None


def _flat_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KNE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    flat_rows: FlatRows | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer. Returns [1, M, H, E] and no attention weights. With
    sequence parallelism, inputs and output have only the tokens of this rank's piece."""
    layer = type(module).__name__
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if others.get(name) is not None]
    if (
        unsupported
        or dropout
        or attention_mask is not None
        or is_causal is False
        or vars(module).get("is_causal") is False
    ):
        raise ConfigurationError(
            f"spec.training.model.source: {layer} needs attention that is not supported for flat rows "
            f"({', '.join(unsupported) or 'dropout, a mask, or non-causal attention'}); choose another model"
        )
    if flat_rows is None:
        raise ConfigurationError(
            f"spec.training.model.source: {layer} does not know where rows begin (its model drops `flat_rows`); "
            f"choose another model"
        )
    window = _window_of(module) if sliding_window is None else sliding_window
    device = query_1HND.device
    ranks = flat_rows.sequence_ranks
    if ranks is not None:
        query_1HND, key_1KND, value_1KNE = ranks.to_heads(query_1HND, key_1KND, value_1KNE)
    kernel = choose_kernel(
        flat_rows.lengths,
        query_1HND.shape[1],
        (key_1KND.shape[-1], value_1KNE.shape[-1]),
        query_1HND.dtype,
        device.type,
        torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
    )
    output_1MHE = attend(kernel, query_1HND, key_1KND, value_1KNE, flat_rows, scaling, window)
    return output_1MHE if ranks is None else ranks.to_tokens(output_1MHE), None
