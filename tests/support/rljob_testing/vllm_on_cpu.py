"""A vLLM engine on CPUs that is small enough for a test."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_trainer.engines.rollout.vllm_engine import VllmEngine, VllmSettings


def small_vllm_engine(
    folder: Path, num_ranks: int, *, adapter_rank: int | None = None, dtype: torch.dtype = torch.float32
) -> VllmEngine:
    """Collective over `num_ranks`, which hold one copy of the model together: rows of at most 64 tokens."""
    return VllmEngine(
        VllmSettings(
            model_folder=folder,
            device_type="cpu",
            compiles=False,
            dtype=dtype,
            tensor_parallel=num_ranks,
            max_model_length=64,
            max_num_sequences=8,
            gpu_memory_utilization=0.5,
            cpu_kv_cache_bytes=16 * 2**20,
            seed=0,
            adapter_rank=adapter_rank,
        )
    )
