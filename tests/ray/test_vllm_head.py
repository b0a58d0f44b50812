"""With `headDtype: Float32`, vLLM's logits have 32 bits in a job in BFloat16, and follow from the newest weights. The
tests do not use Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates, gloo_ranks, training_runs
from rljob_trainer.controller.model_roles import Models, model_roles
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.models.source import controller_model
from rljob_trainer.workers.factories import ROLLOUT

pytestmark = [pytest.mark.vllm]

NUM_VERSIONS = 2
LONGEST_PROMPT = 16


def errors_of_logits(folder: Path, context: WorkerContext) -> list[float]:
    """The error of vLLM's logits for each version of the weights. The engine's settings are those of a job."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
    from rljob_trainer.weights.sync import sync_weights
    from rljob_trainer.workers.rollout import RolloutWorker

    document = training_runs.small_job(
        model={"source": str(folder), "dtype": "BFloat16", "headDtype": "Float32"},
        rollout={"engine": "VLLM", "compile": "Never", "groupSize": 4, "maxNewTokens": 8, "cpuKvCache": "16Mi"},
    )
    job = TrainerJob(name="small", spec=RLJob.from_wire(document).spec)
    _, model = controller_model(job.spec.training.model, folder, folder)
    [make] = [role.factory for role in model_roles(job, Models(model), LONGEST_PROMPT) if role.name == ROLLOUT]
    assert make is not None
    rollout = make(context, {})
    assert isinstance(rollout, RolloutWorker)
    assert isinstance(rollout.engine, VllmEngine)
    trained = TrainEngine(engine_updates.engine_settings(folder, context.device, torch.bfloat16))
    found = []
    for version in range(NUM_VERSIONS):
        sync_weights(trained, rollout.engine, torch.bfloat16, version)
        found.append(small_vllm.error_of_logits(rollout.engine, trained))
        engine_updates.update(trained, engine_updates.random_batch())
        trained.optimizer_step(1e-2)
    return found


def head_dtypes_of_parts(folder: Path, context: WorkerContext) -> list[torch.dtype]:
    """vLLM's data type of the head by the configuration of the multimodal model, and by that of its text part."""
    from vllm.config.model import _get_head_dtype
    from vllm.transformers_utils.config import get_config

    from rljob_trainer.engines.rollout.vllm_start import VllmSettings, engine_arguments

    settings = VllmSettings(
        folder, context.device.type, False, torch.bfloat16, 1, 32, 16, 0.5, 2**24, 0, has_float32_head=True
    )
    change = engine_arguments(settings).hf_overrides
    assert callable(change)
    config = get_config(folder, trust_remote_code=False, hf_overrides_fn=change)
    return [_get_head_dtype(part, torch.bfloat16, "generate") for part in (config, config.get_text_config())]


def test_logits_are_not_rounded_and_follow_from_the_newest_weights(tmp_path: Path) -> None:
    """On CPUs, vLLM packs a head that shares its weight with the embedding."""
    folder = tiny_models.save("qwen3 tied", tmp_path / "qwen3")
    tiny_models.copy_tokenizer(folder)
    [[found]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(errors_of_logits, folder), 1)], gloo_ranks.VLLM)
    assert isinstance(found, list)
    assert len(found) == NUM_VERSIONS
    assert max(found) < 1e-5


def test_the_text_part_of_a_multimodal_model_has_a_float32_head(tmp_path: Path) -> None:
    """vLLM builds the text part with its own configuration."""
    Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]).save_pretrained(tmp_path)
    run = gloo_ranks.RankedRun(partial(head_dtypes_of_parts, tmp_path), 1)
    assert gloo_ranks.run_on_ranks([run], gloo_ranks.VLLM) == [[[torch.float32, torch.float32]]]
