"""Models that a `config.json` describes and that are not planned, though their `model_type` is known."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_planner.errors import PlanError

_KNOWN_LAYERS = ("full_attention", "sliding_attention")


def refuse_quantised(config: Mapping[str, object], name: str) -> None:
    """As the trainer does (`read_config` of engines/train/model.py)."""
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise PlanError(
            f"{name}: its weights are quantised, and codes cannot be trained (config.json, quantization_config:"
            f" {str(method)[:60]!r}); choose the model in 16 or 32 bits"
        )


def refuse_unknown_layers(config: Mapping[str, object], name: str) -> None:
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
