"""What `Auto` in a job stands for: decided once, by what is there at the first start, written down, and kept by every
resumed run, whatever its machine would choose."""

from __future__ import annotations

from rljob_api.base import WireModel
from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.engines.rollout.select import select_engine


class AutoSettings(WireModel):
    """The two choices; where a job names one itself, what it names."""

    dtype: Dtype
    rollout_engine: RolloutEngine


def settle(spec: RLJobSpec, device_type: str, kept: AutoSettings | None) -> AutoSettings:
    """The choices of this start. `kept` are those of the checkpoint that it goes on from.

    Raises ConfigurationError for a rollout engine that is not installed."""
    dtype, engine = spec.training.model.dtype, spec.training.rollout.engine
    if dtype is Dtype.AUTO:
        chosen = Dtype.BFLOAT16 if device_type == "cuda" else Dtype.FLOAT32
        dtype = kept.dtype if kept else chosen
    if engine is RolloutEngine.AUTO and kept:
        engine = kept.rollout_engine
    return AutoSettings(dtype=dtype, rollout_engine=select_engine(engine))


def settled_spec(spec: RLJobSpec, choices: AutoSettings) -> RLJobSpec:
    """The spec that names them."""
    training = spec.training
    model = training.model.model_copy(update={"dtype": choices.dtype})
    rollout = training.rollout.model_copy(update={"engine": choices.rollout_engine})
    return spec.model_copy(update={"training": training.model_copy(update={"model": model, "rollout": rollout})})
