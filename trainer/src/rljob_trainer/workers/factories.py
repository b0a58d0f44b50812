"""Builds the worker of each role inside of the worker process. The controller sends these functions, with their
settings, to the processes. `others`: the workers that were built before in the same process, by role."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rljob_api.v1alpha1.rollout import RolloutEngine as RolloutEngineName
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.rollout.base import RolloutEngine
from rljob_trainer.engines.rollout.select import select_engine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings, target_endings
from rljob_trainer.engines.train.model import build_on_meta
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.errors import ConfigurationError, about_field
from rljob_trainer.models.source import ModelLocation
from rljob_trainer.settings import variables_named
from rljob_trainer.workers.actor import ActorSettings, ActorWorker
from rljob_trainer.workers.critic import CriticSettings, CriticWorker
from rljob_trainer.workers.environment_rollout import EnvironmentRolloutWorker
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.reference import ReferenceWorker
from rljob_trainer.workers.reward import RewardSettings, RewardWorker
from rljob_trainer.workers.reward_model import RewardModelSettings, RewardModelWorker
from rljob_trainer.workers.rollout import RolloutWorker
from rljob_trainer.workers.trained_worker import TrainedWorker

log = logging.getLogger(__name__)

ACTOR, ROLLOUT, HYBRID, REFERENCE, REWARD, CRITIC = "actor", "rollout", "hybrid", "ref", "reward", "critic"
REWARD_MODEL = "rewardModel"
POLICY_FIELD, CRITIC_FIELD = "spec.training.model.", "spec.training.critic.model."
REFERENCE_FIELD = "spec.roles.ref.model."


@dataclass(frozen=True)
class RolloutSettings:
    """The settings of a rollout engine. `max_model_length` counts prompt and response tokens."""

    model: ModelLocation
    engine: RolloutEngineName
    compiles: bool
    dtype: torch.dtype
    tensor_parallel: int
    max_model_length: int
    max_num_sequences: int
    gpu_memory_utilization: float
    cpu_kv_cache_bytes: int
    seed: int
    stall_seconds: float
    """The longest time of a step of the engine; see EngineLoop."""
    keeps_weights_asleep: bool
    """True if weights are synchronized once for several steps, so that the engine must keep them while it sleeps."""
    adapters: AdapterSettings | None
    """The LoRA adapters that are trained; None: all weights are trained."""
    has_float32_head: bool
    """True: logits have 32 bits, also if `dtype` has 16."""
    environment: EnvironmentSettings | None = None
    """None in a job without an environment."""

    @property
    def separate_adapters(self) -> AdapterSettings | None:
        """The adapters if weight syncs send them alone. The base never changes then."""
        return self.adapters if self.adapters is not None and self.adapters.are_sent_separately else None

    @property
    def sleep_field(self) -> str:
        """The job's field that changes how much of vLLM is in host memory while it sleeps on a GPU: because of the
        first two it keeps its weights there, because of the last one its CUDA graphs."""
        if self.keeps_weights_asleep:
            return "spec.training.rollout.syncEverySteps"
        return "spec.training.rollout.compile" if self.separate_adapters is None else "spec.training.model.lora.sync"


def make_actor(
    settings: ActorSettings, model: ModelLocation, context: WorkerContext, _others: Mapping[str, Worker]
) -> Worker:
    """Builds the actor, the policy that is trained."""
    engine = replace(settings.engine, device=context.device, model_folder=model.folder())
    return ActorWorker(context, replace(settings, engine=engine))


def make_critic(
    settings: CriticSettings, model: ModelLocation, context: WorkerContext, _others: Mapping[str, Worker]
) -> Worker:
    """Builds the critic. `model` has its initial weights."""
    with about_field(CRITIC_FIELD, POLICY_FIELD):
        engine = replace(settings.engine, device=context.device, model_folder=model.folder())
        return CriticWorker(context, replace(settings, engine=engine))


def make_reward_model(
    settings: RewardModelSettings, model: ModelLocation, context: WorkerContext, _others: Mapping[str, Worker]
) -> Worker:
    """Builds the worker of a reward model."""
    with about_field(settings.field, POLICY_FIELD):
        folder = model.folder()
        engine = replace(settings.engine, device=context.device, model_folder=folder)
        return RewardModelWorker(context, replace(settings, engine=engine))


def make_reference(
    settings: TrainEngineSettings,
    model: ModelLocation,
    temperature: float,
    context: WorkerContext,
    others: Mapping[str, Worker],
    *,
    has_own_model: bool = False,
) -> Worker:
    """Builds the reference, a frozen model. `has_own_model`: whether `model` is not the policy's initial model.

    If an actor in the same process trains adapters and has the same layout and base model, both share the actor's
    model: with the adapters turned off, this model is the reference."""
    if has_own_model:
        with about_field(REFERENCE_FIELD, POLICY_FIELD):
            engine = replace(settings, device=context.device, model_folder=model.folder())
            return ReferenceWorker(context, TrainEngine(engine), temperature)
    if (actor := others.get(ACTOR)) is not None:
        assert isinstance(actor, ActorWorker)
        if actor.engine.settings.adapters is not None and actor.engine.layout == settings.layout:
            return ReferenceWorker(context, actor.engine, temperature)
        if actor.engine.settings.adapters is not None:
            log.warning(
                "roles.ref: the reference's layout differs from the actor's, so the reference has its own copy of the "
                "model"
            )
    engine = replace(settings, device=context.device, model_folder=model.folder())
    return ReferenceWorker(context, TrainEngine(engine), temperature)


def make_reward(settings: RewardSettings, context: WorkerContext, _others: Mapping[str, Worker]) -> Worker:
    """Builds the reward worker. Its scoring processes get this process's PYTHONPATH, because on another node the
    sources are a copy in another folder."""
    environment = {**settings.environment, **variables_named(["PYTHONPATH"])}
    return RewardWorker(context, replace(settings, environment=environment))


def make_rollout(settings: RolloutSettings, context: WorkerContext, _others: Mapping[str, Worker]) -> Worker:
    """Builds the rollout worker. Its environment processes get this process's PYTHONPATH; see `make_reward`."""
    common = (
        context,
        lambda: _make_engine(settings, context),
        settings.tensor_parallel,
        settings.sleep_field,
        settings.stall_seconds,
    )
    if settings.environment is None:
        return RolloutWorker(*common)
    variables = {**settings.environment.variables, **variables_named(["PYTHONPATH"])}
    environment = replace(settings.environment, variables=variables, model_folder=settings.model.folder())
    return EnvironmentRolloutWorker(*common, environment)


def make_hybrid(dtype: torch.dtype, seed: int, context: WorkerContext, others: Mapping[str, Worker]) -> Worker:
    """Builds the hybrid worker from the actor and the rollout worker of this process. `seed` is the seed of the job."""
    actor, rollout = others[ACTOR], others[ROLLOUT]
    assert isinstance(actor, ActorWorker)
    assert isinstance(rollout, RolloutWorker)
    return HybridWorker(context, actor, rollout, dtype, seed, train_engines(others))


def train_engines(workers: Mapping[str, Worker]) -> list[TrainEngine]:
    """Returns the training engines of the workers of a process."""
    with_models = TrainedWorker | ReferenceWorker | RewardModelWorker
    return [each.engine for each in workers.values() if isinstance(each, with_models)]


def _make_engine(settings: RolloutSettings, context: WorkerContext) -> RolloutEngine:
    """Builds the rollout engine. Its library is imported only here, because it may be missing and imports slowly."""
    if select_engine(settings.engine) is RolloutEngineName.HUGGING_FACE:
        from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings

        return HfEngine(
            HfSettings(
                settings.model.folder(),
                context.device,
                settings.dtype,
                settings.max_num_sequences,
                settings.has_float32_head,
            )
        )
    try:
        from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
        from rljob_trainer.engines.rollout.vllm_start import VllmSettings
    except ImportError as error:
        raise ConfigurationError(
            f"spec.training.rollout.engine: vLLM is installed but cannot be imported ({error}); check that it is the "
            "build for this device, or set HuggingFace"
        ) from error

    adapters = settings.separate_adapters
    folder = settings.model.folder()
    return VllmEngine(
        VllmSettings(
            model_folder=folder,
            device_type=context.device_type,
            compiles=settings.compiles,
            dtype=settings.dtype,
            tensor_parallel=settings.tensor_parallel,
            max_model_length=settings.max_model_length,
            max_num_sequences=settings.max_num_sequences,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            cpu_kv_cache_bytes=settings.cpu_kv_cache_bytes,
            seed=settings.seed,
            # With adapters the base weights never change, so they need not be sent again.
            keeps_weights_asleep=settings.keeps_weights_asleep or adapters is not None,
            adapter_rank=None if adapters is None else adapters.lora.rank,
            adapter_targets=() if adapters is None else target_endings(build_on_meta(folder), adapters.lora.targets),
            has_float32_head=settings.has_float32_head,
        )
    )
