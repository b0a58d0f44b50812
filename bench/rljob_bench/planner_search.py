"""Measures how long the search for the best layout takes (bench/planner.py)."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence

from rljob_bench.report import Bar, Measurement
from rljob_planner.gpus import NodeGroup, gpu_named
from rljob_planner.known_models import known_model
from rljob_planner.model_shape import ModelShape
from rljob_planner.search.best_placement import search
from rljob_planner.workload import Head, Role, RolloutWork, TokenLengths, TrainModel, Workload

SECONDS_OF_SEARCH = {128: 5.0, 1024: 60.0}


def search_seconds() -> Measurement:
    """CPU seconds of a search, including its tables: PPO with a reward model, five roles, on two kinds of GPUs. Batches
    of 840 x 24 responses divide by more sizes than most batches."""
    rows: dict[str, tuple[float | None, ...]] = {}
    worst = dict.fromkeys(SECONDS_OF_SEARCH, 0.0)
    names = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B")
    for num_gpus in SECONDS_OF_SEARCH:
        half = num_gpus // 16
        cluster = (NodeGroup(half, 8, gpu_named("H100")), NodeGroup(half, 8, gpu_named("A100-80")))
        for name in names:
            shape = known_model(name)
            assert shape is not None, "the model is in the planner's table"
            job = _ppo(shape, tuple(Role), TokenLengths(400.0, 1024, 1200.0, 3072), 840, 24)
            _forget_all()
            begin = time.process_time()
            result = search(job, cluster)
            seconds = time.process_time() - begin
            worst[num_gpus] = max(worst[num_gpus], seconds)
            best = result.candidates[0].seconds if result.candidates else None
            rows[f"{num_gpus:,} GPUs, {name}"] = (seconds, len(result.candidates), best)
    bars = [
        Bar(f"seconds at {num_gpus:,} GPUs, the slowest", worst[num_gpus], limit)
        for num_gpus, limit in SECONDS_OF_SEARCH.items()
    ]
    return Measurement("Seconds of a search", ("search, s", "candidates", "best step, s"), rows, tuple(bars))


def _forget_all() -> None:
    """Clears the planner's caches, so that each search is measured as the first one of a command."""
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper) and each.__module__.startswith("rljob_planner"):
            each.cache_clear()


def _ppo(shape: ModelShape, roles: Sequence[Role], lengths: TokenLengths, batch_size: int, group_size: int) -> Workload:
    models = {
        Role.ACTOR: TrainModel(shape, is_trained=True, checkpoints_activations=True),
        Role.REF: TrainModel(shape, is_trained=False),
        Role.CRITIC: TrainModel(shape, is_trained=True, head=Head.VALUE, checkpoints_activations=True),
        Role.REWARD_MODEL: TrainModel(shape, is_trained=False, head=Head.SCORE),
    }
    return Workload(
        name="PPO",
        batch_size=batch_size,
        group_size=group_size,
        mini_batch_size=batch_size // 4,
        num_epochs_per_batch=1,
        num_steps=100,
        max_tokens_per_micro_batch=16384,
        lengths=lengths,
        models={role: model for role, model in models.items() if role in roles},
        rollout=RolloutWork(shape, max_model_length=lengths.longest_row),
        needs_old_logprobs=True,
    )
