"""Pins models of the Hugging Face hub: a job may name a branch or no revision; the first start resolves it to a commit,
and every resumed run uses the same commit."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rljob_api.base import WireModel
from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.reward import Reward
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.engine_settings import critic_of
from rljob_trainer.models.source import ModelLocation

log = logging.getLogger(__name__)


class HubModel(WireModel):
    """A model of the hub at one commit."""

    source: str
    requested: str | None = None
    """The commit, tag or branch that the job names; None if it names none."""
    revision: str
    """The commit hash that is used."""


class HubRoleModels(WireModel):
    """The models of critic, reward model and reference, if they are on the hub. A model is None if the job has none, if
    it is local, or if the critic or the reference starts from the policy's model."""

    critic: HubModel | None = None
    reward_model: HubModel | None = None
    reference: HubModel | None = None


def at_saved_commit(model: Model, saved: HubModel | None) -> Model:
    """Returns the job's model at the commit that the run of the checkpoint used (`saved`), unless the job now names
    another model or revision."""
    if saved is None or (saved.source, saved.requested) != (model.source, model.revision):
        return model
    return model.model_copy(update={"revision": saved.revision})


def hub_model_of(named: Model, found: Model) -> HubModel:
    """Returns the record of a model of the hub for checkpoints. `found.revision` is the commit."""
    assert found.revision is not None, "the controller has resolved the revision to a commit"
    return HubModel(source=named.source, requested=named.revision, revision=found.revision)


def role_models_at_saved_commits(spec: RLJobSpec, saved: HubRoleModels, is_local: Callable[[str], bool]) -> RLJobSpec:
    """Returns the spec with the models of critic, reward model and reference at the commits of the checkpoint (see
    `at_saved_commit`)."""
    return _with_revisions(
        spec,
        *(
            None if named is None or is_local(named.source) else at_saved_commit(named, record).revision
            for named, record in zip(_named_models(spec), _records(saved), strict=True)
        ),
    )


def hub_role_models_of(
    spec: RLJobSpec,
    critic: ModelLocation | None,
    reward_model: ModelLocation | None,
    reference: ModelLocation | None,
) -> HubRoleModels:
    """Returns the record of the models of critic, reward model and reference for checkpoints."""
    records = [
        hub_model_of(named, found.model) if named and found and found.model.revision else None
        for named, found in zip(_named_models(spec), (critic, reward_model, reference), strict=True)
    ]
    return HubRoleModels(critic=records[0], reward_model=records[1], reference=records[2])


def at_commits(spec: RLJobSpec, policy: HubModel | None, role_models: HubRoleModels) -> RLJobSpec:
    """Returns the spec with the commits as revisions."""
    spec = _with_revisions(spec, *(None if each is None else each.revision for each in _records(role_models)))
    if policy is None:
        return spec
    model = spec.training.model.model_copy(update={"revision": policy.revision})
    return spec.model_copy(update={"training": spec.training.model_copy(update={"model": model})})


def warn_if_models_changed(saved: HubRoleModels, role_models: HubRoleModels) -> None:
    """Logs a warning if the reward model or the reference is not the one of the checkpoint's run, because scores and
    advantages may differ. Another initial model of the critic does not matter, because the critic's weights come from
    the checkpoint."""
    for what, was, now in (
        ("reward model", saved.reward_model, role_models.reward_model),
        ("model of the reference", saved.reference, role_models.reference),
    ):
        if was and (now is None or (now.source, now.revision) != (was.source, was.revision)):
            log.warning(
                "the %s is %s, but the run of the checkpoint used %s at commit %s: the training may differ",
                what,
                f"{now.source} at commit {now.revision}" if now else "not on the hub",
                was.source,
                was.revision,
            )


def _records(models: HubRoleModels) -> tuple[HubModel | None, HubModel | None, HubModel | None]:
    return models.critic, models.reward_model, models.reference


def _named_models(spec: RLJobSpec) -> tuple[Model | None, Model | None, Model | None]:
    """Returns the models of critic, reward model and reference as the job names them."""
    rewards = spec.training.rewards
    reward_model = next((each.reward_model for each in rewards if each.reward_model), None)
    found = (critic_of(spec).model, reward_model, spec.roles.ref.model)
    critic, judge, reference = (
        None if each is None or each.source is None else Model(source=each.source, revision=each.revision)
        for each in found
    )
    return critic, judge, reference


def _with_revisions(spec: RLJobSpec, critic: str | None, reward_model: str | None, reference: str | None) -> RLJobSpec:
    """Returns the spec with these revisions; None leaves the revision unchanged."""
    training, roles = spec.training, spec.roles
    if reward_model is not None:
        rewards = tuple(_at_revision(reward, reward_model) for reward in training.rewards)
        training = training.model_copy(update={"rewards": rewards})
    if critic is not None and training.critic is not None:
        model = training.critic.model.model_copy(update={"revision": critic})
        update = {"critic": training.critic.model_copy(update={"model": model})}
        training = training.model_copy(update=update)
    if reference is not None and roles.ref.model is not None:
        own = roles.ref.model.model_copy(update={"revision": reference})
        roles = roles.model_copy(update={"ref": roles.ref.model_copy(update={"model": own})})
    return spec.model_copy(update={"training": training, "roles": roles})


def _at_revision(reward: Reward, revision: str) -> Reward:
    if reward.reward_model is None:
        return reward
    model = reward.reward_model.model_copy(update={"revision": revision})
    return reward.model_copy(update={"reward_model": model})
