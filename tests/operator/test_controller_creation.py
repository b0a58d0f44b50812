"""A cluster is created once, as specified, and under a name that is free."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_operator.controller import reconcile_loop
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, NETWORK_POLICIES
from rljob_operator.kube.errors import InvalidFieldError, RefusedError, UnknownFieldError
from rljob_operator.raw_json import JsonObject, object_at, text_at
from rljob_operator.settings import Settings
from rljob_testing.operator import fake_api


def without_token(raw: JsonObject) -> JsonObject:
    """The object as stored by a KubeRay that does not validate what it receives."""
    spec = {name: value for name, value in object_at(raw, "spec").items() if name != "authOptions"}
    return {**raw, "spec": spec} if raw.get("kind") == "RayCluster" else raw


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fake_api.controller_settings(tmp_path)


@pytest.mark.parametrize(("owner", "reason"), [("uid-of-job", "PodsPending"), ("another", "NameConflict")])
def test_an_existing_cluster_is_asked_for_its_owner(settings: Settings, owner: str, reason: str) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.put(
            CLUSTERS,
            {
                "metadata": {"name": "job-1", "ownerReferences": [{"uid": owner, "controller": True}]},
                "spec": {"authOptions": {"mode": "token", "secretName": "s"}},
            },
        )
        await world.reconcile(fake_api.KEY, 1)
        labelled = world.api.objects[CLUSTERS, "job-1"]
        if owner == "uid-of-job":
            metadata = labelled["metadata"]
            assert isinstance(metadata, dict)
            metadata["labels"] = {"rljob.dev/job-uid": "uid-of-job"}
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        assert world.condition("job", "ClusterReady") == reason
        assert text_at(world.api.objects[CLUSTERS, "job-1"], "spec", "authOptions", "mode") == "token"

    fake_api.run_controller(settings, test)


def test_a_name_conflict_is_retried_every_few_seconds(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.put(CLUSTERS, {"metadata": {"name": "job-1", "ownerReferences": [{"uid": "x", "controller": True}]}})
        for _ in range(9):
            await world.relist()
            await world.reconcile(fake_api.KEY, 1)
            assert world.condition("job", "Failed") == ""
            memory = world.controller._memories[fake_api.KEY]
            if memory.failed_effect is not None:
                rest = memory.failed_effect.retry_at - asyncio.get_running_loop().time()
                assert rest <= reconcile_loop.NAME_TAKEN_SECONDS
                memory.failed_effect = replace(memory.failed_effect, retry_at=0.0)
        del world.api.objects[CLUSTERS, "job-1"]
        assert set(fake_api.CREATED) <= set(await world.reconcile(fake_api.KEY, 1))

    fake_api.run_controller(settings, test)


def test_a_job_that_was_created_again_does_not_wait_for_the_failure_of_the_former_one(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.errors["create rayclusters"] = RefusedError("exceeded quota: gpus")
        await world.reconcile(fake_api.KEY, 2)
        assert world.condition("job", "ClusterReady") == "CreationRejected"
        del world.api.errors["create rayclusters"]
        former = world.api.objects.pop((JOBS, "job"))
        created = {name: value for name, value in former.items() if name != "status"}
        world.api.put(JOBS, created | {"metadata": {**object_at(former, "metadata"), "uid": "uid-of-the-second"}})
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        assert world.condition("job", "ClusterReady") == "Creating"
        assert set(fake_api.CREATED) <= set(await world.reconcile(fake_api.KEY, 1))

    fake_api.run_controller(settings, test)


def test_a_network_policy_that_exists_is_that_of_the_new_attempt(settings: Settings) -> None:
    """Names repeat after 999 attempts, and a policy that selects other pods would protect nothing."""

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        name = f"job-1-{'uid-of-job'[:8]}"
        old = {"podSelector": {"matchLabels": {"rljob.dev/attempt": "1001"}}}
        world.api.put(NETWORK_POLICIES, {"metadata": {"name": name}, "spec": old})
        await world.reconcile(fake_api.KEY, 1)
        policy = world.api.objects[NETWORK_POLICIES, name]
        assert text_at(policy, "spec", "podSelector", "matchLabels", "rljob.dev/attempt") == "1"

    fake_api.run_controller(settings, test)


def test_a_kuberay_that_does_not_know_a_field_is_too_old(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        words = 'strict decoding error: unknown field "spec.authOptions"'
        world.api.errors["create rayclusters"] = UnknownFieldError(words)
        await world.reconcile(fake_api.KEY, 2)
        assert world.condition("job", "Failed") == "KubeRayTooOld"
        assert words in fake_api.condition_message(world, "Failed")

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize(
    ("field", "from_job"),
    [
        (
            "spec.workerGroupSpecs[1].template.spec.tolerations[0].effect",
            "spec.pools[1].template.tolerations[0].effect",
        ),
        ("spec.headGroupSpec.template.metadata.labels", "spec.head.template.labels"),
        ("spec.headGroupSpec.template.spec.containers[0].resources.limits", "spec.head.resources.limits"),
        ("spec.workerGroupSpecs[0].template.spec.containers[0].env[3].value", "spec.env"),
        ("spec.headGroupSpec.template.spec.containers[1].volumeMounts[0]", "spec.volumes"),
        ("spec.rayVersion", "spec.rayVersion"),
        ("spec.authOptions.mode", None),
        ("spec.workerGroupSpecs[0].template.spec.shareProcessNamespace", None),
    ],
)
def test_an_invalid_cluster_ends_the_job_at_once_with_the_field_of_the_job(
    settings: Settings, field: str, from_job: str | None
) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        words = f'RayCluster.ray.io "job-1" is invalid: {field}: Unsupported value'
        world.api.errors["create rayclusters"] = InvalidFieldError(words, (field,))
        await world.reconcile(fake_api.KEY, 2)
        assert world.condition("job", "Failed") == "InvalidSpec"
        message = fake_api.condition_message(world, "Failed")
        assert words in message
        assert (f"(from {from_job} of the job)" in message) == (from_job is not None)
        assert ("of the job)" in message) == (from_job is not None)

    fake_api.run_controller(settings, test)


def test_a_field_of_the_job_that_kuberay_does_not_know_is_a_fault_of_the_job(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        affinity = "spec.headGroupSpec.template.spec.affinity.podAffinity.namespaces"
        world.api.errors["create rayclusters"] = UnknownFieldError(f'strict decoding error: unknown field "{affinity}"')
        await world.reconcile(fake_api.KEY, 2)
        assert world.condition("job", "Failed") == "InvalidSpec"
        assert "(spec.head.template.affinity.podAffinity.namespaces)" in fake_api.condition_message(world, "Failed")

    fake_api.run_controller(settings, test)


def test_a_kuberay_that_lacks_a_field_of_the_operator_is_too_old_whatever_else_it_lacks(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        fields = ("spec.headGroupSpec.template.spec.affinity.new", "spec.authOptions")
        words = ", ".join(f'unknown field "{field}"' for field in fields)
        world.api.errors["create rayclusters"] = UnknownFieldError(f"strict decoding error: {words}")
        await world.reconcile(fake_api.KEY, 2)
        assert world.condition("job", "Failed") == "KubeRayTooOld"

    fake_api.run_controller(settings, test)


def test_a_cluster_stored_without_its_token_is_removed_at_once(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.stored = without_token
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 1)) == [
            *fake_api.CREATED,
            "delete rayclusters",
        ]
        await world.reconcile(fake_api.KEY, 1)
        assert world.condition("job", "Failed") == "KubeRayTooOld"
        assert not any(kind == CLUSTERS for kind, _ in world.api.objects)

    fake_api.run_controller(settings, test)
