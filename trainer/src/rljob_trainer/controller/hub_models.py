"""Models of the Hugging Face hub: a job names a branch or nothing, its first start takes a commit, and every resumed
run that one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rljob_api.base import WireModel
from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.reward import Reward
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.engine_settings import critic_of
from rljob_trainer.models.source import ModelPlace

log = logging.getLogger(__name__)


class HubModel(WireModel):
    """A model of the hub at one commit."""

    source: str
    requested: str | None = None
    """The commit, tag or branch that the job names."""
    revision: str
    """The commit."""


class HubJudges(WireModel):
    """Where a critic began, and the reward model; each None for a local one, for the policy's own, and for none."""

    critic: HubModel | None = None
    reward_model: HubModel | None = None


def at_kept_commit(model: Model, before: HubModel | None) -> Model:
    """The job's model of the hub: at the commit that the checkpoint's run took (`before`), unless the job has come to
    name another model or revision."""
    if before is None or (before.source, before.requested) != (model.source, model.revision):
        return model
    return model.model_copy(update={"revision": before.revision})


def hub_model_of(asked: Model, found: Model) -> HubModel:
    """What is kept of a model of the hub; `found` names the commit."""
    assert found.revision is not None, "the controller names a commit"
    return HubModel(source=asked.source, requested=asked.revision, revision=found.revision)


def judges_at_kept_commits(spec: RLJobSpec, before: HubJudges, is_local: Callable[[str], bool]) -> RLJobSpec:
    """The spec with its critic and its reward model as `at_kept_commit` has them."""
    critic, reward_model = _asked(spec)
    return _with_revisions(
        spec,
        *(
            None if asked is None or is_local(asked.source) else at_kept_commit(asked, kept).revision
            for asked, kept in ((critic, before.critic), (reward_model, before.reward_model))
        ),
    )


def hub_judges_of(spec: RLJobSpec, critic: ModelPlace | None, reward_model: ModelPlace | None) -> HubJudges:
    """What is kept of a job's judges, by where they were found."""
    kept = [
        hub_model_of(asked, found.model) if asked and found and found.model.revision else None
        for asked, found in zip(_asked(spec), (critic, reward_model), strict=True)
    ]
    return HubJudges(critic=kept[0], reward_model=kept[1])


def at_commits(spec: RLJobSpec, policy: HubModel | None, judges: HubJudges) -> RLJobSpec:
    """The spec that names the commits."""
    found = (judges.critic, judges.reward_model)
    spec = _with_revisions(spec, *(None if each is None else each.revision for each in found))
    if policy is None:
        return spec
    model = spec.training.model.model_copy(update={"revision": policy.revision})
    return spec.model_copy(update={"training": spec.training.model_copy(update={"model": model})})


def tell_of_another_reward_model(before: HubJudges, judges: HubJudges) -> None:
    """Logs a warning where a run goes on with another one: what its rewards mean may have changed. A critic began at
    its commit, and has its weights from the checkpoint."""
    was, now = before.reward_model, judges.reward_model
    if was and (now is None or (now.source, now.revision) != (was.source, was.revision)):
        log.warning(
            "the reward model is %s, and the checkpoint's run had %s at commit %s: its scores may differ",
            f"{now.source} at commit {now.revision}" if now else "another one",
            was.source,
            was.revision,
        )


def _asked(spec: RLJobSpec) -> tuple[Model | None, Model | None]:
    """Critic and reward model as the job names them."""
    critic, rewards = critic_of(spec).model, spec.training.rewards
    judge = next((each.reward_model for each in rewards if each.reward_model), None)
    return (
        None if critic.source is None else Model(source=critic.source, revision=critic.revision),
        None if judge is None else Model(source=judge.source, revision=judge.revision),
    )


def _with_revisions(spec: RLJobSpec, critic: str | None, reward_model: str | None) -> RLJobSpec:
    """None leaves what is there."""
    training = spec.training
    if reward_model is not None:
        rewards = tuple(_at_revision(reward, reward_model) for reward in training.rewards)
        training = training.model_copy(update={"rewards": rewards})
    if critic is not None and training.critic is not None:
        model = training.critic.model.model_copy(update={"revision": critic})
        update = {"critic": training.critic.model_copy(update={"model": model})}
        training = training.model_copy(update=update)
    return spec.model_copy(update={"training": training})


def _at_revision(reward: Reward, revision: str) -> Reward:
    if reward.reward_model is None:
        return reward
    model = reward.reward_model.model_copy(update={"revision": revision})
    return reward.model_copy(update={"reward_model": model})
