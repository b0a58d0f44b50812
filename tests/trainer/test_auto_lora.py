"""How LoRA adapters reach the rollout engine, and which adapters a resumed run accepts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import JsonValue

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import Dtype, GradientCheckpointing, Lora, LoraSync, Model
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.messages import Mentions
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.controller.auto_settings import (
    AdaptedModel,
    Recomputation,
    refuse_other_adapters,
    resolve_auto,
    resolved_spec,
)
from rljob_trainer.controller.build_run import adapted_model, found_policy
from rljob_trainer.controller.checks.fit import check_lora
from rljob_trainer.controller.hub_models import hub_model_of
from rljob_trainer.engines.rollout import select
from rljob_trainer.engines.rollout.select import select_lora_sync, vllm_supports_adapters
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import read_settings

ADAPTED = AdaptedModel(("q_proj", "v_proj"), lambda: True)
UNSUPPORTED_BY_VLLM = AdaptedModel(("q_proj", "v_proj"), lambda: False)
LATENT = AdaptedModel(("kv_b_proj", "o_proj"), lambda: True)
HUB = "Qwen/Qwen3-0.6B"
NOT_RECOMPUTED = Recomputation(GradientCheckpointing.NEVER, GradientCheckpointing.NEVER)


def full_spec() -> RLJobSpec:
    """The spec of a job without adapters."""
    return RLJob.from_wire(training_runs.small_job(rollout={"compile": "Never"})).spec


def lora_spec(sync: str = "Auto", engine: str = "VLLM", **lora: JsonValue) -> RLJobSpec:
    job = training_runs.small_job(
        rollout={"engine": engine, "compile": "Never"}, model={"lora": {"sync": sync, **lora}}
    )
    return RLJob.from_wire(job).spec


@pytest.mark.parametrize(
    ("sync", "engine", "device_type", "dtype", "adapted", "expected"),
    [
        ("Auto", "VLLM", "cuda", "Auto", ADAPTED, LoraSync.ADAPTER),
        ("Auto", "VLLM", "cuda", "Float32", ADAPTED, LoraSync.ADAPTER),
        ("Auto", "VLLM", "cpu", "Auto", ADAPTED, LoraSync.MERGED),
        ("Auto", "VLLM", "cpu", "BFloat16", ADAPTED, LoraSync.ADAPTER),
        ("Auto", "HuggingFace", "cuda", "Auto", ADAPTED, LoraSync.MERGED),
        ("Auto", "HuggingFace", "cpu", "BFloat16", ADAPTED, LoraSync.MERGED),
        ("Adapter", "VLLM", "cpu", "Float32", ADAPTED, LoraSync.ADAPTER),
        ("Merged", "VLLM", "cuda", "Auto", ADAPTED, LoraSync.MERGED),
        ("Merged", "VLLM", "cpu", "BFloat16", ADAPTED, LoraSync.MERGED),
        ("Auto", "VLLM", "cuda", "Auto", UNSUPPORTED_BY_VLLM, LoraSync.MERGED),
        ("Auto", "VLLM", "cpu", "BFloat16", UNSUPPORTED_BY_VLLM, LoraSync.MERGED),
        ("Auto", "VLLM", "cuda", "Auto", LATENT, LoraSync.MERGED),
        ("Auto", "VLLM", "cpu", "BFloat16", LATENT, LoraSync.MERGED),
        ("Merged", "VLLM", "cuda", "Auto", LATENT, LoraSync.MERGED),
    ],
)
def test_adapters_reach_the_engine_in_the_fitting_way(
    sync: str,
    engine: str,
    device_type: str,
    dtype: str,
    adapted: AdaptedModel,
    expected: LoraSync,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job_spec = lora_spec(sync, engine)
    model = job_spec.training.model.model_copy(update={"dtype": Dtype(dtype)})
    job_spec = job_spec.model_copy(update={"training": job_spec.training.model_copy(update={"model": model})})
    with caplog.at_level("INFO"):
        choices = resolve_auto(job_spec, device_type, None, adapted=adapted)
    assert choices.lora is not None
    assert choices.lora.sync is expected
    resolved = resolved_spec(job_spec, choices, NOT_RECOMPUTED)
    assert resolved.training.model.lora == choices.lora
    assert RLJob.from_wire(training_runs.small_job() | {"spec": resolved.to_wire()}).spec == resolved
    assert f"(model.lora.sync {expected.value}: " in caplog.text
    other = "cpu" if device_type == "cuda" else "cuda"
    resumed = resolve_auto(job_spec, other, choices, adapted=replace(adapted, vllm_supports_it=lambda: False)).lora
    assert resumed is not None
    assert resumed.sync is expected


def test_adapters_are_refused_where_they_would_have_no_effect() -> None:
    for engine, adapted, words in (
        (RolloutEngine.HUGGING_FACE, ADAPTED, ("HuggingFace engine", "set Merged")),
        (RolloutEngine.VLLM, LATENT, ("kv_b_proj", "set Merged", "lora.targets without")),
    ):
        with pytest.raises(ConfigurationError) as caught:
            select_lora_sync(
                LoraSync.ADAPTER, engine, "cuda", Dtype.BFLOAT16, adapted.targets, adapted.vllm_supports_it
            )
        assert str(caught.value) == Mentions("spec.training.model.lora.sync", "seen: Adapter", *words)


def test_the_layers_with_adapters_are_those_of_the_model(tmp_path: Path) -> None:
    tiny_models.ARCHITECTURES["deepseek_v3"]().save_pretrained(tmp_path)
    found = adapted_model(lora_spec(), tmp_path)
    assert found is not None
    assert set(found.targets) >= {"kv_b_proj", "o_proj", "down_proj"}
    # The controller's check before Ray starts.
    with pytest.raises(ConfigurationError) as caught:
        check_lora(tmp_path, Lora(sync=LoraSync.ADAPTER))
    assert str(caught.value) == Mentions("spec.training.model.lora.sync", "kv_b_proj", "seen: Adapter", "set Merged")
    check_lora(tmp_path, Lora(sync=LoraSync.ADAPTER, targets=("o_proj",)))
    limited = adapted_model(lora_spec(targets=["o_proj"]), tmp_path)
    assert limited is not None
    assert limited.targets == ("o_proj",)
    assert adapted_model(full_spec(), tmp_path) is None


def test_a_program_answers_whether_vllm_supports_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real program takes nine seconds to load vLLM; `test_vllm_devices.py` runs it where vLLM is loaded."""
    (tmp_path / "answers.py").write_text("import sys; sys.exit(sys.argv[1:] != ['A', 'B'] and int(sys.argv[1]))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(select, "LORA_SUPPORT_PROGRAM", "answers")

    def answer(*architectures: str) -> bool:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
        return vllm_supports_adapters(tmp_path)

    assert answer("A", "B")
    assert not answer(str(select.LACKS_LORA))
    assert caplog.text == ""
    # Without an answer adapters are merged, which works with every model.
    assert not answer("3")
    assert caplog.text == Mentions("exit code 3")
    (tmp_path / "config.json").unlink()
    assert not vllm_supports_adapters(tmp_path)
    assert caplog.text == Mentions("FileNotFoundError", "config.json")


def test_adapters_resume_unchanged() -> None:
    first = resolve_auto(lora_spec(rank=8), "cpu", None, local_model="a", adapted=ADAPTED)
    resumed = resolve_auto(lora_spec(rank=8, dropout=0.1), "cpu", first, local_model="a", adapted=ADAPTED)
    assert resumed.lora == Lora(rank=8, dropout=0.1, sync=LoraSync.MERGED)
    for other, shown in (
        (lora_spec(rank=8, alpha=8), "rank 8, alpha 8, targets all"),
        (lora_spec(rank=8, targets=["v_proj", "q_proj"]), "rank 8, alpha 32, targets q_proj, v_proj"),
        (full_spec(), "unset"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"lora: is {shown}, .*checkpoint .* rank 8, alpha 32, targets all; "
        ):
            refuse_other_adapters(other, first, None, "a")
    whole = resolve_auto(full_spec(), "cpu", None)
    with pytest.raises(ConfigurationError, match=r"is rank 8, alpha 32, targets all, .*checkpoint .* with unset"):
        refuse_other_adapters(lora_spec(rank=8), whole, None, None)


def test_adapters_are_not_resumed_with_another_model() -> None:
    first = resolve_auto(lora_spec(), "cpu", None, local_model="a" * 64, adapted=ADAPTED)
    with pytest.raises(ConfigurationError, match=r"source: is not the base model .* fingerprint bbbbbbbbbbbb, .* aaaa"):
        refuse_other_adapters(lora_spec(), first, None, "b" * 64)
    second = Model(source=HUB, revision="c2")
    first_commit = hub_model_of(Model(source=HUB), Model(source=HUB, revision="c1"))
    at_commit = resolve_auto(lora_spec(), "cpu", None, first_commit, adapted=ADAPTED)
    with pytest.raises(ConfigurationError, match=r"seen: Qwen/Qwen3-0\.6B at commit c2, .* at commit c1\)"):
        refuse_other_adapters(
            lora_spec(),
            at_commit,
            hub_model_of(second, second),
            None,
        )


def test_the_model_of_a_job_is_compared_with_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    job_spec = lora_spec()
    monkeypatch.setenv("RLJOB_SPEC", "{}")
    settings = read_settings()
    found = found_policy(job_spec, settings, None)
    first = resolve_auto(job_spec, "cpu", None, local_model=found.local_model, adapted=ADAPTED)
    assert found_policy(job_spec, settings, first) == found
    with pytest.raises(ConfigurationError, match="is not the base model"):
        found_policy(job_spec, settings, first.model_copy(update={"local_model": "b" * 64}))
