"""Secrets of the operator and of users stay where they belong: canary values in every place that may hold a secret are
in no status, event, log line, metric or page of the operator, also when a dashboard repeats them."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

from rljob_operator.manifests.access import derived_token
from rljob_operator.manifests.ownership import JobIdentity
from rljob_operator.ray.client import HIDDEN_TOKEN, DashboardUnreachableError
from rljob_testing import local_servers
from rljob_testing.operator import ray_polling, scripts
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.testbed import Testbed

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

KEY, PREVIOUS_KEY, SHORT_KEY = "canary-of-the-token-key", "canary-of-the-previous-key", "canary-short"
OF_USER = {
    "secret": "canary-in-a-secret",
    "literal": "canary-in-a-literal",
    "url": "canary-in-a-url",
    "annotation": "canary-in-an-annotation",
}
EDITS = {
    "metadata.annotations": {"example.com/note": OF_USER["annotation"]},
    "spec.env": [
        {"name": "NOTE", "value": OF_USER["literal"]},
        {"name": "PROXY", "value": f"http://user:{OF_USER['url']}@proxy:3128"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "credentials", "key": "token"}}},
    ],
    "spec.envFrom": [{"secretRef": {"name": "credentials"}}],
    "spec.runPolicy": {"maxAppRetries": 0, "maxInfraRetries": 0},
}


def submit(testbed: Testbed, name: str) -> str:
    """Creates a job whose pods are not ready yet, and returns the token of its first cluster."""
    testbed.keep_pods_starting(f"{name}-1")
    testbed.submit(name, EDITS)
    job = JobIdentity(testbed.namespace, name, testbed.job(name)["metadata"]["uid"])
    return derived_token(KEY.encode(), job, f"{name}-1")


def published(testbed: Testbed, process: OperatorProcess) -> dict[str, str]:
    """Everything in which a person or another program reads what the operator says."""
    jobs = testbed.http.get(testbed.jobs).raise_for_status().json()["items"]
    return {
        "statuses": json.dumps([job.get("status") for job in jobs]),
        "events": json.dumps(testbed.items("events")),
        "log": process.log(),
        "pages": "".join(process.pages()),
    }


def test_no_secret_is_in_anything_that_the_operator_publishes(testbed: Testbed) -> None:
    keys = Path(testbed.setup.folder) / "token-keys"
    keys.mkdir()
    (keys / "key").write_text(KEY)
    (keys / "previous-key").write_text(PREVIOUS_KEY)
    encoded = base64.b64encode(OF_USER["secret"].encode()).decode()
    secret = {"metadata": {"name": "credentials"}, "data": {"token": encoded}}
    testbed.http.post(f"/api/v1/namespaces/{testbed.namespace}/secrets", json=secret).raise_for_status()
    testbed = testbed.with_environment({"RLJOB_OPERATOR_LOG_LEVEL": "debug"})
    with testbed.operator().running() as process:
        good = submit(testbed, "good")
        testbed.let_pods_start("good-1")
        testbed.wait_for("good", "Complete", "Succeeded")

        # The trainer fails, and its log and Ray's message contain the token.
        failing = submit(testbed, "failing")
        said = f"RuntimeError: rejected Authorization: Bearer {failing}"
        testbed.dashboard("failing-1").life = lambda _, __: scripts.RunMoment(
            "FAILED", message=said, exit_code=1, log=f"starting\n{said}\n"
        )
        testbed.let_pods_start("failing-1")
        assert HIDDEN_TOKEN in testbed.wait_for("failing", "Failed", "ApplicationError")["message"]

        # Ray rejects the Ray job with an error that repeats the request.
        rejected = submit(testbed, "rejected")
        testbed.dashboard("rejected-1").submit_error = f"cannot use Bearer {rejected}"
        testbed.let_pods_start("rejected-1")
        assert HIDDEN_TOKEN in testbed.wait_for("rejected", "JobSubmitted", "SubmissionFailed", "False")["message"]

        # The dashboard of a running trainer answers each request with an error that repeats its headers.
        noisy = submit(testbed, "noisy")
        testbed.dashboard("noisy-1").train_forever()
        testbed.let_pods_start("noisy-1")
        testbed.wait_for("noisy", "Progressing", "Training")
        testbed.dashboard("noisy-1").repeats_headers = True
        message = testbed.wait_for("noisy", "Progressing", "DashboardUnreachable", "Unknown")["message"]
        assert f"Bearer {HIDDEN_TOKEN}" in message

        # An operator that cannot use its key says so.
        (keys / "key").write_text(SHORT_KEY)
        testbed.wait(lambda: "key is too short" in process.log(), "the operator to complain about its key")

        tokens = {"good": good, "failing": failing, "rejected": rejected, "noisy": noisy}
        own = {"key": KEY, "previous key": PREVIOUS_KEY, "short key": SHORT_KEY, "API token": testbed.setup.token}
        values = own | OF_USER | tokens | {"encoded secret": encoded}
        found = [
            (where, what)
            for where, text in published(testbed, process).items()
            for what, value in values.items()
            if value in text
        ]
        assert found == []
        # The canaries were where they should be: each token is in the Secret of its cluster, and nowhere else.
        secrets = [item["data"]["auth_token"] for item in testbed.items("secrets") if "auth_token" in item["data"]]
        assert sorted(base64.b64decode(each).decode() for each in secrets) == sorted(tokens.values())
        others = json.dumps([testbed.items(kind) for kind in ("rayclusters", "pods", "networkpolicies")])
        assert OF_USER["literal"] in others
        assert [what for what, value in (own | tokens).items() if value in others] == []


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 No\r\nContent-Length: 82\r\nConnection: close\r\n\r\ncannot use Bearer %s",
        b"HTTP/1.1 200 OK\r\nbad header with Bearer %s\r\n\r\n",
    ],
)
def test_no_error_has_the_token_that_a_dashboard_repeats(answer: bytes) -> None:
    async def test() -> None:
        async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer % ray_polling.TOKEN.encode())
            await writer.drain()
            writer.close()

        port = local_servers.free_port()
        server = await asyncio.start_server(repeat, "127.0.0.1", port)
        async with ray_polling.connected(port, ray_polling.TOKEN) as odd:
            with pytest.raises(DashboardUnreachableError) as caught:
                await odd.job("x")
        assert ray_polling.TOKEN not in str(caught.value)
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))
