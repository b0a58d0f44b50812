"""How responses are generated."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import cel_text, rule
from rljob_api.scalars import Count, Flag, LongText, OpenFraction, PositiveCount, Quantity, Temperature

# A whole number of bytes that is not 0; with a unit no digit is too small.
_SOME_MEMORY = r"^\+?[0-9.]*[1-9]"


class RolloutEngine(StrEnum):
    """The program that generates."""

    AUTO = "Auto"
    """VLLM where it is installed, else HuggingFace."""
    VLLM = "VLLM"
    HUGGING_FACE = "HuggingFace"
    """Generation with transformers, on a copy of the weights of its own: slow, and without tensor parallelism."""


class Compile(StrEnum):
    """Whether vLLM compiles the model before it generates: shorter steps after a longer start."""

    AUTO = "Auto"
    """On GPUs; on CPUs where there is a C++ compiler (the CPU image has none) and the job has at least 300 steps."""
    ALWAYS = "Always"
    NEVER = "Never"


class Rollout(WireModel):
    """Sampling for training. Evaluation has a temperature of its own and never uses topP and topK."""

    engine: RolloutEngine = RolloutEngine.AUTO
    compile: Compile = Compile.AUTO
    group_size: PositiveCount = 8
    """Responses per prompt; advantages that compare responses to the same prompt need at least 2."""
    max_new_tokens: PositiveCount = 512
    temperature: Temperature = 1.0
    """From 0.01 on: vLLM takes a lower one for 0.01, and the trainer's log-probabilities would be of another
    distribution."""
    top_p: OpenFraction = 1.0
    top_k: Count = 0
    """Sample among the k most likely tokens; 0 for all."""
    stop: Annotated[tuple[LongText, ...], Field(max_length=16)] = ()
    """Texts that end a response, looked for with its special tokens; the text itself is left out of what the reward
    sees."""
    sync_every_steps: PositiveCount = 1
    """Steps that one hand-over of the weights is used for: with n, responses are by weights up to n - 1 steps old
    (metrics rollout/staleness_*), for which algorithm.rolloutCorrection can correct. Must divide evaluation.everySteps
    and checkpoint.everySteps: an evaluation takes the newest weights, and so does a run that goes on from a checkpoint.
    """
    per_request_seeds: Flag = True
    """Every response is drawn with a seed of its own, so that it does not depend on what is generated beside it, nor on
    the number of GPUs. Without them each engine has one seed per step: a resumed run on as many GPUs draws the same
    responses still, and vLLM need not keep a generator for each response."""
    max_num_sequences: PositiveCount = 256
    """Sequences that one engine decodes at the same time."""
    gpu_memory_utilization: OpenFraction = 0.5
    """Share of a GPU's memory for the engine while it generates."""
    cpu_kv_cache: Quantity = "1Gi"
    """Memory of one engine's KV cache on CPUs."""


ROLLOUT_RULES = (
    rule(
        Rollout,
        "Rollout.cpuKvCache",
        field=".cpuKvCache",
        cel=f"!has(self.cpuKvCache) || string(self.cpuKvCache).matches({cel_text(_SOME_MEMORY)})",
        wrong="must be above 0: an engine without a KV cache generates nothing",
        advice="write some memory, such as 1Gi (the default), or leave it out",
        holds=lambda rollout: re.search(_SOME_MEMORY, rollout.cpu_kv_cache) is not None,
    ),
)
