"""What `Auto` in a job stands for: decided once, by what is there at the first start, written down, and kept by every
resumed run, whatever its machine would choose."""

from __future__ import annotations

import logging

from rljob_api.base import WireModel
from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.engines.rollout.select import select_engine

log = logging.getLogger(__name__)


class AutoSettings(WireModel):
    """The two choices; where a job names one itself, what it names."""

    dtype: Dtype
    rollout_engine: RolloutEngine


def settle(spec: RLJobSpec, device_type: str, kept: AutoSettings | None) -> AutoSettings:
    """The choices of this start. `kept` are those of the checkpoint that it goes on from.

    Raises ConfigurationError for a rollout engine that is not installed."""
    dtype = spec.training.model.dtype
    if dtype is Dtype.AUTO:
        chosen = Dtype.BFLOAT16 if device_type == "cuda" else Dtype.FLOAT32
        dtype = kept.dtype if kept else chosen
    elif kept and dtype is not kept.dtype:
        log.warning("spec.training.model.dtype is %s, and the checkpoint was trained in %s", dtype, kept.dtype)
    return AutoSettings(dtype=dtype, rollout_engine=select_engine(chosen_engine(spec, kept)))


def chosen_engine(spec: RLJobSpec, kept: AutoSettings | None) -> RolloutEngine:
    """What the job names or the checkpoint has kept; `Auto` where neither does."""
    engine = spec.training.rollout.engine
    return kept.rollout_engine if kept and engine is RolloutEngine.AUTO else engine


def settled_spec(spec: RLJobSpec, choices: AutoSettings) -> RLJobSpec:
    """The spec that names them."""
    training = spec.training
    model = training.model.model_copy(update={"dtype": choices.dtype})
    rollout = training.rollout.model_copy(update={"engine": choices.rollout_engine})
    return spec.model_copy(update={"training": training.model_copy(update={"model": model, "rollout": rollout})})
