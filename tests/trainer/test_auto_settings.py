"""How `Auto` is resolved, and that the choice is kept."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from transformers import AutoModelForCausalLM, GPTNeoXJapaneseConfig

from rljob_api.constants import ExitCode
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import AUTO_CHECKPOINTING_PARAMETERS, Dtype, GradientCheckpointing, Model
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.jobs.valid_job import edited
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.__main__ import exit_code_of
from rljob_trainer.controller.auto_settings import (
    AutoSettings,
    Recomputation,
    resolve_auto,
    resolved_recomputation,
    resolved_spec,
    selected_engine,
)
from rljob_trainer.controller.build_run import found_policy, model_sizes
from rljob_trainer.controller.engine_settings import actor_engine, critic_engine, reference_engine, reward_model_engine
from rljob_trainer.controller.hub_models import at_saved_commit, hub_model_of
from rljob_trainer.controller.model_roles import Models
from rljob_trainer.engines.rollout.select import MIN_STEPS_TO_COMPILE, check_build
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.model import ModelSize
from rljob_trainer.errors import ConfigurationError, TrainerError
from rljob_trainer.models.source import ModelLocation
from rljob_trainer.settings import read_settings

NOT_RECOMPUTED = Recomputation(GradientCheckpointing.NEVER, GradientCheckpointing.NEVER)


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
    assert resolved_spec(job_spec, choices, NOT_RECOMPUTED).training.rollout.compile is expected


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
    assert resolved_spec(job_spec, choices, NOT_RECOMPUTED).training.model.dtype is expected
    assert AutoSettings.from_wire(choices.to_wire()) == choices
    warning = f"spec.training.model.dtype is {expected}, but the checkpoint was trained in {before}"
    assert (warning in caplog.text) is (before not in {None, expected})


def checkpointing_spec(policy: str, critic: str = "Auto", every_nth_layer: int = 1) -> RLJobSpec:
    model: dict[str, JsonValue] = {"gradientCheckpointing": policy}
    if every_nth_layer > 1:
        model["gradientCheckpointingEveryNthLayer"] = every_nth_layer
    job = training_runs.small_job(
        model=model,
        critic={"model": {"gradientCheckpointing": critic}},
        algorithm={"type": "PPO"},
        rollout={"compile": "Never"},
    )
    return RLJob.from_wire(job).spec


LARGE, SMALL = ModelSize(AUTO_CHECKPOINTING_PARAMETERS, True), ModelSize(AUTO_CHECKPOINTING_PARAMETERS - 1, True)
UNSUPPORTED = ModelSize(AUTO_CHECKPOINTING_PARAMETERS, False)
ALWAYS, NEVER = GradientCheckpointing.ALWAYS, GradientCheckpointing.NEVER
LAYOUT = ParallelLayout.of(1)


@pytest.mark.parametrize(
    ("job_spec", "device_type", "sizes", "expected"),
    [
        (checkpointing_spec("Auto"), "cuda", (LARGE, SMALL), (ALWAYS, NEVER)),
        (checkpointing_spec("Auto"), "cuda", (SMALL, LARGE), (NEVER, ALWAYS)),
        (checkpointing_spec("Auto"), "cuda", (UNSUPPORTED, UNSUPPORTED), (NEVER, NEVER)),
        (checkpointing_spec("Auto"), "cpu", (LARGE, LARGE), (NEVER, NEVER)),
        (checkpointing_spec("Auto", every_nth_layer=2), "cuda", (LARGE, LARGE), (ALWAYS, ALWAYS)),
        (checkpointing_spec("Auto", every_nth_layer=2), "cuda", (SMALL, SMALL), (ALWAYS, NEVER)),
        (checkpointing_spec("Auto", every_nth_layer=2), "cpu", (LARGE, LARGE), (ALWAYS, NEVER)),
        # The engine refuses such a model, with the name of the field.
        (checkpointing_spec("Auto", every_nth_layer=2), "cuda", (UNSUPPORTED, LARGE), (ALWAYS, ALWAYS)),
        (checkpointing_spec("Always", "Never"), "cuda", (SMALL, LARGE), (ALWAYS, NEVER)),
        (checkpointing_spec("Always", "Always"), "cpu", (SMALL, SMALL), (ALWAYS, ALWAYS)),
    ],
)
def test_activations_of_large_models_are_recomputed_on_gpus(
    job_spec: RLJobSpec,
    device_type: str,
    sizes: tuple[ModelSize, ModelSize],
    expected: tuple[GradientCheckpointing, GradientCheckpointing],
) -> None:
    policy, critic = sizes
    found = resolved_recomputation(job_spec, device_type, policy=policy, critic=critic)
    assert found == expected
    resolved = resolved_spec(job_spec, resolve_auto(job_spec, device_type, None), found)
    # `rljob plan --from-run` reads the resolved job.
    assert RLJob.from_wire(training_runs.small_job() | {"spec": resolved.to_wire()}).spec == resolved
    engines = [each(resolved, torch.float32, LAYOUT) for each in (actor_engine, critic_engine)]
    assert tuple(each.gradient_checkpointing for each in engines) == tuple(each is ALWAYS for each in expected)
    nth = job_spec.training.model.gradient_checkpointing_every_nth_layer
    assert [each.gradient_checkpointing_every_nth_layer for each in engines] == [nth, 1]


def test_frozen_models_recompute_nothing() -> None:
    rewards: JsonValue = [{"name": "taste", "type": "RewardModel", "rewardModel": {"source": "them/judge"}}]
    model: JsonValue = {"gradientCheckpointing": "Always", "gradientCheckpointingEveryNthLayer": 2}
    job_spec = RLJob.from_wire(training_runs.small_job(model=model, rewards=rewards)).spec
    for engine in (reference_engine, reward_model_engine):
        found = engine(job_spec, torch.float32, LAYOUT)
        assert (found.gradient_checkpointing, found.gradient_checkpointing_every_nth_layer) == (False, 1)


def test_the_sizes_of_policy_and_critic_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_SPEC", "{}")
    policy = found_policy(checkpointing_spec("Auto"), read_settings(), None)
    size = ModelSize(AutoModelForCausalLM.from_pretrained(tiny_models.QUICKSTART_MODEL).num_parameters(), True)
    assert model_sizes(policy, Models(policy.location)) == (size, size)
    config = GPTNeoXJapaneseConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    critic = AutoModelForCausalLM.from_config(config)
    critic.save_pretrained(tmp_path)
    own = Models(policy.location, ModelLocation(Model(source=str(tmp_path)), tmp_path, tmp_path))
    assert model_sizes(policy, own) == (size, ModelSize(critic.num_parameters(), False))


def hub_model(revision: str | None, source: str = "Qwen/Qwen3-0.6B") -> Model:
    return Model(source=source, revision=revision)


def test_a_model_of_the_hub_stays_at_its_first_commit(caplog: pytest.LogCaptureFixture) -> None:
    for job_spec in (hub_model(None), hub_model("main")):
        assert at_saved_commit(job_spec, None) == job_spec
        first = resolve_auto(spec("Never"), "cpu", None, hub_model_of(job_spec, hub_model("c1")))
        # The branch has moved since.
        assert at_saved_commit(job_spec, first.hub_model) == hub_model("c1")
        assert resolve_auto(spec("Never"), "cpu", first, hub_model_of(job_spec, hub_model("c1"))) == first
        assert resolved_spec(spec("Never"), first, NOT_RECOMPUTED).training.model.revision == "c1"
        # The model that the job names now is used, and another repository has other commits.
        assert at_saved_commit(hub_model("c2"), first.hub_model) == hub_model("c2")
        assert at_saved_commit(hub_model(None, "Qwen/Qwen3-8B"), first.hub_model) == hub_model(None, "Qwen/Qwen3-8B")
    assert caplog.text == ""
    resolve_auto(spec("Never"), "cpu", first, hub_model_of(hub_model("c2"), hub_model("c2")))
    assert "spec.training.model is Qwen/Qwen3-0.6B at commit c2, " in caplog.text
    assert "started from Qwen/Qwen3-0.6B at commit c1" in caplog.text
    assert resolve_auto(spec("Never"), "cpu", first).hub_model is None
    choices = resolve_auto(spec("Never"), "cpu", None)
    assert resolved_spec(spec("Never"), choices, NOT_RECOMPUTED).training.model.revision is None


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
