"""An export after training with adapters: transformers loads the merged model, peft the adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rljob_api.v1alpha1.model import Model
from rljob_testing.models import tiny_models
from rljob_testing.training import lora_runs, replays
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.checkpoints.adapter_export import ADAPTER_FOLDER, write_merged_huggingface
from rljob_trainer.checkpoints.load import open_known_checkpoint
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.workers.trained_worker import ADAPTER_PREFIX

TOKENS_T = torch.tensor([4, 9, 5, 12, 7, 3, 8, 11])
SOURCE = Model(source="owner/model", revision="0123abc")


def exported(run: replays.ReplayedRun, folder: Path, dtype: torch.dtype) -> Path:
    """Exported after three steps."""
    run.steps(0, 3)
    saved = open_known_checkpoint(run.save(folder / "checkpoints", 3))
    settings = AdapterSettings(lora_runs.LORA, 0)
    write_merged_huggingface(folder / "export", run.replay.model, saved, ADAPTER_PREFIX, settings, SOURCE, dtype)
    return folder / "export"


def trained_logprobs(run: replays.ReplayedRun, *, with_adapters: bool) -> torch.Tensor:
    """Log-probabilities of the trained model, [T - 1]."""
    mask_T = torch.arange(len(TOKENS_T)) > 0
    batch = TokenBatch(RaggedColumn.from_rows([TOKENS_T]), RaggedColumn.from_rows([mask_T]), {})
    return run.actor.engine.forward(batch, 1.0, with_adapters=with_adapters).logprobs_N


@torch.no_grad()
def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of a loaded model, [T - 1]."""
    logits_TV = model(input_ids=TOKENS_T[None]).logits[0, :-1].float()
    logprobs_T: torch.Tensor = logits_TV.log_softmax(-1).gather(1, TOKENS_T[1:, None])[:, 0]
    return logprobs_T


@pytest.mark.parametrize("model", ["", "qwen3_moe"])
def test_both_exports_equal_the_trained_model(model: str, tmp_path: Path, context: WorkerContext) -> None:
    """The second case has experts, which are fused in memory and single in files."""
    source = tiny_models.save(model, tmp_path / "source") if model else replays.MODEL
    run = replays.replayed_run(replace(lora_runs.REPLAY, model=source), context)
    export = exported(run, tmp_path, torch.float32)
    expected, base = (trained_logprobs(run, with_adapters=each) for each in (True, False))
    assert (expected - base).abs().max() > 0.01
    merged, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"], info
    torch.testing.assert_close(logprobs_of(merged.eval()), expected, rtol=0, atol=1e-5)
    beside = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), export / ADAPTER_FOLDER
    )
    torch.testing.assert_close(logprobs_of(beside.eval()), expected, rtol=0, atol=1e-5)
    config = json.loads((export / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (SOURCE.source, SOURCE.revision)
    assert (config["r"], config["lora_alpha"]) == (lora_runs.LORA.rank, lora_runs.LORA.alpha)


def test_merging_is_done_before_rounding(tmp_path: Path, context: WorkerContext) -> None:
    run = replays.replayed_run(lora_runs.REPLAY, context)
    export = exported(run, tmp_path, torch.bfloat16)
    merged = AutoModelForCausalLM.from_pretrained(export)
    assert merged.dtype is torch.bfloat16
    name = "model.layers.0.self_attn.q_proj"
    first, second = (tensor for full, tensor in run.weights().items() if full.startswith(f"base_model.model.{name}."))
    weight = dict(run.actor.engine.named_shards())[f"{name}.weight"].full_tensor()  # type: ignore[attr-defined]
    expected = (weight + 2 * second @ first).bfloat16()
    assert torch.equal(merged.get_submodule(name).weight, expected)


def test_adapters_that_peft_would_attach_to_experts_are_not_written(
    tmp_path: Path, context: WorkerContext, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek V3 has dense layers, whose `gate_proj` has the same name as that of an expert."""
    source = tiny_models.save("deepseek_v3", tmp_path / "source")
    run = replays.replayed_run(replace(lora_runs.REPLAY, model=source), context)
    export = exported(run, tmp_path, torch.float32)
    assert not (export / ADAPTER_FOLDER).exists()
    assert "the adapters of down_proj, gate_proj, up_proj to the experts" in caplog.text
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logprobs_of(merged), trained_logprobs(run, with_adapters=True), rtol=0, atol=1e-5)
