"""Requests to a bucket, against a real S3 server: what faults do, and that messages contain no credentials."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from rljob_bucket import bucket
from rljob_bucket.errors import BucketError, BucketFault
from rljob_bucket.paths import BucketPath
from rljob_bucket.probe import check_bucket
from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import Fault, FaultProxy, Request
from rljob_testing.buckets.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from rljob_testing.local_servers import free_port

MIB = 2**20


def refused(kind: str, request: Request) -> Fault | None:
    return Fault.FORBIDDEN if request.kind == kind else None


def once_at_the_end(faults: Iterator[Fault], request: Request) -> Fault | None:
    """The next fault for a request that completes an upload."""
    return next(faults, None) if request.kind == "POST upload" else None


@pytest.fixture
def folder(server: S3Server, proxy: FaultProxy, request: pytest.FixtureRequest) -> BucketPath:
    """A new folder, behind the proxy."""
    return server.path(f"{request.node.originalname}-{id(proxy)}", proxy.endpoint)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest parts that a store accepts, and small reads, so that less has to be sent."""
    monkeypatch.setattr(bucket, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(bucket, "READ_BYTES", 2 * MIB)


def test_a_usable_bucket_passes_the_check_and_nothing_stays(server: S3Server, folder: BucketPath) -> None:
    check_bucket(folder)
    assert server.keys(folder.key) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.FORBIDDEN, BucketFault.PERMISSION),
        (Fault.LOST_REQUEST, BucketFault.UNREACHABLE),
        (Fault.SLOW_DOWN, BucketFault.OVERLOADED),
        (Fault.INTERNAL_ERROR, BucketFault.OVERLOADED),
    ],
)
def test_the_check_names_what_the_store_does(
    proxy: FaultProxy, folder: BucketPath, fault: Fault, expected: BucketFault
) -> None:
    proxy.choose = lambda _: fault
    with quick_client(seconds=0.2), pytest.raises(BucketError) as caught:
        check_bucket(folder)
    assert caught.value.fault is expected


def test_a_bucket_that_cannot_be_listed_or_cleaned_is_rejected(proxy: FaultProxy, folder: BucketPath) -> None:
    for kind in ("GET list", "DELETE"):
        proxy.choose = partial(refused, kind)
        with pytest.raises(BucketError, match="access is denied"):
            check_bucket(folder)


def test_a_store_without_conditional_writes_is_rejected(proxy: FaultProxy, folder: BucketPath) -> None:
    proxy.choose = lambda _: Fault.IGNORED_CONDITION
    with pytest.raises(BucketError, match="does not support conditional writes"):
        check_bucket(folder)


def test_a_missing_bucket_and_a_wrong_endpoint_are_named(server: S3Server, folder: BucketPath) -> None:
    with pytest.raises(BucketError, match=r"the bucket does not exist.*NoSuchBucket.*create the bucket"):
        check_bucket(replace(folder, bucket="no-such-bucket"))
    with quick_client(seconds=0.2), pytest.raises(BucketError, match="does not respond; check the endpoint"):
        check_bucket(replace(folder, endpoint=f"http://127.0.0.1:{free_port()}"))
    with quick_client(seconds=0.2), pytest.raises(BucketError, match="does not respond; check the endpoint"):
        check_bucket(replace(folder, endpoint=server.endpoint.replace("http:", "https:")))


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_an_error_without_credentials(
    folder: BucketPath, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(wrong, "wrong-value-of-the-test")
    bucket.forget_stores()
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BucketError) as caught:
        check_bucket(folder)
    assert caught.value.fault is BucketFault.CREDENTIALS
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert "AWS_SECRET_ACCESS_KEY" in shown
    for secret in (ACCESS_KEY, SECRET_KEY, "wrong-value-of-the-test", "StringToSign"):
        assert secret not in shown
    # Also the errors from which it was made are gone.
    assert caught.value.__cause__ is None


def test_without_credentials_the_error_says_what_to_set(folder: BucketPath) -> None:
    # In place of the metadata server of a cloud's machines.
    nothing = {"AWS_METADATA_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    with quick_client(seconds=0.2, variables=nothing), pytest.raises(BucketError, match="set AWS_ACCESS_KEY_ID"):
        check_bucket(folder)


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.FALSE_ANSWER, Fault.CUT_ANSWER])
def test_a_created_file_whose_answer_is_lost_is_its_own(proxy: FaultProxy, folder: BucketPath, fault: Fault) -> None:
    proxy.choose = lambda request: fault if request.number == 0 else None
    bucket.create(folder / "manifest.json", b"mine")
    assert proxy.requests[0].kind == "PUT if absent"
    with pytest.raises(FileExistsError):
        bucket.create(folder / "manifest.json", b"theirs")
    assert bucket.read(folder / "manifest.json") == b"mine"


@pytest.mark.usefixtures("_small_parts")
def test_large_files_are_uploaded_in_parts_and_read_in_ranges(
    server: S3Server, proxy: FaultProxy, folder: BucketPath
) -> None:
    content = os.urandom(3 * bucket.PART_BYTES + 5)
    proxy.choose = lambda request: Fault.LOST_ANSWER if request.number in (2, 4) else None
    with bucket.writer(folder / "large", len(content)) as write:
        for start in range(0, len(content), 3 * MIB):
            write(memoryview(content)[start : start + 3 * MIB])
    kinds = [request.kind for request in proxy.requests]
    assert kinds.count("PUT part") >= 4
    assert kinds[-1] == "POST upload"
    proxy.reset(lambda request: Fault.CUT_ANSWER if request.number % 4 == 1 else None)
    buffer = bytearray(len(content) + 10)
    assert bucket.read_into(folder / "large", 3, memoryview(buffer)) == len(content) - 3
    assert bytes(buffer[: len(content) - 3]) == content[3:]
    assert len(proxy.requests) > len(content) // bucket.READ_BYTES
    assert (server.folder / folder.bucket / folder.key / "large").read_bytes() == content


@pytest.mark.usefixtures("_small_parts")
def test_a_large_file_whose_last_answer_is_lost_is_complete(proxy: FaultProxy, folder: BucketPath) -> None:
    content = bytes(bucket.PART_BYTES + 1)
    for fault in (Fault.LOST_ANSWER, Fault.CUT_ANSWER, Fault.FALSE_ANSWER):
        proxy.reset(partial(once_at_the_end, iter([fault])))
        with bucket.writer(folder / fault.name, len(content)) as write:
            write(content)
        assert bucket.size(folder / fault.name) == len(content)


@pytest.mark.usefixtures("_small_parts")
def test_a_large_file_that_is_not_finished_does_not_appear(server: S3Server, folder: BucketPath) -> None:
    def stopped() -> None:
        with bucket.writer(folder / "large", 3 * bucket.PART_BYTES) as write:
            write(bytes(2 * bucket.PART_BYTES))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert server.keys(folder.key) == []


def test_names_and_sizes(folder: BucketPath) -> None:
    assert bucket.entries(folder).files == {}
    for name in ("a.json", "b/c.json", "b/d/e=1.txt"):
        bucket.write(folder / name, name.encode())
    found = bucket.entries(folder)
    assert (found.files, found.folders) == ({"a.json": 6}, ["b"])
    assert {name: info.size for name, info in bucket.all_files(folder).items()} == {
        "a.json": 6,
        "b/c.json": 8,
        "b/d/e=1.txt": 11,
    }
    assert bucket.read_into(folder / "a.json", 6, memoryview(bytearray(2))) == 0
    bucket.remove([folder / "a.json", folder / "missing"])
    with pytest.raises(FileNotFoundError):
        bucket.read(folder / "a.json")
