"""The real parts of rollouts with responses of given lengths: worker processes with vLLM and scoring processes, and the
controller's sampler, rollout phase and dynamic sampling."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.model import Model
from rljob_bench.forced_worker import ForcedHybrid, make_hybrid, make_rollout
from rljob_bench.peer_process import python_path
from rljob_bench.sleeping_reward import DIFFERS, SECONDS
from rljob_bench.step_case import PROMPT_TOKENS, random_prompts
from rljob_trainer.controller.dynamic_sampling import DynamicSampling
from rljob_trainer.controller.model_roles import Models, model_roles, step_plan
from rljob_trainer.controller.rollout_phase import RolloutPhase
from rljob_trainer.controller.sampler import Engines, Sampler
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import BuildSettings, start_processes
from rljob_trainer.models.source import ModelLocation
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool
from rljob_trainer.rewards.loading import scorer_spec
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.settings import worker_environment
from rljob_trainer.workers.factories import HYBRID, REWARD, ROLLOUT, make_reward
from rljob_trainer.workers.protocols import HybridGroup, RewardGroup
from rljob_trainer.workers.reward import RewardSettings, RewardWorker, ScorerSettings
from rljob_trainer.workers.rollout import RolloutWorker

GROUP_SIZE = 4
LONGEST = 640
"""Maximum number of tokens of a response."""
NUM_SCORING_PROCESSES = 8
SAMPLING = SamplingSettings(1.0, 1.0, 0, LONGEST, ())
CPUS_PER_WORKER = 0.1
"""Only for Ray's bookkeeping."""


@dataclass(frozen=True)
class Rollouts:
    """Workers that generate and score."""

    job: TrainerJob
    model: Path
    engines: Engines
    group: WorkerGroup
    """The ranks of ForcedHybrid."""
    reward: RewardGroup

    @property
    def hybrid(self) -> HybridGroup:
        """The group with the product's methods."""
        return self.group.seen_as(HybridGroup)

    def sampler(self, engines: Engines | None = None) -> Sampler:
        """The product's sampler for these workers."""
        return Sampler(self.hybrid, self.reward, engines or self.engines, StopRequest())

    def phase(self, engines: Engines | None = None) -> RolloutPhase:
        """The product's rollout phase with a sampler of its own."""
        name = self.job.spec.training.rewards[0].name
        return RolloutPhase(self.sampler(engines), {name: 1.0}, PhaseTimer(time.perf_counter), StopRequest())

    def dynamic_sampling(self, prompts: Sequence[PromptRow], refill: str) -> DynamicSampling:
        """The product's dynamic sampling over these prompts, in their order."""
        algorithm = {"type": "DAPO", "dynamicSampling": {"refill": refill}}
        job = TrainerJob(name="bench", spec=_spec(self.model, self.engines.num_engines, algorithm))
        cursor = PromptCursor(prompts, seed=0, shuffle=False, digest="")
        return DynamicSampling(step_plan(job, self.model), cursor)

    def set_step_seconds(self, seconds: float) -> None:
        """See ForcedEngine.step_seconds."""
        vars(self.group)["set_step_seconds"](seconds)

    def take_steps(self) -> list[tuple[int, float]]:
        """For each engine, its number of steps since the last call and their seconds."""
        found: list[tuple[int, float]] = vars(self.group)["take_steps"]()
        return found

    def cpu_seconds(self) -> list[float]:
        """For each worker process, its processor time in seconds since its start."""
        found: list[float] = vars(self.group)["cpu_seconds"]()
        return found


@contextmanager
def started(model: Path, logs: Path, num_engines: int, max_num_sequences: int, num_batch: int) -> Iterator[Rollouts]:
    """Starts worker processes of one thread each, each with an engine; all together have 8 scoring processes.
    `num_batch`: prompts of a step."""
    job = TrainerJob(name="bench", spec=_spec(model, num_engines, {"type": "GRPO"}, num_batch))
    [actor] = [role for role in model_roles(job, _models(model), PROMPT_TOKENS) if role.name == "actor"]
    roles = [
        RoleSpec(REWARD, RewardWorker, partial(make_reward, _reward_settings(job, logs, num_engines))),
        actor,
        RoleSpec(ROLLOUT, RolloutWorker, partial(make_rollout, model, PROMPT_TOKENS + LONGEST, max_num_sequences)),
        RoleSpec(HYBRID, ForcedHybrid, make_hybrid),
    ]
    pool = ResourcePool(PoolSettings("bench", 1, num_engines, False, CPUS_PER_WORKER, 120))
    try:
        processes = start_processes(pool, {**worker_environment("cpu", 1), "PYTHONPATH": python_path()})
        try:
            processes.build(pool.slots(), BuildSettings("cpu", 1, logs), roles)
            groups = spawn(processes)
            engines = Engines(num_engines, 1, max_num_sequences)
            yield Rollouts(job, model, engines, groups[HYBRID], groups[REWARD].seen_as(RewardGroup))
        finally:
            processes.close()
    finally:
        pool.release()


def prompt_rows(
    model: Path, count: int, *, seconds: float = 0.0, differ: Sequence[bool] | None = None
) -> list[PromptRow]:
    """Prompts of PROMPT_TOKENS tokens. A score of a response takes `seconds`; `differ`: for each prompt, whether the
    scores of its group differ, by default all."""
    texts = random_prompts(model, count)
    tokens = AutoTokenizer.from_pretrained(model)(texts)["input_ids"]
    rows: list[Mapping[str, object]] = [{SECONDS: seconds, DIFFERS: differs} for differs in (differ or [True] * count)]
    return [
        PromptRow(number, text, text, tuple(ids), None, row)
        for number, (text, ids, row) in enumerate(zip(texts, tokens, rows, strict=True))
    ]


def seeds_of(lengths: Sequence[int]) -> torch.Tensor:
    """[B] int64: the seeds of responses with these lengths; see ForcedEngine."""
    assert max(lengths) <= LONGEST, f"a response of {max(lengths)} tokens is too long for the engine"
    return torch.tensor(lengths, dtype=torch.int64)


def _spec(model: Path, num_engines: int, algorithm: Mapping[str, object], num_batch: int = 16) -> Mapping[str, object]:
    return {
        "pools": [{"name": "main", "nodes": 1, "gpusPerNode": num_engines}],
        "training": {
            "model": {"source": str(model)},
            "dataset": {"type": "File", "file": {"path": "prompts.jsonl"}, "maxPromptTokens": PROMPT_TOKENS},
            "rewards": [
                {
                    "type": "Function",
                    "function": {"path": "rljob_bench.sleeping_reward:score"},
                    "numProcesses": NUM_SCORING_PROCESSES,
                }
            ],
            "rollout": {"engine": "VLLM", "groupSize": GROUP_SIZE, "maxNewTokens": LONGEST},
            "algorithm": algorithm,
            "steps": 1,
            "batchSize": num_batch,
        },
    }


def _models(model: Path) -> Models:
    return Models(ModelLocation(Model(source=str(model)), model.parent, model.parent))


def _reward_settings(job: TrainerJob, logs: Path, num_workers: int) -> RewardSettings:
    [reward] = job.spec.training.rewards
    where = "spec.training.rewards[0]"
    spec = scorer_spec(reward, where, job.spec.training.dataset)
    assert spec is not None
    scorer = ScorerSettings(reward, where, spec, NUM_SCORING_PROCESSES // num_workers)
    return RewardSettings((scorer,), (), LONGEST, logs, scorer_environment(dict(os.environ), ()))
