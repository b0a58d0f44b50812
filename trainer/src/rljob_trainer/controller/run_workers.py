"""Connects a run to Ray, reserves the devices of all pools, and starts the worker groups on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from rljob_api.constants import ENV_RUN_FOLDER, LOGS_FOLDER
from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.rollout import Compile
from rljob_api.v1alpha1.training import ProfilerType
from rljob_trainer.checkpoints.storage import job_location
from rljob_trainer.controller.model_roles import (
    FoundRewardModel,
    Models,
    model_roles,
    num_data_ranks_of,
    placed_roles,
)
from rljob_trainer.controller.rollout_phase import RewardModelWorkers
from rljob_trainer.engines.host_ledger import accounts_text, check_accounts
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.nsys import nodes_without_nsys
from rljob_trainer.groups.ray_session import ShippedCode, cluster_resources, ray_session
from rljob_trainer.groups.shared_folders import check_shared
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.observability.activity import POLL_SECONDS, ActivityWatch
from rljob_trainer.observability.nsys_profiles import missing_nsys
from rljob_trainer.pools.pool_manager import (
    FusedRoles,
    ResourcePoolManager,
    plan_roles,
    pool_settings_of,
)
from rljob_trainer.pools.resource_pool import ResourcePool
from rljob_trainer.settings import NUM_THREADS_VARIABLE, Settings, worker_environment
from rljob_trainer.workers.factories import (
    ACTOR,
    CRITIC,
    HYBRID,
    REFERENCE,
    REWARD,
    REWARD_MODEL,
    make_reward,
)
from rljob_trainer.workers.protocols import (
    ActorGroup,
    CriticGroup,
    HybridGroup,
    ReferenceGroup,
    RewardGroup,
    RewardModelGroup,
    TrainedGroup,
)
from rljob_trainer.workers.reward import RewardSettings, RewardWorker
from rljob_trainer.workers.reward_model import TEXT_COLUMNS, TOKEN_COLUMNS

log = logging.getLogger(__name__)

ReportActivity = Callable[[str], None]
"""Called with the text of a slow activity that has started or made progress, such as `loads the data`."""


@dataclass(frozen=True)
class Workers:
    """The worker groups of a run."""

    actor: ActorGroup
    hybrid: HybridGroup
    reward: RewardGroup
    reference: ReferenceGroup | None
    critic: CriticGroup | None
    reward_model: RewardModelWorkers | None
    num_devices: int
    processes: Mapping[str, WorkerProcesses]
    """The worker processes by the name of their pool."""

    @property
    def trained(self) -> tuple[TrainedGroup, ...]:
        """The groups whose models are trained. Checkpoints contain the state of these groups."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)


@contextmanager
def connected_ray(job: TrainerJob, settings: Settings) -> Iterator[str]:
    """Connects to Ray, and yields the device type of the cluster: `cpu` or `cuda`."""
    num_workers = sum(each.nodes * each.gpus_per_node for each in job.spec.pools)
    log.info("Ray: %s", f"connecting to {settings.ray_address}" if settings.ray_address else "starting")
    has_gpus = settings.device_type == "cuda" or (settings.device_type is None and torch.cuda.is_available())
    num_local_gpus = num_workers if has_gpus else 0
    with ray_session(settings.ray_address, num_workers + 1, num_local_gpus, shipped_code(settings)):
        # The head of a cluster may have no GPU. So the resources of the nodes decide, not the devices that torch finds
        # here.
        yield settings.device_type or ("cuda" if cluster_resources().get("GPU") else "cpu")


@contextmanager
def started_workers(
    job: TrainerJob,
    settings: Settings,
    models: Models,
    reward: RewardSettings,
    longest_prompt: int,
    environment: EnvironmentSettings | None,
    device_type: str,
    doing: ReportActivity,
) -> Iterator[Workers]:
    """Reserves the devices of all pools, starts the worker processes, and yields the worker groups."""
    num_workers = sum(each.nodes * each.gpus_per_node for each in job.spec.pools)
    log_folder = settings.run_folder / LOGS_FOLDER
    with ExitStack() as stack:
        found = model_roles(job, models, longest_prompt, environment)
        roles = {role.name: role for role in (RoleSpec(REWARD, RewardWorker, partial(make_reward, reward)), *found)}
        # GPUs are reserved even if workers compute on CPUs: this keeps workers off the head node, which has no GPU.
        pools = pool_settings_of(job.spec, num_cpus_per_device=1, cluster_resources=cluster_resources())
        plan = plan_roles([pool.name for pool in pools], placed_roles(job.spec, tuple(roles)))
        log.info("workers: building %d on %s; their logs are in %s", num_workers, device_type, log_folder)
        manager = stack.enter_context(ResourcePoolManager(pools, plan))
        started: list[tuple[FusedRoles, ResourcePool, WorkerProcesses]] = []
        for group in plan.groups:
            pool = manager.pool_of(group.roles[0])
            processes = start_pool(pool, job, settings, device_type)
            stack.callback(processes.close)
            started.append((group, pool, processes))
        if settings.ray_address and job_location(job) is None:
            folders = {"run folder": settings.run_folder, "checkpoint folder": settings.checkpoint_folder}
            check_shared(folders, [processes for _, _, processes in started])

        def build(group: FusedRoles, pool: ResourcePool, processes: WorkerProcesses) -> dict[str, WorkerGroup]:
            others = tuple(slot for _, other, _ in started if other is not pool for slot in other.slots())
            folder = log_folder / group.pool if len(started) > 1 else log_folder
            build_settings = BuildSettings(device_type, chosen_num_threads(job, settings), folder, others)
            processes.build(pool.slots(), build_settings, [roles[role] for role in group.roles])
            return spawn(processes)

        doing(f"loads models on {num_workers} workers")
        with ThreadPoolExecutor(max_workers=len(started)) as builders:  # All pools at the same time.
            built = [builders.submit(build, *each) for each in started]
            activity = ActivityWatch(log_folder, lambda how: doing(f"loads models; {how}"))
            while wait(built, timeout=POLL_SECONDS).not_done:
                activity.poll_files()
        groups = {role: group for each in built for role, group in each.result().items()}
        check_host_memory([processes for _, _, processes in started])
        yield Workers(
            actor=groups[ACTOR].seen_as(ActorGroup),
            hybrid=groups[HYBRID].seen_as(HybridGroup),
            reward=groups[REWARD].seen_as(RewardGroup),
            reference=groups[REFERENCE].seen_as(ReferenceGroup) if REFERENCE in groups else None,
            critic=groups[CRITIC].seen_as(CriticGroup) if CRITIC in groups else None,
            reward_model=_reward_model_workers(job, models.reward_model, groups),
            num_devices=num_workers,
            processes={group.pool: processes for group, _, processes in started},
        )


def check_host_memory(pools: Sequence[WorkerProcesses]) -> None:
    """Raises HostMemoryError if a host has too little memory for the workers of all pools together. The workers of a
    pool have checked their own pool only."""
    accounts = [account for processes in pools for account in processes.host_accounts()]
    check_accounts(accounts)
    log.info("host memory: %s", accounts_text(accounts))


def start_pool(pool: ResourcePool, job: TrainerJob, settings: Settings, device_type: str) -> WorkerProcesses:
    """Starts the worker processes of a pool. They see each other's GPUs only if ranks share a model in vLLM, which
    needs that. Raises ConfigurationError if ranks are profiled by nsys and their node does not have it."""
    sees_all_gpus = job.spec.roles.rollout.tensor_parallel > 1
    profile, nsys_ranks = job.spec.training.profile, frozenset[int]()
    if profile is not None and profile.type is ProfilerType.NSYS:
        is_of_actor = pool.settings.name == job.spec.placed_roles()[ACTOR]
        nsys_ranks = frozenset(profile.ranks if is_of_actor else ())
        if nodes := nodes_without_nsys(slot for slot in pool.slots() if slot.rank in nsys_ranks):
            raise missing_nsys(f"node {nodes[0]}")
    environment = _environment(job, settings, device_type)
    return start_processes(pool, environment, sees_all_gpus=sees_all_gpus, nsys_ranks=nsys_ranks)


def _environment(job: TrainerJob, settings: Settings, device_type: str) -> dict[str, str]:
    """Returns the environment variables of the worker processes."""
    compiles = job.spec.training.rollout.compile is Compile.ALWAYS
    variables = worker_environment(device_type, chosen_num_threads(job, settings), compiles=compiles)
    return variables | {ENV_RUN_FOLDER: str(settings.run_folder)}


def _reward_model_workers(
    job: TrainerJob, found: FoundRewardModel | None, groups: Mapping[str, WorkerGroup]
) -> RewardModelWorkers | None:
    if found is None:
        return None
    columns = TOKEN_COLUMNS if found.settings.reads_tokens else TEXT_COLUMNS
    group = groups[REWARD_MODEL].seen_as(RewardModelGroup)
    name = next(each.name for each in job.spec.training.rewards if each.reward_model is not None)
    return RewardModelWorkers(name, group, columns, num_data_ranks_of(job.spec, REWARD_MODEL))


def shipped_code(settings: Settings) -> ShippedCode | None:
    """Returns the folder that is copied to a remote cluster, without the output of runs. None if nothing is copied: the
    user has named no folder, or the trainer is a Ray job, to which Ray has already copied the code."""
    folder = settings.shipped_code
    if folder is None or settings.is_ray_job:
        return None
    inside = [path for path in (settings.run_folder, settings.checkpoint_folder) if path.is_relative_to(folder)]
    return ShippedCode(folder, ("/.git/", "/runs/", *(f"/{path.relative_to(folder)}/" for path in inside)))


def chosen_num_threads(job: TrainerJob, settings: Settings) -> int | None:
    """Returns the number of CPU threads of each worker if the user has set it; otherwise None. For a Ray job, Ray
    itself sets OMP_NUM_THREADS. Then the variable only counts if it is in the job's spec.env."""
    is_chosen = not settings.is_ray_job or NUM_THREADS_VARIABLE in [variable.name for variable in job.spec.env]
    return settings.num_threads if is_chosen else None
