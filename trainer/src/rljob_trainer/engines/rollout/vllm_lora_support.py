"""Answers whether vLLM's class of a model supports LoRA adapters: `python -m <this module> ARCHITECTURE...`, with the
architectures of the model's config.json. The answer is the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vllm.model_executor.models.interfaces import supports_lora
from vllm.model_executor.models.registry import ModelRegistry

from rljob_trainer.engines.rollout.select import LACKS_LORA, SUPPORTS_LORA


def main(architectures: Sequence[str]) -> int:
    """Returns the exit code. An architecture that vLLM has no class for runs with transformers' code, in a class that
    supports LoRA."""
    known = [ModelRegistry.models[each] for each in architectures if each in ModelRegistry.models]
    return SUPPORTS_LORA if not known or supports_lora(known[0].load_model_cls()) else LACKS_LORA


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
