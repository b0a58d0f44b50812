"""Resolves the settings that a job leaves open: `Auto` fields and the commits of models on the Hugging Face hub. The
first start decides; the checkpoint stores the choices, and every resumed run keeps them. Exceptions: every start
decides on gradient checkpointing, and a machine without a compiler does not compile. `engines/rollout/select.py` and
`select_checkpointing` have the rules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.v1alpha1.model import Dtype, GradientCheckpointing, Lora, LoraSync, select_checkpointing
from rljob_api.v1alpha1.recipes import may_need_critic
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.engine_settings import critic_of
from rljob_trainer.controller.hub_models import HubModel, HubRoleModels, at_commits
from rljob_trainer.engines.rollout.select import (
    missing_for_compilation,
    select_compile,
    select_engine,
    select_lora_sync,
)
from rljob_trainer.engines.train.model import ModelSize
from rljob_trainer.errors import ConfigurationError

log = logging.getLogger(__name__)


class Recomputation(NamedTuple):
    """Whether activations are recomputed: `ALWAYS` or `NEVER`. Not in checkpoints, because it changes no result: every
    start decides for its own device."""

    policy: GradientCheckpointing
    critic: GradientCheckpointing
    """Also if the job has no critic."""


@dataclass(frozen=True)
class AdaptedModel:
    """What `select_lora_sync` needs to know about a model with adapters."""

    targets: tuple[str, ...]
    """The last parts of the names of the layers that have adapters."""
    vllm_supports_it: Callable[[], bool]
    """Whether vLLM can run this model with adapters. The call may take a minute."""


class AutoSettings(WireModel):
    """The resolved settings: the value in the job, or the value that was chosen for `Auto`."""

    dtype: Dtype
    rollout_engine: RolloutEngine
    rollout_compile: Compile
    """`ALWAYS` or `NEVER`; `NEVER` for all engines except vLLM."""
    hub_model: HubModel | None = None
    """The policy's initial model if it is on the hub: source of the reference weights and the tokenizer. None for a
    local model."""
    hub_role_models: HubRoleModels = Field(default_factory=HubRoleModels)
    local_model: str | None = None
    """Fingerprint of a local model (`models.source.fingerprint`); None for a model on the hub."""
    lora: Lora | None = None
    """The adapters that are trained, with a `sync` that is not `AUTO`; None without adapters."""


def resolve_auto(
    spec: RLJobSpec,
    device_type: str,
    saved: AutoSettings | None,
    hub_model: HubModel | None = None,
    local_model: str | None = None,
    *,
    adapted: AdaptedModel | None = None,
) -> AutoSettings:
    """Resolves the settings of this start.

    `saved`: the choices in the checkpoint that the run resumes from. `hub_model`: the job's model if it is on the hub;
    `local_model`: the fingerprint of a local model. `adapted` is needed if the job trains adapters.

    Raises ConfigurationError if the rollout engine is not installed, cannot compile, or does not support the adapters
    or tensor parallelism."""
    dtype = spec.training.model.dtype
    if dtype is Dtype.AUTO:
        chosen = Dtype.BFLOAT16 if device_type == "cuda" else Dtype.FLOAT32
        dtype = saved.dtype if saved else chosen
    elif saved and dtype is not saved.dtype:
        log.warning("spec.training.model.dtype is %s, but the checkpoint was trained in %s", dtype, saved.dtype)
    engine = selected_engine(spec, saved)
    lora = _resolved_lora(spec, engine, device_type, dtype, saved, adapted)
    saved_model = saved.hub_model if saved else None
    if saved_model and (hub_model is None or hub_model.revision != saved_model.revision):
        log.warning(
            "spec.training.model is %s, but the run of the checkpoint started from %s at commit %s: reference model "
            "and tokenizer may differ",
            f"{hub_model.source} at commit {hub_model.revision}" if hub_model else spec.training.model.source,
            saved_model.source,
            saved_model.revision,
        )
    if saved and saved.local_model and saved.local_model != local_model:
        log.warning(
            "spec.training.model.source: %s is not the model that the run of the checkpoint started from: reference "
            "model and tokenizer may differ",
            spec.training.model.source,
        )
    return AutoSettings(
        dtype=dtype,
        rollout_engine=engine,
        rollout_compile=_resolved_compile(spec, engine, device_type, saved),
        hub_model=hub_model,
        local_model=local_model,
        lora=lora,
    )


def requested_engine(spec: RLJobSpec, saved: AutoSettings | None) -> RolloutEngine:
    """Returns the engine that the job names. For `Auto` returns the engine that the checkpoint stores, or `Auto` if
    there is no checkpoint."""
    engine = spec.training.rollout.engine
    return saved.rollout_engine if saved and engine is RolloutEngine.AUTO else engine


def selected_engine(spec: RLJobSpec, saved: AutoSettings | None) -> RolloutEngine:
    """Returns `VLLM` or `HuggingFace`. Raises ConfigurationError if the engine is not installed, or if `Auto` selects
    HuggingFace although the job sets tensorParallel."""
    engine, tensor_parallel = select_engine(requested_engine(spec, saved)), spec.roles.rollout.tensor_parallel
    if engine is RolloutEngine.HUGGING_FACE and tensor_parallel > 1:
        reason = "the run started with it" if saved else "vLLM is not installed"
        raise ConfigurationError(
            "spec.roles.rollout.tensorParallel: the HuggingFace engine does not support tensor parallelism, and "
            f"training.rollout.engine: Auto has selected it because {reason} (seen: {tensor_parallel}); set "
            "tensorParallel: 1, or install the trainer's `cpu` or `gpu` extra and set engine: VLLM"
        )
    return engine


def _resolved_compile(spec: RLJobSpec, engine: RolloutEngine, device_type: str, saved: AutoSettings | None) -> Compile:
    """Returns `ALWAYS` or `NEVER`. Raises ConfigurationError if the engine or this machine cannot compile."""
    wanted = spec.training.rollout.compile
    if wanted is not Compile.AUTO or saved is None or saved.rollout_engine is not engine:
        return select_compile(wanted, engine, device_type, spec.training.steps)
    if saved.rollout_compile is Compile.ALWAYS and device_type == "cpu" and (missing := missing_for_compilation()):
        log.warning(
            "spec.training.rollout.compile: the run started with compilation; it continues without, because %s is "
            "missing",
            missing,
        )
        return Compile.NEVER
    return saved.rollout_compile


def resolved_recomputation(spec: RLJobSpec, device_type: str, *, policy: ModelSize, critic: ModelSize) -> Recomputation:
    """Resolves `gradientCheckpointing` of policy and critic."""
    model, is_cpu = spec.training.model, device_type == "cpu"
    nth = model.gradient_checkpointing_every_nth_layer
    of_critic = critic_of(spec).model.gradient_checkpointing
    return Recomputation(
        select_checkpointing(
            model.gradient_checkpointing,
            policy.num_parameters,
            nth,
            is_cpu=is_cpu,
            is_supported=policy.can_recompute,
        ),
        select_checkpointing(of_critic, critic.num_parameters, is_cpu=is_cpu, is_supported=critic.can_recompute),
    )


def _resolved_lora(
    spec: RLJobSpec,
    engine: RolloutEngine,
    device_type: str,
    dtype: Dtype,
    saved: AutoSettings | None,
    adapted: AdaptedModel | None,
) -> Lora | None:
    """Returns the job's adapters with a resolved `sync`; None without adapters. Raises ConfigurationError if the engine
    does not support them."""
    lora = spec.training.model.lora
    if lora is None:
        return None
    assert adapted is not None
    before = saved.lora if saved and saved.rollout_engine is engine and lora.sync is LoraSync.AUTO else None
    wanted = before.sync if before else lora.sync
    sync, reason = select_lora_sync(wanted, engine, device_type, dtype, adapted.targets, adapted.vllm_supports_it)
    reason = "as at the start of the run" if before else reason
    how = "only the adapters" if sync is LoraSync.ADAPTER else "the merged model"
    log.info("lora: the rollout engine gets %s (model.lora.sync %s: %s)", how, sync.value, reason)
    return lora.model_copy(update={"sync": sync})


def refuse_other_adapters(
    spec: RLJobSpec, saved: AutoSettings | None, hub_model: HubModel | None, local_model: str | None
) -> None:
    """Raises ConfigurationError if the adapters of the checkpoint do not match the job: another rank, alpha or targets
    (the dropout may change), or another base model. For the arguments see `resolve_auto`."""
    if saved is None:
        return
    wanted = spec.training.model.lora
    shown = [_adapters_shown(each) for each in (wanted, saved.lora)]
    if shown[0] != shown[1]:
        raise ConfigurationError(
            f"spec.training.model.lora: is {shown[0]}, but the checkpoint was trained with {shown[1]}; use the "
            "checkpoint's settings, or start a new run in another folder"
        )
    if wanted:
        _refuse_other_base(saved, hub_model, local_model)


def _adapters_shown(lora: Lora | None) -> str:
    if lora is None:
        return "unset"
    targets = "all" if lora.targets is None else ", ".join(sorted(lora.targets))
    return f"rank {lora.rank}, alpha {lora.alpha:g}, targets {targets}"


def _refuse_other_base(saved: AutoSettings, hub_model: HubModel | None, local_model: str | None) -> None:
    """Raises ConfigurationError if the base model differs: the checkpoint contains only the adapters, which are useless
    with other base weights."""
    commits = [each.revision if each else None for each in (hub_model, saved.hub_model)]
    if commits[0] != commits[1] or local_model != saved.local_model:
        raise ConfigurationError(
            "spec.training.model.source: is not the base model of the checkpoint's adapters (seen: "
            f"{_model_shown(hub_model, local_model)}, the checkpoint has "
            f"{_model_shown(saved.hub_model, saved.local_model)}); use the checkpoint's model, or start a new run "
            "in another folder"
        )


def _model_shown(hub_model: HubModel | None, local_model: str | None) -> str:
    if hub_model:
        return f"{hub_model.source} at commit {hub_model.revision}"
    return f"a local model with fingerprint {(local_model or 'unknown')[:12]}"


def resolved_spec(spec: RLJobSpec, choices: AutoSettings, recomputation: Recomputation) -> RLJobSpec:
    """Returns the spec with the resolved settings instead of `Auto`."""
    training = spec.training
    model = training.model.model_copy(
        update={
            "dtype": choices.dtype,
            "lora": choices.lora,
            "gradient_checkpointing": recomputation.policy,
        }
    )
    rollout = training.rollout.model_copy(update={"engine": choices.rollout_engine, "compile": choices.rollout_compile})
    updates: dict[str, WireModel] = {"model": model, "rollout": rollout}
    if may_need_critic(training.algorithm):
        critic = critic_of(spec)
        of_critic = critic.model.model_copy(update={"gradient_checkpointing": recomputation.critic})
        updates["critic"] = critic.model_copy(update={"model": of_critic})
    spec = spec.model_copy(update={"training": training.model_copy(update=updates)})
    return at_commits(spec, choices.hub_model, choices.hub_role_models)
