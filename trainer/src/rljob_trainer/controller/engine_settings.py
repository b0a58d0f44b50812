"""Derives the settings of the train engines from a job, one function per role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rljob_api.v1alpha1.model import Critic, GradientCheckpointing, HeadDtype, Kernels
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.engines.train.output_head import Head
from rljob_trainer.engines.train.settings import TrainEngineSettings


def reference_engine(spec: RLJobSpec, dtype: torch.dtype, layout: ParallelLayout) -> TrainEngineSettings:
    """Returns the settings of the frozen reference model. Each worker fills in its own folder and device."""
    training = spec.training
    # The kernels of the policy may not support the architecture of another model.
    has_own_model = spec.roles.ref.model is not None
    return TrainEngineSettings(
        model_folder=Path(),
        device=torch.device("cpu"),
        compute_dtype=dtype,
        gradient_checkpointing=False,
        max_tokens_per_micro_batch=training.max_tokens_per_micro_batch,
        optimizer=None,
        layout=layout,
        has_float32_head=training.model.head_dtype is HeadDtype.FLOAT32,
        kernels=Kernels.PLAIN if has_own_model else training.model.kernels,
        offload=OffloadSettings(parameters=training.model.offload.reference),
        role="reference",
        offload_field="spec.training.model.offload.reference",
    )


def actor_engine(spec: RLJobSpec, dtype: torch.dtype, layout: ParallelLayout) -> TrainEngineSettings:
    """Returns the settings of the trained policy. Settings that are not named here are those of the reference. In a job
    that only evaluates, the policy is frozen: it has no optimizer."""
    model = spec.training.model
    lora, offload = model.lora, model.offload
    return replace(
        reference_engine(spec, dtype, layout),
        gradient_checkpointing=model.gradient_checkpointing is GradientCheckpointing.ALWAYS,
        gradient_checkpointing_every_nth_layer=model.gradient_checkpointing_every_nth_layer,
        optimizer=spec.training.optimizer if spec.training.steps > 0 else None,
        kernels=model.kernels,
        offload=OffloadSettings(offload.parameters, offload.gradients, offload.optimizer),
        role="actor",
        offload_field="spec.training.model.offload",
        adapters=AdapterSettings(lora, spec.training.seed) if lora else None,
        defers_reduction=spec.roles.actor.defer_gradient_reduction,
    )


def critic_engine(spec: RLJobSpec, dtype: torch.dtype, layout: ParallelLayout) -> TrainEngineSettings:
    """Returns the settings of the critic."""
    critic = critic_of(spec)
    offload = critic.model.offload
    return replace(
        reference_engine(spec, dtype, layout),
        head=Head.VALUE,
        kernels=Kernels.PLAIN,
        gradient_checkpointing=critic.model.gradient_checkpointing is GradientCheckpointing.ALWAYS,
        optimizer=critic.optimizer,
        offload=OffloadSettings(offload.parameters, offload.gradients, offload.optimizer),
        role="critic",
        offload_field="spec.training.critic.model.offload",
    )


def reward_model_engine(spec: RLJobSpec, dtype: torch.dtype, layout: ParallelLayout) -> TrainEngineSettings:
    """Returns the settings of the reward model."""
    [(index, model)] = [
        (index, each.reward_model) for index, each in enumerate(spec.training.rewards) if each.reward_model is not None
    ]
    return replace(
        reference_engine(spec, dtype, layout),
        head=Head.SCORE,
        kernels=Kernels.PLAIN,
        offload=OffloadSettings(parameters=model.offload),
        role="reward model",
        offload_field=f"spec.training.rewards[{index}].rewardModel.offload",
    )


def critic_of(spec: RLJobSpec) -> Critic:
    """Returns the job's critic block, or one with all defaults."""
    return spec.training.critic or Critic()
