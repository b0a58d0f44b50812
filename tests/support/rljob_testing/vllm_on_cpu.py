"""A vLLM engine on CPUs that is small enough for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm.model_executor.models import registry

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


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """Within it, vLLM looks at the class of a model that it has not seen in this process, not in one of its own: that
    loads vLLM again, and is 10 s for each class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        yield
