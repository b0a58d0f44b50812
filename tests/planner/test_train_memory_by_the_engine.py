"""The planner's formulas against the training engine's own accounting, to the byte, on one and on two ranks; and its
peaks against what a CPU allocates."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from rljob_planner.job import lora_shape
from rljob_planner.memory.train_passes import train_peak
from rljob_planner.memory.train_state import (
    gathered_elements,
    gradient_bytes,
    moment_bytes,
    parameter_bytes,
    root_tensors,
)
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import TrainLayout, TrainModel
from rljob_testing.engine_accounts import RANK, Account, AccountCase, account, allocated_peak, save_configured
from rljob_testing.engine_updates import engine_settings
from rljob_testing.ranks import RankedRun, only_rank, run_on_ranks
from rljob_testing.tiny_models import drawn_model
from rljob_trainer.engines.train.engine import TrainEngine

CASES = (
    AccountCase("qwen3", 1),
    AccountCase("qwen3", 2),
    AccountCase("qwen3", 1, 2),
    AccountCase("qwen2", 2),
    AccountCase("qwen2", 2, defers_reduction=True),
    AccountCase("qwen3_moe", 2),
    AccountCase("qwen3", 2, has_adapters=True, dtype=torch.bfloat16),
    AccountCase("qwen3", 2, is_trained=False, dtype=torch.bfloat16),
)


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[AccountCase, tuple[ModelShape, Account]]:
    """Of the first rank, which has the most."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: save_configured(name, root / name) for name in {case.model for case in CASES}}
    runs = [
        RankedRun(partial(account, case, folders[case.model]), case.num_shards * case.num_replicas) for case in CASES
    ]
    found = {}
    for case, (first, *_) in zip(CASES, run_on_ranks(runs), strict=True):
        assert isinstance(first, Account)
        found[case] = shape_of(folders[case.model]), first
    return found


def shape_of(folder: Path) -> ModelShape:
    return shape_of_config(json.loads((folder / "config.json").read_text()), folder.name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_is_that_of_the_engine(
    case: AccountCase, accounts: dict[AccountCase, tuple[ModelShape, Account]]
) -> None:
    shape, found = accounts[case]
    model = TrainModel(
        shape,
        case.is_trained,
        compute_bytes=case.dtype.itemsize,
        lora=lora_shape(shape, RANK, None, syncs_alone=False) if case.has_adapters else None,
        defers_reduction=case.defers_reduction,
    )
    layout = TrainLayout(case.num_shards * case.num_replicas, case.num_shards)
    assert found.parameters == parameter_bytes(model, layout)
    assert found.moments == moment_bytes(model, layout)
    if not case.is_trained:
        assert found.gathered == found.gradients == 0
        return
    assert found.gathered == model.compute_bytes * gathered_elements(root_tensors(model), case.num_shards)
    assert found.gradients_between == gradient_bytes(model, layout)
    reduced = TrainModel(shape, True, compute_bytes=model.compute_bytes, lora=model.lora)
    assert found.gradients == gradient_bytes(reduced, layout)


@pytest.mark.parametrize("recomputes", [False, True])
def test_peak_is_what_a_cpu_allocates(tmp_path: Path, recomputes: bool) -> None:
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    folder, lengths = tmp_path / "model", [129] * 4
    drawn_model(config).save_pretrained(folder)
    (tmp_path / "group").mkdir()
    with only_rank(tmp_path / "group") as context:
        settings = engine_settings(folder, context.device, max_tokens=512, gradient_checkpointing=recomputes)
        measured = allocated_peak(TrainEngine(settings), lengths)
    model = TrainModel(shape_of(folder), True, compute_bytes=4, checkpoints_activations=recomputes)
    peak = train_peak(model, TrainLayout(1, 1), 512, is_cpu=True)
    assert peak.resident + peak.transient == pytest.approx(measured, rel=0.03)
