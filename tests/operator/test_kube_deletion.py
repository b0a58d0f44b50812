"""What counts as deleted: an object that is gone or was replaced, and not one that was changed."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from rljob_operator.kube.allowed_calls import JOBS, KubeObjects
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.errors import ConflictError, KubeError, NotFoundError
from rljob_operator.raw_json import JsonObject, object_at


class Client:
    """An API server that answers a deletion with this error, or carries it out."""

    def __init__(self, error: KubeError | None) -> None:
        self.error = error
        self.preconditions: JsonObject = {}

    async def request(self, method: str, path: str, *, resource: str, body: JsonObject) -> JsonObject:
        assert (method, path, resource) == ("DELETE", JOBS.path("team", "job"), "rljobs")
        self.preconditions = object_at(body, "preconditions")
        if self.error is not None:
            raise self.error
        return {}


def delete(client: Client, version: str) -> bool:
    return asyncio.run(KubeObjects(cast(KubeClient, client)).delete(JOBS, "team", "job", "j1", version))


def test_an_object_is_deleted_by_its_uid_and_if_asked_by_its_version() -> None:
    client = Client(None)
    assert delete(client, "")
    assert client.preconditions == {"uid": "j1"}
    assert delete(client, "7")
    assert client.preconditions == {"uid": "j1", "resourceVersion": "7"}


def test_an_object_that_is_gone_or_has_another_uid_is_not_deleted() -> None:
    assert not delete(Client(NotFoundError("gone")), "7")
    assert not delete(Client(ConflictError("another UID")), "")


def test_an_object_that_was_changed_since_is_reported() -> None:
    with pytest.raises(ConflictError):
        delete(Client(ConflictError("another version")), "7")
