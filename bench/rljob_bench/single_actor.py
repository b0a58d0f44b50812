"""An actor alone in this process, on one device, and work for its updates: no controller, no Ray, no vLLM."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from rljob_api.v1alpha1.model import Kernels
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_bench.update_work import Work
from rljob_planner.model_shape import ModelShape
from rljob_testing.training import engine_updates
from rljob_testing.training.engine_updates import grpo_actor
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.workers.actor import ActorWorker

NUM_STEPS = 1_000_000
SMALLEST_SHARE = 0.25
"""Minimum length of a row as a fraction of the longest; lengths are uniform above it."""
PROMPT_SHARE = 0.125
"""Fraction of every row that is the prompt."""


@contextmanager
def only_worker(device_type: str) -> Iterator[WorkerContext]:
    """Makes this process the only rank of a process group within the context."""
    context = WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, device_type, torch.get_num_threads())
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        if device_type == "cuda":
            torch.cuda.set_device(context.device)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            yield context
        finally:
            dist.destroy_process_group()


@contextmanager
def random_model(shape: ModelShape, device: torch.device) -> Iterator[Path]:
    """A folder with a model whose weights are drawn on the device; BFloat16 on disk, and deleted afterwards.

    Raises ValueError if its number of parameters differs from the count for the shape.
    """
    config = Qwen3Config(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    counted = sum(parameter.numel() for parameter in model.parameters())
    if counted != shape.num_parameters:
        raise ValueError(f"{shape.name}: the model has {counted:,} parameters, expected {shape.num_parameters:,}")
    folder = Path(tempfile.mkdtemp(prefix="rljob-bench-model-"))
    try:
        model.save_pretrained(folder)
        del model
        release_cached_memory(device)
        yield folder
    finally:
        shutil.rmtree(folder)


def build_actor(
    folder: Path,
    context: WorkerContext,
    dtype: torch.dtype,
    work: Work,
    every_nth_layer: int,
    max_tokens: int,
    kernels: Kernels = Kernels.PLAIN,
) -> ActorWorker:
    """Builds an actor for GRPO with one update per step. `every_nth_layer` is recomputed; 0 keeps all activations.
    Collective."""
    optimizer = Optimizer()
    engine = TrainEngineSettings(folder, context.device, dtype, every_nth_layer > 0, max_tokens, optimizer)
    engine = replace(engine, gradient_checkpointing_every_nth_layer=max(1, every_nth_layer), kernels=kernels)
    num_rows = len(work.row_lengths)
    return grpo_actor(context, engine, optimizer, max(work.row_lengths), num_rows, num_steps=NUM_STEPS)


def random_work(num_tokens: int, longest: int) -> Work:
    """Rows of random lengths with exactly `num_tokens` tokens in total."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        length = int(torch.randint(int(SMALLEST_SHARE * longest), longest + 1, (), generator=generator))
        # Avoids a last row of only a few tokens.
        lengths.append(left if left < length + SMALLEST_SHARE * longest and left <= longest else min(length, left))
    return Work(tuple(lengths), sum(length - _num_prompt_tokens(length) for length in lengths))


def random_rollout(shape: ModelShape, work: Work) -> DataProto:
    """Random columns that an update needs."""
    prompt_lengths = [_num_prompt_tokens(length) for length in work.row_lengths]
    return engine_updates.random_rollout(shape.vocabulary_size, 0, work.row_lengths, prompt_lengths)


def release_cached_memory(device: torch.device) -> None:
    """Releases the memory that torch's allocator has reserved."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _num_prompt_tokens(length: int) -> int:
    return max(1, int(PROMPT_SHARE * length))
