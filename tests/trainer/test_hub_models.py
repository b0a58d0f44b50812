"""A critic and a reward model of the hub stay at the commits that a run started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.training import training_runs
from rljob_trainer.controller.hub_models import (
    HubModel,
    HubRoleModels,
    at_commits,
    hub_role_models_of,
    role_models_at_saved_commits,
    warn_if_models_changed,
)
from rljob_trainer.models.source import ModelLocation

CRITIC, JUDGE, TEACHER = "org/critic", "org/judge", "org/teacher"


def spec(critic: training_runs.Document, judge: training_runs.Document) -> RLJobSpec:
    document = training_runs.small_job(algorithm={"type": "PPO"}, critic={"model": critic})
    training = cast(training_runs.Document, cast(training_runs.Document, document["spec"])["training"])
    rewards = cast(list[training_runs.Document], training["rewards"])
    training["rewards"] = [*rewards, {"name": "liking", "type": "RewardModel", "rewardModel": judge}]
    return RLJob.from_wire(document).spec


def revisions(spec: RLJobSpec) -> tuple[str | None, str | None]:
    assert spec.training.critic is not None
    judge = spec.training.rewards[-1].reward_model
    assert judge is not None
    return spec.training.critic.model.revision, judge.revision


def model_location(source: str, commit: str | None) -> ModelLocation:
    return ModelLocation(Model(source=source, revision=commit), Path("cache"), Path("job"))


def on_hub(_: str) -> bool:
    return False


def test_critic_and_reward_model_of_the_hub_stay_at_their_first_commits() -> None:
    job_spec = spec({"source": CRITIC}, {"source": JUDGE, "revision": "main"})
    assert role_models_at_saved_commits(job_spec, HubRoleModels(), on_hub) == job_spec
    found = (model_location(CRITIC, "c1"), model_location(JUDGE, "j1"), None)
    first = hub_role_models_of(job_spec, *found)
    assert first == HubRoleModels(
        critic=HubModel(source=CRITIC, revision="c1"),
        reward_model=HubModel(source=JUDGE, requested="main", revision="j1"),
    )
    # The branches have moved since.
    assert revisions(role_models_at_saved_commits(job_spec, first, on_hub)) == ("c1", "j1")
    assert revisions(at_commits(job_spec, None, first)) == ("c1", "j1")
    assert hub_role_models_of(job_spec, *found) == first


def test_a_teacher_of_the_hub_stays_at_its_first_commit() -> None:
    roles: training_runs.Document = {"ref": {"model": {"source": TEACHER, "revision": "main"}}}
    job_spec = RLJob.from_wire(training_runs.small_job(roles=roles, algorithm={"type": "Distillation"})).spec
    first = hub_role_models_of(job_spec, None, None, model_location(TEACHER, "t1"))
    assert first == HubRoleModels(reference=HubModel(source=TEACHER, requested="main", revision="t1"))
    for pinned in (role_models_at_saved_commits(job_spec, first, on_hub), at_commits(job_spec, None, first)):
        assert pinned.roles.ref.model is not None
        assert pinned.roles.ref.model.revision == "t1"


@pytest.mark.parametrize(
    ("critic", "judge", "is_local", "expected"),
    [
        ({"source": CRITIC, "revision": "c2"}, {"source": JUDGE}, on_hub, ("c2", None)),
        ({"source": "org/other"}, {"source": "org/other", "revision": "main"}, on_hub, (None, "main")),
        # A folder of that name has appeared.
        ({"source": CRITIC}, {"source": JUDGE, "revision": "main"}, lambda source: source == JUDGE, ("c1", "main")),
    ],
)
def test_the_model_that_the_job_names_now_is_used(
    critic: training_runs.Document,
    judge: training_runs.Document,
    is_local: Callable[[str], bool],
    expected: tuple[str | None, str | None],
) -> None:
    first = HubRoleModels(
        critic=HubModel(source=CRITIC, revision="c1"),
        reward_model=HubModel(source=JUDGE, requested="main", revision="j1"),
    )
    assert revisions(role_models_at_saved_commits(spec(critic, judge), first, is_local)) == expected


def test_local_models_have_no_commit() -> None:
    job_spec = spec({}, {"source": "/judge"})
    found = hub_role_models_of(job_spec, None, model_location("/judge", None), None)
    assert found == HubRoleModels()
    assert at_commits(job_spec, None, found) == job_spec


@pytest.mark.parametrize(("field", "what"), [("reward_model", "reward model"), ("reference", "model of the reference")])
def test_another_reward_model_or_teacher_is_logged(field: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    was = HubRoleModels.model_validate({field: HubModel(source=JUDGE, revision="j1")})
    warn_if_models_changed(was, was)
    warn_if_models_changed(HubRoleModels(), was)
    assert caplog.text == ""
    warn_if_models_changed(was, HubRoleModels.model_validate({field: HubModel(source=JUDGE, revision="j2")}))
    assert f"the {what} is {JUDGE} at commit j2, " in caplog.text
    assert f"the checkpoint used {JUDGE} at commit j1" in caplog.text
