"""What changes while the operator is away, deaf or locked out: objects deleted, watches that end, a token that ends."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rljob_testing.api_proxy import Fault, SeenRequest, api_proxy
from rljob_testing.job_place import JobPlace
from rljob_testing.kuberay_stand_in import ClusterScript
from rljob_testing.operator_process import OPERATOR_NAMESPACE, OperatorProcess, account_token
from rljob_testing.ray_dashboard_stand_in import running_for_ever, succeeding

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

SECRETS = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets"
GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
BROKEN = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
PAGE = "<html><body>The proxy has restarted.</body></html>\n"
BROKEN_WATCHES: Sequence[Mapping[str, Fault]] = (
    {
        "rljobs": Fault(410, "Expired"),
        "rayclusters": Fault(200, "", body=PAGE),
        "pods": Fault(200, "", body='{"type": "MODIFIED", "object": {"kind": "Pod", "meta'),
    },
    {
        "rljobs": Fault(200, "", body=json.dumps({"type": "MODIFIED", "object": {"kind": "Status"}}) + "\n"),
        "rayclusters": Fault(200, "", body=json.dumps({"type": "ERROR", "object": GONE}) + "\n"),
        "pods": Fault(200, "", body='{"type": "MODIFIED", "object": {"kind": "Pod"}}\n', num_sent=20),
    },
    {"pods": Fault(200, "", body=json.dumps({"type": "ERROR", "object": BROKEN}) + "\n")},
    {},
)
"""How the watches of each kind are answered, in each round; in the last one their connections are cut, no more."""


def test_what_was_deleted_while_the_operator_was_away(place: JobPlace, operator: OperatorProcess) -> None:
    lost = {"cluster": "ClusterLost", "head": "HeadLost"}
    kept = ("worker", "secret", "policy")
    for name in (*lost, *kept, "itself"):
        place.dashboard(f"{name}-1").life = running_for_ever()
        place.submit(name)
    for name in (*lost, *kept, "itself"):
        place.wait_for(name, "Progressing", "Training")
    operator.kill()
    there = f"namespaces/{place.namespace}"
    secret = place.item_of("secret", "secrets")["metadata"]["name"]
    policy = place.item_of("policy", "networkpolicies")["metadata"]["name"]
    for path in (
        f"/apis/ray.io/v1/{there}/rayclusters/cluster-1",
        f"/api/v1/{there}/pods/worker-1-main-0",
        f"/api/v1/{there}/secrets/{secret}",
        f"/apis/networking.k8s.io/v1/{there}/networkpolicies/{policy}",
        f"{place.jobs}/itself",
    ):
        place.http.request("DELETE", path, json={"gracePeriodSeconds": 0}).raise_for_status()
    place.script("head-1", ClusterScript(missing=("head-0",)))
    place.wait(
        lambda: {"cluster-1-head-0", "head-1-head-0", "itself-1-head-0"}.isdisjoint(names_of_pods(place)),
        "the pods to go",
    )
    for name in kept:
        place.dashboard(f"{name}-1").life = succeeding(0.1)
    operator.start()
    for name, reason in lost.items():
        place.wait_for(name, "Complete", "Succeeded")
        attempts = place.job(name)["status"]["attempts"]
        assert [(each["cluster"], each["reason"]) for each in attempts] == [
            (f"{name}-1", reason),
            (f"{name}-2", "Succeeded"),
        ]
        assert place.dashboard(f"{name}-2").posts == [f"{name}-2-1"]
    for name in kept:
        place.wait_for(name, "Complete", "Succeeded")
        assert place.dashboard(f"{name}-1").posts == [f"{name}-1-1"]
    place.wait(lambda: not place.items("rayclusters") and not place.items("pods"), "nothing to be left")
    assert place.http.get(f"{place.jobs}/itself").status_code == 404
    assert "level=error" not in operator.log()


def names_of_pods(place: JobPlace) -> set[str]:
    return {pod["metadata"]["name"] for pod in place.items("pods")}


def lines_with(operator: OperatorProcess, words: str) -> str:
    return "\n".join(line for line in operator.log().splitlines() if words in line)


def test_a_token_that_ends_is_read_again(place: JobPlace) -> None:
    account = place.setup.folder / "account"
    account.mkdir()
    certificate = place.setup.certificate
    assert certificate is not None
    (account / "ca.crt").write_bytes(certificate.read_bytes())
    place.http.post(SECRETS, json={"metadata": {"name": "ends"}}).raise_for_status()
    former = account_token(place.http, "ends")
    (account / "token").write_text(former)
    place = replace(place, setup=replace(place.setup, account=account))
    operator = place.operator()
    operator.start()
    try:
        operator.wait_until_healthy()
        place.dashboard("locked-1").life = running_for_ever()
        place.submit("locked")
        place.wait_for("locked", "Progressing", "Training")
        place.http.delete(f"{SECRETS}/ends").raise_for_status()
        # It remembers for some seconds whom it has let in.
        place.server.program.kill()
        place.start_server_again()
        place.submit("waits")
        place.dashboard("locked-1").life = running_for_ever(2)
        place.wait(lambda: "patch rljobs/status" in lines_with(operator, "(HTTP 401)"), "a write to be refused")
        place.wait(lambda: "the watches ended" in operator.log(), "the watches to be refused")
        assert "status" not in place.job("waits")
        assert operator.probe("/healthz") == 200

        (account / "token").write_text(account_token(place.http))
        renewed_at = time.monotonic()
        # Everything is listed every 5 s while that fails; a token that is kept for a minute would not be the new one.
        place.wait(lambda: "status" in place.job("waits"), "the operator to be let in", seconds=20)
        place.wait_for("waits", "Complete", "Succeeded")
        print(f"a job that waited for a token was complete {time.monotonic() - renewed_at:.1f} s after there was one")
        # The listing after the lockout found the first one; the next is a minute away.
        place.submit("watched")
        place.wait_for("watched", "Complete", "Succeeded", seconds=40)
        place.dashboard("locked-1").life = succeeding(0.1)
        place.wait_for("locked", "Complete", "Succeeded")
        assert operator.exit_code() is None
        assert place.dashboard("locked-1").posts == ["locked-1-1"]
    finally:
        operator.kill()


def test_watches_end_in_any_way_and_begin_anew(place: JobPlace) -> None:
    pending: dict[str, Fault] = {}

    def fault(request: SeenRequest) -> Fault | None:
        return pending.pop(request.resource, None) if request.verb == "watch" else None

    with api_proxy(place.server) as proxy:
        operator = place.through(proxy.url).operator()

        def begun(before: Mapping[str, int]) -> bool:
            return all(proxy.num_asked(f"watch {kind}") >= number + 2 for kind, number in before.items())

        operator.start()
        try:
            operator.wait_until_healthy()
            proxy.fault = fault
            for number, broken in enumerate(BROKEN_WATCHES):
                before = {kind: proxy.num_asked(f"watch {kind}") for kind in broken}
                restarts = operator.metric("rljob_operator_watch_restarts_total")
                pending.update(broken)
                proxy.cut()
                place.wait(lambda before=before: begun(before), "watches that bring something")
                began_at = time.monotonic()
                place.submit(f"after-{number}")
                place.wait_for(f"after-{number}", "Complete", "Succeeded", seconds=45)
                print(f"a job after the watches had ended: complete after {time.monotonic() - began_at:.1f} s")
                assert place.dashboard(f"after-{number}-1").posts == [f"after-{number}-1-1"]
                assert not pending
                restarts = operator.metric("rljob_operator_watch_restarts_total") - restarts
                # One that ends takes the others with it; a connection that is cut is no reason.
                assert restarts in range(1 if broken else 0, len(broken) + 1), operator.log()
            assert operator.probe("/healthz") == 200
            assert "mistake in the operator" not in operator.log()
        finally:
            operator.kill()
