"""Rules on the critic: it belongs to algorithms that have one."""

from __future__ import annotations

import re

from rljob_api.v1alpha1.critic import CriticModel
from rljob_api.v1alpha1.recipes import may_need_critic, may_need_critic_cel
from rljob_api.v1alpha1.roles import pool_of_cel
from rljob_api.v1alpha1.rule import cel_text, rule
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import Training
from rljob_api.v1alpha1.training_rules import LOCAL_SOURCE

_SHARD_SIZE = "self.roles.critic.shardSize"


def _has_one_replica(spec: RLJobSpec) -> bool:
    name, shard_size = spec.placed_roles()["critic"], spec.roles.critic.shard_size
    return shard_size is None or all(p.nodes * p.gpus_per_node <= shard_size for p in spec.pools if p.name == name)


def _offloads_gradients(spec: RLJobSpec) -> bool:
    critic = spec.training.critic
    return critic is not None and critic.model.offload.gradients


CRITIC_RULES = (
    rule(
        Training,
        "Training.critic",
        field=".critic",
        cel=f"!has(self.critic) || {may_need_critic_cel('self.algorithm')}",
        wrong="the algorithm that the job chooses has no critic",
        advice="remove the block, or choose an advantage that needs one (algorithm.type: PPO, or advantage.type: GAE)",
        holds=lambda training: training.critic is None or may_need_critic(training.algorithm),
    ),
    rule(
        Training,
        "Training.criticWarmupSteps",
        field=".critic.warmupSteps",
        cel="!has(self.critic) || self.critic.warmupSteps < self.steps",
        wrong="the policy would learn in none of the steps",
        advice="write fewer than training.steps",
        holds=lambda training: training.critic is None or training.critic.warmup_steps < training.steps,
    ),
    rule(
        Training,
        "Training.criticOptimizerWarmupSteps",
        field=".critic.optimizer.warmupSteps",
        cel="!has(self.critic) || self.critic.optimizer.warmupSteps <= self.steps",
        wrong="must not be more than training.steps",
        advice="lower it, or train for more steps",
        holds=lambda training: training.critic is None or training.critic.optimizer.warmup_steps <= training.steps,
    ),
    rule(
        CriticModel,
        "CriticModel.revision",
        field=".revision",
        cel=f"!has(self.revision) || (has(self.source) && !self.source.matches({cel_text(LOCAL_SOURCE)}))",
        wrong="a revision needs a Hugging Face repository beside it, in source",
        advice="remove the revision, or name the repository",
        holds=lambda model: (
            model.revision is None or (model.source is not None and re.search(LOCAL_SOURCE, model.source) is None)
        ),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.critic.offload.gradientsOfReplicas",
        field=".training.critic.model.offload.gradients",
        cel=f"!has(self.training.critic) || !self.training.critic.model.offload.gradients || !has({_SHARD_SIZE}) || "
        f"self.pools.all(p, p.name != {pool_of_cel('critic')} || p.nodes * p.gpusPerNode <= {_SHARD_SIZE})",
        wrong="replicas (roles.critic.shardSize) keep what they have added up where it cannot be taken from",
        advice="leave one of the two out",
        holds=lambda spec: not _offloads_gradients(spec) or _has_one_replica(spec),
    ),
)
