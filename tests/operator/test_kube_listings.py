"""Listings are read page by page, in smaller pages if a response is too long or too late."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from rljob_operator.kube.allowed_calls import METADATA_ONLY, NETWORK_POLICIES, PAGE_SIZE, PODS, KubeObjects
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.errors import ExpiredError, KubeError, TimedOutError, TooLongError
from rljob_operator.raw_json import JsonObject, text_at

Query = Mapping[str, str]


class Client:
    """Lists 1,000 objects. `faults` has the errors of the next requests; None for a response."""

    def __init__(self, faults: Sequence[KubeError | None] = ()) -> None:
        self.faults = list(faults)
        self.queries: list[dict[str, str]] = []
        self.accepted = ""
        self.kind = "PodList"

    async def request(self, method: str, path: str, *, resource: str, query: Query, accept: str) -> JsonObject:
        assert (method, path.rpartition("/")[2]) == ("GET", resource)
        self.queries.append(dict(query))
        self.accepted = accept
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        start, size = int(query.get("continue", "0")), int(query["limit"])
        items = [{"metadata": {"name": f"pod-{number}"}} for number in range(start, min(1000, start + size))]
        rest = str(start + size) if start + size < 1000 else ""
        return {"kind": self.kind, "metadata": {"resourceVersion": "7", "continue": rest}, "items": items}


async def page_sizes(client: Client) -> list[int]:
    names: list[str] = []
    sizes = []
    async for page in KubeObjects(cast(KubeClient, client)).pages(PODS, None):
        names += [text_at(raw, "metadata", "name") for raw in page.items]
        sizes.append(len(page.items))
    assert names == [f"pod-{number}" for number in range(1000)]
    return sizes


def test_a_listing_has_pages() -> None:
    client = Client()
    assert asyncio.run(page_sizes(client)) == [PAGE_SIZE] * (1000 // PAGE_SIZE)
    assert client.queries[1] == {"limit": str(PAGE_SIZE), "continue": str(PAGE_SIZE)}


def test_pages_become_smaller_if_they_are_too_long_or_too_late() -> None:
    client = Client([TooLongError("9 MiB"), None, TimedOutError("10 s")])
    sizes = asyncio.run(page_sizes(client))
    assert sizes[:2] == [PAGE_SIZE // 4, PAGE_SIZE // 4 // 4]
    assert set(sizes[1:-1]) == {PAGE_SIZE // 4 // 4}


def test_a_server_that_does_not_answer_the_first_request_is_not_asked_again() -> None:
    client = Client([TimedOutError("10 s")])
    with pytest.raises(TimedOutError):
        asyncio.run(page_sizes(client))
    assert len(client.queries) == 1


def test_an_object_that_is_too_long_alone_is_an_error() -> None:
    with pytest.raises(TooLongError):
        asyncio.run(page_sizes(Client([TooLongError("9 MiB")] * 10)))


def test_an_expired_listing_starts_again_or_is_reported_page_by_page() -> None:
    with pytest.raises(ExpiredError):
        asyncio.run(page_sizes(Client([None, ExpiredError("too old")])))
    client = Client([None, ExpiredError("too old")])
    listing = asyncio.run(KubeObjects(cast(KubeClient, client)).listing(PODS, None))
    assert (len(listing.items), listing.version) == (1000, "7")


def test_only_the_metadata_of_policies_is_requested() -> None:
    client = Client()
    client.kind = "PartialObjectMetadataList"

    async def names() -> list[str]:
        pages = KubeObjects(cast(KubeClient, client)).pages(NETWORK_POLICIES, "team", only_metadata=True)
        return [text_at(raw, "metadata", "name") async for page in pages for raw in page.items]

    assert len(asyncio.run(names())) == 1000
    assert client.accepted == METADATA_ONLY
