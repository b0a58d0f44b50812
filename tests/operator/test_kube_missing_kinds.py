"""A missing kind is distinguished from a page that says Not Found in the API server's place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, KubeObjects, ResourceType
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.errors import KubeError, ResourceTypeMissingError, UnavailableError
from rljob_operator.raw_json import JsonObject

RAY_GROUP: JsonObject = {"name": "ray.io", "versions": [{"version": "v1"}]}
GROUPS: JsonObject = {"kind": "APIGroupList", "groups": [{"name": "apps", "versions": [{"version": "v1"}]}]}
WITH_RAY: JsonObject = {"kind": "APIGroupList", "groups": [RAY_GROUP]}
ALPHA_ONLY: JsonObject = {
    "kind": "APIGroupList",
    "groups": [{"name": "ray.io", "versions": [{"version": "v1alpha1"}]}],
}
CLUSTERS_ARE_THERE: JsonObject = {"kind": "APIResourceList", "resources": [{"name": "rayclusters"}]}
JOBS_ONLY: JsonObject = {"kind": "APIResourceList", "resources": [{"name": "rayjobs"}]}
PAGE: JsonObject = {"title": "welcome"}


class Client:
    """Responds by path; everything else is not found."""

    def __init__(self, answers: Mapping[str, JsonObject]) -> None:
        self.answers = answers

    async def request(self, method: str, path: str, **_: object) -> JsonObject:
        assert method == "GET"
        if path not in self.answers:
            raise ResourceTypeMissingError(f"{path}: 404 page not found (HTTP 404)")
        return self.answers[path]


def listed(kind: ResourceType, answers: Mapping[str, JsonObject]) -> None:
    asyncio.run(KubeObjects(cast(KubeClient, Client(answers))).list_all(kind, "team"))


@pytest.mark.parametrize(
    "answers",
    [{"/apis": GROUPS}, {"/apis": ALPHA_ONLY}, {"/apis": WITH_RAY, "/apis/ray.io/v1": JOBS_ONLY}],
    ids=["no group", "no version", "no resource"],
)
def test_a_kind_is_missing_if_discovery_says_so(answers: Mapping[str, JsonObject]) -> None:
    with pytest.raises(ResourceTypeMissingError):
        listed(CLUSTERS, answers)
    with pytest.raises(ResourceTypeMissingError):
        listed(JOBS, answers)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (PODS, {"/apis": GROUPS}),
        (CLUSTERS, {"/apis": WITH_RAY, "/apis/ray.io/v1": CLUSTERS_ARE_THERE}),
        (CLUSTERS, {"/apis": PAGE}),
        (CLUSTERS, {"/apis": WITH_RAY, "/apis/ray.io/v1": PAGE}),
    ],
    ids=["pods always exist", "the kind exists", "no list of groups", "no list of resources"],
)
def test_a_404_page_does_not_mean_that_a_kind_is_missing(kind: ResourceType, answers: Mapping[str, JsonObject]) -> None:
    with pytest.raises(KubeError) as raised:
        listed(kind, answers)
    assert isinstance(raised.value, UnavailableError)


@pytest.mark.parametrize("answers", [{}, {"/apis": WITH_RAY}], ids=["groups", "resources"])
def test_a_404_page_for_discovery_does_not_mean_that_a_kind_is_missing(answers: Mapping[str, JsonObject]) -> None:
    with pytest.raises(KubeError) as raised:
        listed(CLUSTERS, answers)
    assert isinstance(raised.value, UnavailableError)
