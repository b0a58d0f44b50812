"""Steps of reinforcement learning, and parts of steps, that others have measured on GPUs and published.

Each is a workload and a placement in the planner's types, with the measured times. Three facts are not published, and
the same is assumed for all: prompts of 150 tokens if only the length of whole rows is known; response lengths that vary
by `response_cv`; and a reference and old log-probabilities, whose passes these programs make in every step. Runs that
trained with Megatron (tensor, pipeline and expert parallelism) are modelled as FSDP over all their GPUs. That has the
same computation but other communication; the idle time of their pipelines is in no formula here.

Legend: G GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from rljob_planner.gpus import Gpu, gpu_named
from rljob_planner.known_models import known_model
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import (
    Head,
    PlacedPool,
    Placement,
    Role,
    RolloutLayout,
    RolloutWork,
    Schedule,
    TokenLengths,
    TrainLayout,
    TrainModel,
    Workload,
)

PROMPT_TOKENS = 150.0
"""Assumed mean prompt length if only the length of whole rows is published (OpenMathInstruct-2 with a chat
template)."""
NEMO = "NVIDIA-NeMo/RL, docs/about/performance-summary.md"
MICRO_BATCH_TOKENS = 16_384
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class PublishedStep:
    """A whole step. `seconds` by the names of `timing_s/...`; `step` is the whole step."""

    row: int
    title: str
    source: str
    workload: Workload
    placement: Placement
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class PublishedUpdate:
    """Forward pass, backward pass and optimizer of rows of equal length, all of whose tokens are trained on."""

    row: int
    title: str
    source: str
    model: TrainModel
    num_gpus: int
    gpu: Gpu
    rows_per_gpu: int
    row_tokens: int
    seconds: float


@dataclass(frozen=True)
class PublishedDecoding:
    """A server at its highest throughput, with prompts and responses of fixed lengths."""

    row: int
    title: str
    source: str
    work: RolloutWork
    layout: RolloutLayout
    gpu: Gpu
    prompt: int
    response: int
    num_requests: int
    tokens_per_second: float
    """Response tokens per second, over all GPUs."""


@dataclass(frozen=True)
class _Batch:
    prompts: int
    group: int
    mini_batch: int
    lengths: TokenLengths

    @property
    def rows(self) -> int:
        """Number of responses per step."""
        return self.prompts * self.group


def _workload(name: str, shape: ModelShape, batch: _Batch, rollout: RolloutWork, *, with_reference: bool) -> Workload:
    models = {Role.ACTOR: TrainModel(shape, is_trained=True, checkpoints_activations=True)}
    if with_reference:
        models[Role.REF] = TrainModel(shape, is_trained=False)
    return Workload(
        name=name,
        batch_size=batch.prompts,
        group_size=batch.group,
        mini_batch_size=batch.mini_batch,
        num_epochs_per_batch=1,
        num_steps=1,
        max_tokens_per_micro_batch=MICRO_BATCH_TOKENS,
        lengths=batch.lengths,
        models=models,
        rollout=rollout,
        needs_old_logprobs=True,
    )


def _rollout(shape: ModelShape, max_model_length: int, utilization: float) -> RolloutWork:
    """Rollout with at most 1,024 sequences at once, which was vLLM's own limit in those runs."""
    return RolloutWork(shape, max_sequences=1024, max_model_length=max_model_length, memory_utilization=utilization)


def _pool(name: str, num_gpus: int, gpu: Gpu, roles: tuple[Role, ...], tensor_parallel: int | None) -> PlacedPool:
    layouts = {role: TrainLayout(num_gpus, num_gpus) for role in roles}
    rollout = None if tensor_parallel is None else RolloutLayout(num_gpus, tensor_parallel)
    return PlacedPool(name, num_gpus // GPUS_PER_NODE, GPUS_PER_NODE, gpu, layouts, rollout)


def _nemo(
    row: int,
    model: str,
    kind: str,
    num_gpus: int,
    total: float,
    cap: int,
    tensor_parallel: int,
    seconds: float,
    *,
    prompts: int = 64,
    group: int = 32,
    cv: float = 0.8,
    utilization: float = 0.6,
    num_rollout_gpus: int | None = None,
) -> PublishedStep:
    """A row of NeMo-RL's tables: rows of `total` tokens on average and at most `cap`; four updates (512 of 2,048 rows
    each), or one for 512 rows."""
    shape = _shape(model)
    gpu = gpu_named(kind)
    lengths = TokenLengths(PROMPT_TOKENS, 512, total - PROMPT_TOKENS, cap - int(PROMPT_TOKENS), response_cv=cv)
    batch = _Batch(prompts, group, max(1, 512 // group), lengths)
    workload = _workload(model, shape, batch, _rollout(shape, cap, utilization), with_reference=True)
    roles = (Role.ACTOR, Role.REF)
    if num_rollout_gpus is None:
        placement = Placement((_pool("all", num_gpus, gpu, roles, tensor_parallel),))
    else:
        rollout = _pool("rollout", num_rollout_gpus, gpu, (), tensor_parallel)
        train = _pool("train", num_gpus - num_rollout_gpus, gpu, roles, None)
        placement = Placement((train, rollout), Schedule.ONE_STEP_OFF)
    title = f"{model}, {num_gpus} {kind}" + (", one step off" if num_rollout_gpus else "")
    return PublishedStep(row, title, NEMO, workload, placement, {"step": seconds})


def _verl(
    row: int,
    model: str,
    kind: str,
    source: str,
    lengths: TokenLengths,
    seconds: Mapping[str, float],
    *,
    with_reference: bool,
) -> PublishedStep:
    """A row of verl: 8 GPUs, 1,024 prompts x 5 responses, four updates, engines on two GPUs each."""
    shape = _shape(model)
    batch = _Batch(1024, 5, 256, lengths)
    rollout = _rollout(shape, lengths.longest_row, 0.6)
    workload = _workload(model, shape, batch, rollout, with_reference=with_reference)
    roles = (Role.ACTOR, Role.REF) if with_reference else (Role.ACTOR,)
    placement = Placement((_pool("all", 8, gpu_named(kind), roles, 2),))
    return PublishedStep(row, f"{model}, 8 {kind}", source, workload, placement, seconds)


def published_steps() -> tuple[PublishedStep, ...]:
    """Rows 1 to 7."""
    return (
        _nemo(1, "meta-llama/Llama-3.1-8B", "H100", 16, 1019, 4096, 1, 92.8),
        _nemo(2, "meta-llama/Llama-3.1-8B", "GB200", 8, 1066, 4096, 1, 91.0),
        _nemo(3, "Qwen/Qwen3-32B", "H100", 64, 3252, 4096, 4, 200.0, cv=0.35, utilization=0.8, num_rollout_gpus=32),
        _nemo(4, "Qwen/Qwen3-30B-A3B", "H100", 32, 3203, 4096, 2, 192.0, cv=0.35),
        _nemo(5, "Qwen/Qwen3-235B-A22B", "H100", 256, 5713, 8192, 16, 312.0, prompts=16, group=32, cv=0.35),
        _verl(
            6,
            "Qwen/Qwen2-7B",
            "A100-80",
            "diqiuzhuanzhuan/verldata, run_logs/qwen2-7b_math.log, step 4 (the kind of GPU is inferred)",
            TokenLengths(100.8, 1024, 245.7, 1024, clipped_share=0.016),
            {"generate": 62.9, "old_logprob": 32.2, "update_actor": 130.2, "step": 227.2},
            with_reference=False,
        ),
        _verl(
            7,
            "deepseek-ai/deepseek-llm-7b-chat",
            "MI300X",
            "yushengsu-thu/verl_training_log, gsm8k/grpo_run_deepseek7b_llm.log, step 3",
            TokenLengths(82.7, 512, 190.5, 1024, clipped_share=0.001),
            {"generate": 60.8, "old_logprob": 7.0, "ref": 7.3, "update_actor": 28.2, "step": 104.3},
            with_reference=True,
        ),
    )


def held_back_steps() -> tuple[PublishedStep, ...]:
    """Other rows of NeMo-RL's tables (v0.4 and v0.6), which were not used to choose anything here. If they are one step
    off-policy, the split of the GPUs and the memory are those of NeMo-RL's recipes; NeMo-RL syncs weights while
    responses are being generated, we do not."""
    qwen235, qwen30, deepseek = "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
    return (
        _nemo(14, "meta-llama/Llama-3.1-8B", "H100", 16, 1060, 4096, 1, 97.7),
        _nemo(15, "Qwen/Qwen3-32B", "H100", 32, 3206, 4096, 4, 393.0, cv=0.35),
        _nemo(16, qwen235, "H100", 128, 5698, 8192, 16, 395.0, prompts=16, cv=0.35),
        _nemo(17, qwen235, "GB200", 64, 5709, 8192, 8, 286.0, prompts=16, cv=0.35),
        _nemo(18, qwen235, "GB200", 128, 5693, 8192, 8, 345.0, prompts=16, cv=0.35),
        _nemo(19, qwen30, "GB200", 16, 3199, 4096, 1, 221.0, cv=0.35),
        _nemo(20, deepseek, "H100", 256, 701, 1536, 32, 134.0, prompts=16),
        _nemo(21, deepseek, "GB200", 128, 711, 1536, 32, 108.0, prompts=16),
        _nemo(22, qwen30, "H100", 32, 3201, 4096, 2, 152.0, cv=0.35, utilization=0.8, num_rollout_gpus=16),
        _nemo(
            23, qwen235, "H100", 256, 5721, 8192, 8, 231.0, prompts=16, cv=0.35, utilization=0.88, num_rollout_gpus=128
        ),
    )


def published_updates() -> tuple[PublishedUpdate, ...]:
    """Rows 8 to 10. Row 10 keeps every second product (selective checkpointing by operator), which recomputes as much
    as checkpointing every second layer. It is the run without torch.compile, like this trainer."""
    prime = "PrimeIntellect-ai/prime-rl, benchmarks/baselines"
    qwen4, qwen30, llama = (
        TrainModel(_shape(name), is_trained=True, checkpoints_activations=True)
        for name in ("Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B")
    )
    half = replace(llama, checkpoints_every_nth_layer=2)
    titan = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
    return (
        PublishedUpdate(8, "Qwen3-4B, 8 H100", prime, qwen4, 8, gpu_named("H100"), 2, 16_384, 4.69),
        PublishedUpdate(9, "Qwen3-30B-A3B, 8 H200", prime, qwen30, 8, gpu_named("H200"), 2, 65_536, 42.89),
        PublishedUpdate(10, "Llama-3.1-8B, 8 H100", titan, half, 8, gpu_named("H100"), 2, 8192, 2 * 8192 / 5762),
    )


def published_decoding() -> tuple[PublishedDecoding, ...]:
    """Row 11: weights and KV cache in 8 bits, with products that are twice as fast."""
    source = "NVIDIA/TensorRT-LLM, docs/source/performance/perf-overview.md"
    h100 = gpu_named("H100")
    fast = replace(h100, flops=2 * h100.flops)
    small, large = (
        RolloutWork(
            _shape(name),
            weight_bytes=1,
            max_sequences=2048,
            max_model_length=2048,
            memory_utilization=0.95,
        )
        for name in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.3-70B-Instruct")
    )
    return (
        PublishedDecoding(
            11, "Llama-3.1-8B, 1 H100", source, small, RolloutLayout(1, 1), fast, 1000, 1000, 3000, 15_220.0
        ),
        PublishedDecoding(
            11, "Llama-3.3-70B, 2 H100", source, large, RolloutLayout(2, 2), fast, 1000, 1000, 1000, 4205.0
        ),
    )


LLAMA_34B = ModelShape("Llama-34B", 48, 8192, 64, 8, 128, 22_016, 32_000, ties_head=False)
PPO_NETWORK = 25e9
"""Bytes per second and direction of a node (200 Gb/s)."""
PPO_SOURCE = "HybridFlow, arXiv 2409.19256, section 8.3 and Figure 12"


def ppo_workload() -> Workload:
    """Row 12: PPO with four models of 34B; 1,024 prompts of 1,024 tokens, responses of the same length, eight
    updates."""
    trained = TrainModel(LLAMA_34B, is_trained=True, checkpoints_activations=True)
    frozen = TrainModel(LLAMA_34B, is_trained=False)
    lengths = TokenLengths(1024, 1024, 1024, 1024)
    batch = _Batch(1024, 1, 128, lengths)
    base = _workload("PPO 34B", LLAMA_34B, batch, _rollout(LLAMA_34B, 2048, 0.6), with_reference=True)
    models = {
        Role.ACTOR: trained,
        Role.REF: frozen,
        Role.CRITIC: replace(trained, head=Head.VALUE),
        Role.REWARD_MODEL: replace(frozen, head=Head.SCORE),
    }
    return replace(base, models=models)


def ppo_placements(num_gpus: int) -> dict[str, tuple[Placement, ...]]:
    """Three of the measured placements, each with all layouts of copies on at least two nodes that divide its GPUs: all
    models on all GPUs; actor and reference on one half, critic and reward model on the other; each model separate, with
    the actor on half of the GPUs, the critic on a quarter, and the others on an eighth each."""
    everyone = (Role.ACTOR, Role.REF, Role.CRITIC, Role.REWARD_MODEL)
    half, quarter, eighth = num_gpus // 2, num_gpus // 4, num_gpus // 8
    return {
        "colocated": _arranged({everyone: num_gpus}),
        "split": _arranged({(Role.ACTOR, Role.REF): half, (Role.CRITIC, Role.REWARD_MODEL): half}),
        "standalone": _arranged(
            {(Role.ACTOR,): half, (Role.CRITIC,): quarter, (Role.REF,): eighth, (Role.REWARD_MODEL,): eighth}
        ),
    }


def _arranged(sizes: Mapping[tuple[Role, ...], int]) -> tuple[Placement, ...]:
    gpu = replace(gpu_named("A100-80"), network_bandwidth=PPO_NETWORK / GPUS_PER_NODE)
    found: list[Placement] = []
    for nodes_per_copy, tensor_parallel in product((2, 4, 8, 16), (2, 4, 8)):
        pools: list[PlacedPool] = []
        for roles, size in sizes.items():
            shards = min(size, nodes_per_copy * GPUS_PER_NODE)
            if size % shards or size % GPUS_PER_NODE:
                continue
            layouts = {role: TrainLayout(size, shards) for role in roles}
            rollout = RolloutLayout(size, tensor_parallel) if Role.ACTOR in roles else None
            pools.append(PlacedPool(roles[0], size // GPUS_PER_NODE, GPUS_PER_NODE, gpu, layouts, rollout))
        if len(pools) == len(sizes):
            found.append(Placement(tuple(pools)))
    return tuple(found)


def _shape(name: str) -> ModelShape:
    shape = known_model(name)
    assert shape is not None, f"{name} is in the planner's table"
    return shape
