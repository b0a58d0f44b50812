"""Generation of responses: engine, sampling settings, and weight synchronization."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import cel_text, rule
from rljob_api.scalars import Count, LongText, OpenFraction, PositiveCount, Quantity, Seconds, Temperature

# A quantity above 0: a digit of its number is not 0.
_ABOVE_ZERO = r"^\+?[0-9.]*[1-9]"


class RolloutEngine(StrEnum):
    """The program that generates responses."""

    AUTO = "Auto"
    """VLLM if it is installed, else HuggingFace."""
    VLLM = "VLLM"
    """vLLM."""
    HUGGING_FACE = "HuggingFace"
    """Generation with transformers, on a separate copy of the weights: slow, and without tensor parallelism."""


class Compile(StrEnum):
    """Whether vLLM compiles the model before generation. Compilation makes steps shorter and the start longer."""

    AUTO = "Auto"
    """Always on GPUs. On CPUs if the job has at least 300 steps and there is a C++ compiler (the CPU image has none).
    """
    ALWAYS = "Always"
    NEVER = "Never"


class LoadBalancing(StrEnum):
    """How responses are distributed over several rollout engines."""

    STATIC = "Static"
    """Each engine gets an equal number of consecutive responses. On CPUs a repeated step has the same bits."""
    DYNAMIC = "Dynamic"
    """An engine gets further responses when it has finished some. A repeated step has the same first batch of prompts
    and the same seeds, but not the same bits. So with dynamic sampling the replacement prompts may differ."""


class Rollout(WireModel):
    """Generation of responses for training. Evaluations have their own temperature and topP, and do not use topK."""

    engine: RolloutEngine = RolloutEngine.AUTO
    compile: Compile = Compile.AUTO
    group_size: PositiveCount = 8
    """Number of responses per prompt. Advantages that compare responses to the same prompt, such as GRPO's, need at
    least 2."""
    max_new_tokens: PositiveCount = 512
    """Largest length of a response in tokens. Longer responses are truncated. With training.environment: the largest
    number of sampled tokens of a rollout."""
    temperature: Temperature = 1.0
    """Sampling temperature, at least 0.01.

    vLLM raises lower temperatures to 0.01, so the trainer's log-probabilities would belong to another distribution."""
    top_p: OpenFraction = 1.0
    """Sample from the most likely tokens whose probabilities add up to this number (nucleus sampling); 1: from all."""
    top_k: Count = 0
    """Sample from the k most likely tokens; 0: from all."""
    stop: Annotated[tuple[LongText, ...], Field(max_length=16)] = ()
    """Strings that end a response, for example `["\\nQuestion:"]`. They are searched in the text with special tokens.
    Rewards get the response without this string."""
    sync_every_steps: PositiveCount = 1
    """Number of steps between two transfers of the weights to the rollout engine. With n, weights are up to n - 1 steps
    old. Must divide everySteps of each evaluation and of checkpoint.

    The metrics rollout/staleness_* show the age of the weights, and algorithm.rolloutCorrection can correct for it. An
    evaluation and a resumed run use the newest weights; that is why syncEverySteps must divide these."""
    stall_seconds: Seconds = 600
    """Largest time of a decoding step.

    After that the attempt fails, and its error shows where the engine hangs. The first step may compile the model."""
    max_num_sequences: PositiveCount = 256
    """Largest number of sequences that an engine decodes at once."""
    gpu_memory_utilization: OpenFraction = 0.5
    """Fraction of each GPU's memory that the rollout engine uses during generation."""
    load_balancing: LoadBalancing = LoadBalancing.STATIC
    cpu_kv_cache: Quantity = "1Gi"
    """Size of each engine's KV cache on CPUs, in bytes."""


ROLLOUT_RULES = (
    rule(
        Rollout,
        "Rollout.cpuKvCache",
        field=".cpuKvCache",
        cel=f"!has(self.cpuKvCache) || string(self.cpuKvCache).matches({cel_text(_ABOVE_ZERO)})",
        wrong="must be above 0, because an engine cannot generate without a KV cache",
        advice="increase it, for example to 1Gi (the default)",
        holds=lambda rollout: re.search(_ABOVE_ZERO, rollout.cpu_kv_cache) is not None,
    ),
)
