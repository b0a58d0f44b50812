"""Fused kernels of liger-kernel, with a fake of the package that runs on CPUs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import Kernels
from rljob_testing import compare
from rljob_testing.messages import Mentions
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates, gloo_ranks, training_runs
from rljob_testing.training.fake_liger import FakeLiger
from rljob_trainer.controller.engine_settings import actor_engine, critic_engine, reference_engine
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.kernels import LIGER_MODEL_TYPES, check_kernel_device, check_kernels
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import ConfigurationError

NUM_LAYERS = 2


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> FakeLiger:
    """The installed package."""
    fake = FakeLiger()
    fake.install(monkeypatch)
    return fake


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerContext]:
    with gloo_ranks.process_group_of_one(tmp_path_factory.mktemp("group")) as made:
        yield made


def settings_of(name: str, folder: Path, context: WorkerContext) -> TrainEngineSettings:
    """The settings of an engine with fused kernels."""
    return replace(
        engine_updates.engine_settings(tiny_models.save(name, folder), context.device), kernels=Kernels.LIGER
    )


def num_norms(model: PreTrainedModel) -> int:
    return sum(name.endswith("norm.weight") for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", LIGER_MODEL_TYPES)
def test_every_layer_uses_the_kernels_and_learns_the_same(
    name: str, tmp_path: Path, context: WorkerContext, liger: FakeLiger
) -> None:
    settings = settings_of(name, tmp_path / "model", context)
    batch = engine_updates.random_batch([20, 9, 33])
    expected = engine_updates.update(TrainEngine(replace(settings, kernels=Kernels.PLAIN)), batch)
    assert liger.calls == []
    engine = TrainEngine(settings)
    each_pass = Counter(norm=num_norms(engine.language_model), rotary=NUM_LAYERS)
    assert each_pass["norm"] >= 2 * NUM_LAYERS + 1
    # One pass of the parity check is with them, the other without.
    assert Counter(liger.calls) == each_pass
    liger.calls.clear()
    found = engine_updates.update(engine, batch)
    assert Counter(liger.calls) == each_pass
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert compare.relative_difference(found.gradients, expected.gradients) < compare.RELATIVE
    # The gradient of a norm's result may be in use elsewhere.
    assert liger.in_place == {False}


def test_recomputed_layers_use_them_again(tmp_path: Path, context: WorkerContext, liger: FakeLiger) -> None:
    engine = TrainEngine(replace(settings_of("qwen3", tmp_path / "model", context), gradient_checkpointing=True))
    liger.calls.clear()
    engine_updates.update(engine, engine_updates.random_batch([20]))
    last_norm = 1
    assert Counter(liger.calls) == Counter(
        norm=2 * (num_norms(engine.language_model) - last_norm) + last_norm, rotary=2 * NUM_LAYERS
    )


def test_the_model_in_bfloat16_uses_them_too(tmp_path: Path, context: WorkerContext, liger: FakeLiger) -> None:
    """It is built after the check, which is in float32."""
    engine = TrainEngine(replace(settings_of("llama", tmp_path / "model", context), compute_dtype=torch.bfloat16))
    liger.calls.clear()
    engine.forward(engine_updates.random_batch([20]), 1.0)
    assert Counter(liger.calls) == Counter(norm=2 * NUM_LAYERS + 1, rotary=NUM_LAYERS)


def test_other_models_of_the_process_do_not_use_them(tmp_path: Path, context: WorkerContext, liger: FakeLiger) -> None:
    settings, batch = settings_of("qwen3", tmp_path / "model", context), engine_updates.random_batch([20])
    engine = TrainEngine(settings)
    liger.calls.clear()
    engine_updates.plain_update(engine_updates.plain_model(settings.model_folder), batch)
    TrainEngine(replace(settings, kernels=Kernels.PLAIN)).forward(batch, 1.0)
    assert liger.calls == []
    engine.forward(batch, 1.0)
    assert liger.calls
    # Also after an exception.
    attention = next(each for each in engine.language_model.modules() if type(each).__name__ == "Qwen3Attention")
    with pytest.raises(TypeError, match="missing"):
        attention()
    assert modeling_qwen3.apply_rotary_pos_emb.__module__ == modeling_qwen3.__name__


@pytest.mark.parametrize("wrong", ["norm_error", "rotary_error"])
def test_wrong_kernels_are_found_by_the_parity_check(
    wrong: str, tmp_path: Path, context: WorkerContext, liger: FakeLiger
) -> None:
    settings = settings_of("qwen3", tmp_path / "model", context)
    setattr(liger, wrong, 1e-2)
    with pytest.raises(ConfigurationError) as caught:
        TrainEngine(settings)
    assert str(caught.value) == Mentions(
        "log-probabilities differ", "spec.training.model.kernels: Plain", "seen: Liger"
    )
    # Without them the same model is accepted.
    TrainEngine(replace(settings, kernels=Kernels.PLAIN))


@pytest.mark.usefixtures("liger")
def test_other_model_types_are_rejected() -> None:
    for name in ("gemma3", "olmo2", "gpt_oss"):
        config = tiny_models.ARCHITECTURES[name]()
        with pytest.raises(ConfigurationError) as caught:
            check_kernels(Kernels.LIGER, config)
        assert str(caught.value) == Mentions("spec.training.model.kernels", f"seen: '{config.model_type}'", "set Plain")
        check_kernels(Kernels.PLAIN, config)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    config = tiny_models.ARCHITECTURES["llama"]()
    with pytest.raises(ConfigurationError) as caught:
        check_kernels(Kernels.LIGER, config)
    assert str(caught.value) == Mentions("spec.training.model.kernels", "liger-kernel", "`kernels` extra", "set Plain")
    check_kernels(Kernels.PLAIN, config)


def test_fused_kernels_need_a_gpu() -> None:
    check_kernel_device(Kernels.PLAIN, "cpu")
    check_kernel_device(Kernels.LIGER, "cuda")
    with pytest.raises(ConfigurationError) as caught:
        check_kernel_device(Kernels.LIGER, "cpu")
    assert str(caught.value) == Mentions("spec.training.model.kernels", "GPUs", "seen: cpu", "set Plain")


def test_policy_and_reference_have_the_kernels_of_the_job() -> None:
    job = training_runs.small_job(model={"kernels": "Liger"}, algorithm={"type": "PPO", "kl": {"coefficient": 0.1}})
    spec, layout = RLJob.from_wire(job).spec, ParallelLayout.of(1)
    engines = [each(spec, torch.float32, layout).kernels for each in (actor_engine, reference_engine, critic_engine)]
    assert engines == [Kernels.LIGER, Kernels.LIGER, Kernels.PLAIN]
