"""Models, GPUs and jobs for the tests of the planner: few arguments, and the defaults of a job for the rest."""

from __future__ import annotations

from dataclasses import replace

from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import (
    Head,
    PlacedPool,
    Placement,
    Role,
    RolloutLayout,
    RolloutWork,
    TokenLengths,
    TrainLayout,
    TrainModel,
    Workload,
)

GIB = 2**30
QWEN3_4B = ModelShape("Qwen/Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, ties_head=True, has_qk_norm=True)
LLAMA3_8B = ModelShape("meta-llama/Meta-Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, ties_head=False)


def gpu(memory_gib: float = 80.0, *, is_cpu: bool = False) -> Gpu:
    """A GPU with the speed of an H100."""
    return Gpu("test", memory_gib * GIB, 989e12, 3.35e12, 450e9, is_cpu=is_cpu)


def trained_model(shape: ModelShape = QWEN3_4B, **changes: object) -> TrainModel:
    """A model in training with recomputed activations."""
    return replace(TrainModel(shape, is_trained=True, checkpoints_activations=True), **changes)  # type: ignore[arg-type]


def frozen_model(shape: ModelShape = QWEN3_4B, **changes: object) -> TrainModel:
    """A frozen model that computes log-probabilities or scores."""
    return replace(TrainModel(shape, is_trained=False), **changes)  # type: ignore[arg-type]


def critic(shape: ModelShape = QWEN3_4B, **changes: object) -> TrainModel:
    """A model in training that predicts values."""
    return trained_model(shape, head=Head.VALUE, **changes)


def workload(actor: TrainModel | None = None, **changes: object) -> Workload:
    """GRPO with a KL term: 64 prompts of up to 1,024 tokens, with 8 responses each of up to 3,072 tokens."""
    model = actor or trained_model()
    made = Workload(
        name="job",
        batch_size=64,
        group_size=8,
        mini_batch_size=64,
        num_epochs_per_batch=1,
        num_steps=100,
        max_tokens_per_micro_batch=16384,
        lengths=TokenLengths(256.0, 1024, 1024.0, 3072),
        models={Role.ACTOR: model, Role.REF: frozen_model(model.shape)},
        rollout=RolloutWork(model.shape, max_model_length=4096),
        needs_old_logprobs=False,
        checkpoint_every_steps=20,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def one_pool(
    job: Workload, on: Gpu | None = None, *, nodes: int = 1, gpus_per_node: int = 8, tensor_parallel: int = 1
) -> PlacedPool:
    """A pool with all roles of the job, each model sharded over all GPUs."""
    num_gpus = nodes * gpus_per_node
    layouts = {role: TrainLayout(num_gpus, num_gpus) for role in job.models}
    return PlacedPool("pool", nodes, gpus_per_node, on or gpu(), layouts, RolloutLayout(num_gpus, tensor_parallel))


def placement(pool: PlacedPool) -> Placement:
    """The placement of a job on one pool."""
    return Placement((pool,))
