"""Changes while the operator is stopped, without watches or locked out: deleted objects, watches that end, a token that
expires."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rljob_testing.operator import api_proxy, forked_operator
from rljob_testing.operator.testbed import Testbed

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

SECRETS = f"/api/v1/namespaces/{forked_operator.OPERATOR_NAMESPACE}/secrets"
GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
BROKEN = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
PAGE = "<html><body>The proxy has restarted.</body></html>\n"
BROKEN_WATCHES: Sequence[Mapping[str, api_proxy.Fault]] = (
    {
        "rljobs": api_proxy.Fault(410, "Expired"),
        "rayclusters": api_proxy.Fault(200, "", body=PAGE),
        "pods": api_proxy.Fault(200, "", body='{"type": "MODIFIED", "object": {"kind": "Pod", "meta'),
    },
    {
        "rljobs": api_proxy.Fault(200, "", body=json.dumps({"type": "MODIFIED", "object": {"kind": "Status"}}) + "\n"),
        "rayclusters": api_proxy.Fault(200, "", body=json.dumps({"type": "ERROR", "object": GONE}) + "\n"),
        "pods": api_proxy.Fault(200, "", body='{"type": "MODIFIED", "object": {"kind": "Pod"}}\n', num_sent=20),
    },
    {"pods": api_proxy.Fault(200, "", body=json.dumps({"type": "ERROR", "object": BROKEN}) + "\n")},
    {},
)
"""The responses to the watches of each kind, in each round; in the last one their connections are cut instead."""


def test_objects_deleted_while_the_operator_was_down_are_found(
    testbed: Testbed, operator: forked_operator.OperatorProcess
) -> None:
    lost = {"cluster": "ClusterLost", "head": "HeadLost"}
    kept = ("worker", "secret", "policy")
    for name in (*lost, *kept, "itself"):
        testbed.dashboard(f"{name}-1").train_forever()
        testbed.submit(name)
    for name in (*lost, *kept, "itself"):
        testbed.wait_for(name, "Progressing", "Training")
    operator.kill()
    there = f"namespaces/{testbed.namespace}"
    secret = testbed.item_of("secret", "secrets")["metadata"]["name"]
    policy = testbed.item_of("policy", "networkpolicies")["metadata"]["name"]
    for path in (
        f"/apis/ray.io/v1/{there}/rayclusters/cluster-1",
        f"/api/v1/{there}/pods/worker-1-main-0",
        f"/api/v1/{there}/secrets/{secret}",
        f"/apis/networking.k8s.io/v1/{there}/networkpolicies/{policy}",
        f"{testbed.jobs}/itself",
    ):
        testbed.http.request("DELETE", path, json={"gracePeriodSeconds": 0}).raise_for_status()
    testbed.lose_head("head-1")
    testbed.wait(
        lambda: {"cluster-1-head-0", "head-1-head-0", "itself-1-head-0"}.isdisjoint(names_of_pods(testbed)),
        "the pods to be deleted",
    )
    for name in kept:
        testbed.dashboard(f"{name}-1").complete_after(0.1)
    operator.start()
    for name, reason in lost.items():
        testbed.wait_for(name, "Complete", "Succeeded")
        attempts = testbed.job(name)["status"]["attempts"]
        assert [(each["cluster"], each["reason"]) for each in attempts] == [
            (f"{name}-1", reason),
            (f"{name}-2", "Succeeded"),
        ]
        assert testbed.dashboard(f"{name}-2").posts == [f"{name}-2-1"]
    for name in kept:
        testbed.wait_for(name, "Complete", "Succeeded")
        assert testbed.dashboard(f"{name}-1").posts == [f"{name}-1-1"]
    testbed.wait(lambda: not testbed.items("rayclusters") and not testbed.items("pods"), "nothing to be left")
    assert testbed.http.get(f"{testbed.jobs}/itself").status_code == 404
    assert "level=error" not in operator.log()


def names_of_pods(testbed: Testbed) -> set[str]:
    return {pod["metadata"]["name"] for pod in testbed.items("pods")}


def lines_with(operator: forked_operator.OperatorProcess, words: str) -> str:
    return "\n".join(line for line in operator.log().splitlines() if words in line)


def test_an_expired_token_is_read_again(testbed: Testbed) -> None:
    account = testbed.setup.folder / "account"
    account.mkdir()
    certificate = testbed.setup.certificate
    assert certificate is not None
    (account / "ca.crt").write_bytes(certificate.read_bytes())
    testbed.http.post(SECRETS, json={"metadata": {"name": "ends"}}).raise_for_status()
    former = forked_operator.account_token(testbed.http, "ends")
    (account / "token").write_text(former)
    testbed = replace(testbed, setup=replace(testbed.setup, account=account))
    with testbed.operator().running() as operator:
        testbed.dashboard("locked-1").train_forever()
        testbed.submit("locked")
        testbed.wait_for("locked", "Progressing", "Training")
        testbed.http.delete(f"{SECRETS}/ends").raise_for_status()
        # The API server caches for some seconds which tokens it accepted.
        testbed.server.program.kill()
        testbed.restart_server()
        testbed.submit("waits")
        testbed.dashboard("locked-1").train_forever(2)
        testbed.wait(lambda: "patch rljobs/status" in lines_with(operator, "(HTTP 401)"), "a write to be rejected")
        testbed.wait(lambda: "the watches ended" in operator.log(), "the watches to be rejected")
        assert "status" not in testbed.job("waits")
        assert operator.probe("/healthz") == 200

        (account / "token").write_text(forked_operator.account_token(testbed.http))
        renewed_at = time.monotonic()
        # While listing fails, everything is listed every 5 s; a token that is cached for a minute would not be the new
        # one.
        testbed.wait(lambda: "status" in testbed.job("waits"), "the operator's token to be accepted", seconds=20)
        testbed.wait_for("waits", "Complete", "Succeeded")
        print(f"a job that waited for a token was complete {time.monotonic() - renewed_at:.1f} s after there was one")
        # The listing after the lockout found the first one; the next is a minute away.
        testbed.submit("watched")
        testbed.wait_for("watched", "Complete", "Succeeded", seconds=40)
        testbed.dashboard("locked-1").complete_after(0.1)
        testbed.wait_for("locked", "Complete", "Succeeded")
        assert operator.exit_code() is None
        assert testbed.dashboard("locked-1").posts == ["locked-1-1"]


def test_watches_that_end_in_any_way_are_restarted(testbed: Testbed) -> None:
    pending: dict[str, api_proxy.Fault] = {}

    def fault(request: api_proxy.SeenRequest) -> api_proxy.Fault | None:
        return pending.pop(request.resource, None) if request.verb == "watch" else None

    with api_proxy.running_proxy(testbed.server) as proxy:
        operator = testbed.with_server_url(proxy.url).operator()

        def begun(before: Mapping[str, int]) -> bool:
            return all(proxy.num_requests(f"watch {kind}") >= number + 2 for kind, number in before.items())

        with operator.running():
            proxy.fault = fault
            for number, broken in enumerate(BROKEN_WATCHES):
                before = {kind: proxy.num_requests(f"watch {kind}") for kind in broken}
                restarts = operator.metric("rljob_operator_watch_restarts_total")
                pending.update(broken)
                proxy.cut()
                testbed.wait(lambda before=before: begun(before), "watches that deliver events")
                began_at = time.monotonic()
                testbed.submit(f"after-{number}")
                testbed.wait_for(f"after-{number}", "Complete", "Succeeded", seconds=45)
                print(f"a job after the watches had ended: complete after {time.monotonic() - began_at:.1f} s")
                assert testbed.dashboard(f"after-{number}-1").posts == [f"after-{number}-1-1"]
                assert not pending
                restarts = operator.metric("rljob_operator_watch_restarts_total") - restarts
                # One that ends stops the others with it; a cut connection does not.
                assert restarts in range(1 if broken else 0, len(broken) + 1), operator.log()
            assert operator.probe("/healthz") == 200
            assert "a bug in the operator" not in operator.log()
