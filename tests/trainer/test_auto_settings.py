"""How `Auto` is resolved, and that the choice is kept."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from transformers import AutoModelForCausalLM

from rljob_api.constants import ExitCode
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import AUTO_CHECKPOINTING_PARAMETERS, Dtype, GradientCheckpointing, Lora, LoraSync, Model
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.jobs.valid_job import edited
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.__main__ import exit_code_of
from rljob_trainer.controller.auto_settings import (
    UNKNOWN_PARAMETERS,
    AutoSettings,
    NumParameters,
    needs_num_parameters,
    refuse_other_adapters,
    resolve_auto,
    resolved_spec,
    selected_engine,
)
from rljob_trainer.controller.build_run import counted_parameters, found_policy
from rljob_trainer.controller.engine_settings import actor_engine, critic_engine
from rljob_trainer.controller.hub_models import at_saved_commit, hub_model_of
from rljob_trainer.controller.model_roles import Models
from rljob_trainer.engines.rollout.select import MIN_STEPS_TO_COMPILE, check_build, select_lora_sync
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.errors import ConfigurationError, TrainerError
from rljob_trainer.models.source import ModelLocation
from rljob_trainer.settings import read_settings


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that looks like a C++ compiler, on a machine with Python's header files."""
    program = tmp_path / "c++"
    program.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    return program


def spec(wanted: str = "Auto", engine: str = "VLLM", steps: int = MIN_STEPS_TO_COMPILE) -> RLJobSpec:
    return RLJob.from_wire(training_runs.small_job(rollout={"engine": engine, "compile": wanted}, steps=steps)).spec


def kept(compiles: Compile, engine: RolloutEngine = RolloutEngine.VLLM) -> AutoSettings:
    return AutoSettings(dtype=Dtype.FLOAT32, rollout_engine=engine, rollout_compile=compiles)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without vLLM."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "vllm" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def spread_spec(tensor_parallel: int, engine: str = "Auto") -> RLJobSpec:
    """The spec of a job with two devices."""
    return RLJob.from_wire(
        edited(
            training_runs.small_job(num_workers=2, rollout={"engine": engine}),
            {"spec.roles.rollout.tensorParallel": tensor_parallel},
        )
    ).spec


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.usefixtures("no_vllm")
def test_tensor_parallelism_is_rejected_if_auto_selects_an_engine_without_it(is_kept: bool) -> None:
    before = kept(Compile.NEVER, RolloutEngine.HUGGING_FACE) if is_kept else None
    assert selected_engine(spread_spec(1), before) is RolloutEngine.HUGGING_FACE
    with pytest.raises(ConfigurationError) as caught:
        selected_engine(spread_spec(2), before)
    assert str(caught.value).startswith("spec.roles.rollout.tensorParallel: the HuggingFace engine ")
    assert ("the run started with it" if is_kept else "vLLM is not installed") in str(caught.value)
    assert "(seen: 2); set tensorParallel: 1" in str(caught.value)


def test_tensor_parallelism_is_accepted_with_vllm() -> None:
    assert selected_engine(spread_spec(2, "VLLM"), None) is RolloutEngine.VLLM


@pytest.mark.parametrize(
    ("job_spec", "device_type", "expected"),
    [
        (spec(), "cpu", Compile.ALWAYS),
        (spec(steps=MIN_STEPS_TO_COMPILE - 1), "cpu", Compile.NEVER),
        (spec(steps=1), "cuda", Compile.ALWAYS),
        (spec("Never"), "cpu", Compile.NEVER),
        (spec("Never"), "cuda", Compile.NEVER),
        (spec("Always", steps=1), "cpu", Compile.ALWAYS),
        (spec(engine="HuggingFace"), "cuda", Compile.NEVER),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_compilation_is_chosen_only_where_it_pays(job_spec: RLJobSpec, device_type: str, expected: Compile) -> None:
    choices = resolve_auto(job_spec, device_type, None)
    assert choices.rollout_compile is expected
    assert resolved_spec(job_spec, choices).training.rollout.compile is expected


@pytest.mark.parametrize(
    ("wanted", "steps", "before", "device_type", "expected"),
    [
        ("Auto", MIN_STEPS_TO_COMPILE, Compile.NEVER, "cpu", Compile.NEVER),
        ("Auto", 1, Compile.ALWAYS, "cpu", Compile.ALWAYS),
        ("Never", 1, Compile.ALWAYS, "cpu", Compile.NEVER),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_a_resumed_run_keeps_the_choices(
    wanted: str, steps: int, before: Compile, device_type: str, expected: Compile
) -> None:
    assert resolve_auto(spec(wanted, steps=steps), device_type, kept(before)).rollout_compile is expected


@pytest.mark.usefixtures("compiler")
def test_another_engine_is_chosen_for_anew() -> None:
    to_vllm = resolve_auto(spec(steps=1), "cuda", kept(Compile.NEVER, RolloutEngine.HUGGING_FACE))
    assert to_vllm.rollout_compile is Compile.ALWAYS
    from_vllm = resolve_auto(spec(engine="HuggingFace"), "cuda", kept(Compile.ALWAYS))
    assert from_vllm.rollout_compile is Compile.NEVER


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_without_a_compiler_vllm_does_not_compile(
    missing: str, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (compiler if missing == "compiler" else compiler.with_name("Python.h")).unlink()
    assert resolve_auto(spec(), "cpu", None).rollout_compile is Compile.NEVER
    assert resolve_auto(spec(), "cuda", None).rollout_compile is Compile.ALWAYS
    assert resolve_auto(spec(), "cpu", kept(Compile.ALWAYS)).rollout_compile is Compile.NEVER
    assert "spec.training.rollout.compile: " in caplog.text
    assert "continues without" in caplog.text
    with pytest.raises(ConfigurationError, match=r"rollout\.compile: compilation on CPUs .*\(seen: Always\)"):
        resolve_auto(spec("Always"), "cpu", None)


@pytest.mark.parametrize(
    ("found", "device_type", "expected"),
    [
        ("", "cpu", "(cpu; vLLM finds no device that it was built for); install the trainer's `cpu` extra"),
        ("cpu", "cuda", "(cuda; vLLM finds cpu); install the trainer's `gpu` extra"),
        ("", "cuda", "(cuda; vLLM finds no device that it was built for); install the trainer's `gpu` extra"),
    ],
)
def test_another_build_of_vllm_is_a_configuration_error(found: str, device_type: str, expected: str) -> None:
    """A GPU build of vLLM on a machine without a GPU finds no device, and its own error only says that a string is
    empty."""
    with pytest.raises(TrainerError) as caught:
        check_build(found, device_type)
    assert str(caught.value).startswith("spec.training.rollout.engine: the installed vLLM ")
    assert expected in str(caught.value)
    assert exit_code_of(caught.value) is ExitCode.CONFIGURATION


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_build_of_vllm_for_the_device_is_accepted(device_type: str) -> None:
    check_build(device_type, device_type)


def dtype_spec(dtype: str) -> RLJobSpec:
    return RLJob.from_wire(training_runs.small_job(model={"dtype": dtype}, rollout={"compile": "Never"})).spec


@pytest.mark.parametrize(
    ("wanted", "device_type", "before", "expected"),
    [
        ("Auto", "cuda", None, Dtype.BFLOAT16),
        ("Auto", "cpu", None, Dtype.FLOAT32),
        # The resumed run has moved to another kind of device.
        ("Auto", "cpu", Dtype.BFLOAT16, Dtype.BFLOAT16),
        ("Auto", "cuda", Dtype.FLOAT32, Dtype.FLOAT32),
        ("Float32", "cuda", None, Dtype.FLOAT32),
        ("BFloat16", "cpu", Dtype.BFLOAT16, Dtype.BFLOAT16),
        ("Float32", "cpu", Dtype.BFLOAT16, Dtype.FLOAT32),
    ],
)
def test_the_resolved_dtype_is_kept(
    wanted: str, device_type: str, before: Dtype | None, expected: Dtype, caplog: pytest.LogCaptureFixture
) -> None:
    job_spec = dtype_spec(wanted)
    first = None if before is None else resolve_auto(dtype_spec(before.value), device_type, None)
    choices = resolve_auto(job_spec, device_type, first)
    assert choices.dtype is expected
    assert resolved_spec(job_spec, choices).training.model.dtype is expected
    assert AutoSettings.from_wire(choices.to_wire()) == choices
    warning = f"spec.training.model.dtype is {expected}, but the checkpoint was trained in {before}"
    assert (warning in caplog.text) is (before not in {None, expected})


def checkpointing_spec(policy: str, critic: str) -> RLJobSpec:
    job = training_runs.small_job(
        model={"gradientCheckpointing": policy},
        critic={"model": {"gradientCheckpointing": critic}},
        algorithm={"type": "PPO"},
        rollout={"compile": "Never"},
    )
    return RLJob.from_wire(job).spec


LARGE, SMALL = AUTO_CHECKPOINTING_PARAMETERS, AUTO_CHECKPOINTING_PARAMETERS - 1
ALWAYS, NEVER = GradientCheckpointing.ALWAYS, GradientCheckpointing.NEVER


@pytest.mark.parametrize(
    ("policy", "critic", "device_type", "sizes", "expected"),
    [
        ("Auto", "Auto", "cuda", NumParameters(LARGE, SMALL), (ALWAYS, NEVER)),
        ("Auto", "Auto", "cuda", NumParameters(SMALL, LARGE), (NEVER, ALWAYS)),
        ("Auto", "Auto", "cpu", NumParameters(LARGE, LARGE), (NEVER, NEVER)),
        ("Always", "Never", "cuda", NumParameters(SMALL, LARGE), (ALWAYS, NEVER)),
        ("Always", "Always", "cpu", NumParameters(SMALL, SMALL), (ALWAYS, ALWAYS)),
    ],
)
def test_activations_of_large_models_are_recomputed_on_gpus(
    policy: str, critic: str, device_type: str, sizes: NumParameters, expected: tuple[GradientCheckpointing, ...]
) -> None:
    job_spec = checkpointing_spec(policy, critic)
    choices = resolve_auto(job_spec, device_type, None, num_parameters=sizes)
    assert AutoSettings.from_wire(choices.to_wire()) == choices
    resolved = resolved_spec(job_spec, choices)
    layout = ParallelLayout.of(1)
    engines = [each(resolved, torch.float32, layout) for each in (actor_engine, critic_engine)]
    assert tuple(each.gradient_checkpointing for each in engines) == tuple(each is ALWAYS for each in expected)
    # The resumed run keeps the choices on another device, and applies what the job says.
    resumed = resolve_auto(checkpointing_spec("Auto", "Auto"), "cpu", choices)
    assert (resumed.gradient_checkpointing, resumed.critic_gradient_checkpointing) == expected
    changed = resolve_auto(checkpointing_spec("Never", "Always"), "cuda", choices)
    assert (changed.gradient_checkpointing, changed.critic_gradient_checkpointing) == (NEVER, ALWAYS)


def test_the_parameters_of_policy_and_critic_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_SPEC", "{}")
    job_spec = checkpointing_spec("Auto", "Auto")
    policy = found_policy(job_spec, read_settings(), None)
    model = AutoModelForCausalLM.from_pretrained(tiny_models.QUICKSTART_MODEL)
    size = model.num_parameters()
    assert counted_parameters(job_spec, policy, Models(policy.location), "cuda") == NumParameters(size, size)
    assert counted_parameters(job_spec, policy, Models(policy.location), "cpu") == UNKNOWN_PARAMETERS
    critic = tiny_models.save("qwen3", tmp_path / "critic")
    own = Models(policy.location, ModelLocation(Model(source=str(critic)), tmp_path, tmp_path))
    expected = AutoModelForCausalLM.from_pretrained(critic).num_parameters()
    assert counted_parameters(job_spec, policy, own, "cuda") == NumParameters(size, expected)


def test_models_are_counted_only_where_auto_needs_it() -> None:
    for choices in (("Auto", "Never"), ("Never", "Auto")):
        assert needs_num_parameters(checkpointing_spec(*choices), "cuda")
        assert not needs_num_parameters(checkpointing_spec(*choices), "cpu")
    assert not needs_num_parameters(checkpointing_spec("Always", "Never"), "cuda")


def hub_model(revision: str | None, source: str = "Qwen/Qwen3-0.6B") -> Model:
    return Model(source=source, revision=revision)


def test_a_model_of_the_hub_stays_at_its_first_commit(caplog: pytest.LogCaptureFixture) -> None:
    for job_spec in (hub_model(None), hub_model("main")):
        assert at_saved_commit(job_spec, None) == job_spec
        first = resolve_auto(spec("Never"), "cpu", None, hub_model_of(job_spec, hub_model("c1")))
        # The branch has moved since.
        assert at_saved_commit(job_spec, first.hub_model) == hub_model("c1")
        assert resolve_auto(spec("Never"), "cpu", first, hub_model_of(job_spec, hub_model("c1"))) == first
        assert resolved_spec(spec("Never"), first).training.model.revision == "c1"
        # The model that the job names now is used, and another repository has other commits.
        assert at_saved_commit(hub_model("c2"), first.hub_model) == hub_model("c2")
        assert at_saved_commit(hub_model(None, "Qwen/Qwen3-8B"), first.hub_model) == hub_model(None, "Qwen/Qwen3-8B")
    assert caplog.text == ""
    resolve_auto(spec("Never"), "cpu", first, hub_model_of(hub_model("c2"), hub_model("c2")))
    assert "spec.training.model is Qwen/Qwen3-0.6B at commit c2, " in caplog.text
    assert "started from Qwen/Qwen3-0.6B at commit c1" in caplog.text
    assert resolve_auto(spec("Never"), "cpu", first).hub_model is None
    assert resolved_spec(spec("Never"), resolve_auto(spec("Never"), "cpu", None)).training.model.revision is None


def test_another_local_model_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    first = resolve_auto(spec("Never"), "cpu", None, local_model="a")
    assert resolve_auto(spec("Never"), "cpu", first, local_model="a") == first
    assert caplog.text == ""
    resolve_auto(spec("Never"), "cpu", first, local_model="b")
    assert "is not the model that the run of the checkpoint started from" in caplog.text


def test_the_transformers_engine_does_not_compile() -> None:
    with pytest.raises(
        ConfigurationError, match=r"rollout\.compile: only vLLM compiles.* HuggingFace \(seen: Always\)"
    ):
        resolve_auto(spec("Always", "HuggingFace"), "cpu", None)


def lora_spec(sync: str = "Auto", engine: str = "VLLM", **lora: JsonValue) -> RLJobSpec:
    job = training_runs.small_job(
        rollout={"engine": engine, "compile": "Never"}, model={"lora": {"sync": sync, **lora}}
    )
    return RLJob.from_wire(job).spec


@pytest.mark.parametrize(
    ("sync", "engine", "device_type", "dtype", "expected"),
    [
        ("Auto", "VLLM", "cuda", "Auto", LoraSync.ADAPTER),
        ("Auto", "VLLM", "cuda", "Float32", LoraSync.ADAPTER),
        ("Auto", "VLLM", "cpu", "Auto", LoraSync.MERGED),
        ("Auto", "VLLM", "cpu", "BFloat16", LoraSync.ADAPTER),
        ("Auto", "HuggingFace", "cuda", "Auto", LoraSync.MERGED),
        ("Auto", "HuggingFace", "cpu", "BFloat16", LoraSync.MERGED),
        ("Adapter", "VLLM", "cpu", "Float32", LoraSync.ADAPTER),
        ("Merged", "VLLM", "cuda", "Auto", LoraSync.MERGED),
        ("Merged", "VLLM", "cpu", "BFloat16", LoraSync.MERGED),
    ],
)
def test_adapters_reach_the_engine_in_the_fitting_way(
    sync: str, engine: str, device_type: str, dtype: str, expected: LoraSync, caplog: pytest.LogCaptureFixture
) -> None:
    job_spec = lora_spec(sync, engine)
    model = job_spec.training.model.model_copy(update={"dtype": Dtype(dtype)})
    job_spec = job_spec.model_copy(update={"training": job_spec.training.model_copy(update={"model": model})})
    with caplog.at_level("INFO"):
        choices = resolve_auto(job_spec, device_type, None)
    assert choices.lora is not None
    assert choices.lora.sync is expected
    assert resolved_spec(job_spec, choices).training.model.lora == choices.lora
    assert f"(model.lora.sync {expected.value}: " in caplog.text
    other = "cpu" if device_type == "cuda" else "cuda"
    resumed = resolve_auto(job_spec, other, choices).lora
    assert resumed is not None
    assert resumed.sync is expected


def test_an_engine_without_adapter_support_cannot_get_adapters() -> None:
    with pytest.raises(ConfigurationError, match=r"lora\.sync: the HuggingFace engine .*\(seen: Adapter\)"):
        select_lora_sync(LoraSync.ADAPTER, RolloutEngine.HUGGING_FACE, "cuda", Dtype.BFLOAT16)


def test_adapters_resume_unchanged() -> None:
    first = resolve_auto(lora_spec(rank=8), "cpu", None, local_model="a")
    assert resolve_auto(lora_spec(rank=8, dropout=0.1), "cpu", first, local_model="a").lora == Lora(
        rank=8, dropout=0.1, sync=LoraSync.MERGED
    )
    for other, shown in (
        (lora_spec(rank=8, alpha=8), "rank 8, alpha 8, targets all"),
        (lora_spec(rank=8, targets=["v_proj", "q_proj"]), "rank 8, alpha 32, targets q_proj, v_proj"),
        (spec("Never"), "unset"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"lora: is {shown}, .*checkpoint .* rank 8, alpha 32, targets all; "
        ):
            refuse_other_adapters(other, first, None, "a")
    whole = resolve_auto(spec("Never"), "cpu", None)
    with pytest.raises(ConfigurationError, match=r"is rank 8, alpha 32, targets all, .*checkpoint .* with unset"):
        refuse_other_adapters(lora_spec(rank=8), whole, None, None)


def test_adapters_are_not_resumed_with_another_model() -> None:
    first = resolve_auto(lora_spec(), "cpu", None, local_model="a" * 64)
    with pytest.raises(ConfigurationError, match=r"source: is not the base model .* fingerprint bbbbbbbbbbbb, .* aaaa"):
        refuse_other_adapters(lora_spec(), first, None, "b" * 64)
    at_commit = resolve_auto(lora_spec(), "cpu", None, hub_model_of(hub_model(None), hub_model("c1")))
    with pytest.raises(ConfigurationError, match=r"seen: Qwen/Qwen3-0\.6B at commit c2, .* at commit c1\)"):
        refuse_other_adapters(lora_spec(), at_commit, hub_model_of(hub_model("c2"), hub_model("c2")), None)


def test_the_model_of_a_job_is_compared_with_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    job_spec = lora_spec()
    monkeypatch.setenv("RLJOB_SPEC", "{}")
    settings = read_settings()
    found = found_policy(job_spec, settings, None)
    first = resolve_auto(job_spec, "cpu", None, local_model=found.local_model)
    assert found_policy(job_spec, settings, first) == found
    with pytest.raises(ConfigurationError, match="is not the base model"):
        found_policy(job_spec, settings, first.model_copy(update={"local_model": "b" * 64}))
