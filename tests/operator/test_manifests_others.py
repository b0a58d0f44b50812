"""Secret, network policy, names and the request to Ray's Jobs API."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_operator.errors import SettingsError
from rljob_operator.manifests.access import derived_token, key_id, network_policy, token_secret
from rljob_operator.manifests.naming import attempt_in_name, cluster_name, companion_name, submission_id
from rljob_operator.manifests.ownership import JobIdentity, Manifest
from rljob_operator.manifests.ray_submission import submission
from rljob_operator.settings import JobNetworkPolicy
from rljob_testing.operator import inputs

CHART = Path(__file__).parents[2] / "charts" / "rljob-operator"
OWNER = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "name": "example",
    "uid": "0f8fad5b-d9cb-469f-a165-70867728950e",
    "controller": True,
}
LABELS = {
    "app.kubernetes.io/managed-by": "rljob-operator",
    "rljob.dev/job": "example",
    "rljob.dev/job-uid": "0f8fad5b-d9cb-469f-a165-70867728950e",
}


def test_kuberay_keeps_the_longest_names_whole() -> None:
    cluster = cluster_name("j" * 46, 64)
    assert cluster == "j" * 46 + "-64"
    assert len(cluster) <= 50
    assert len(f"{cluster}-head-svc") <= 63
    assert submission_id("example", 2, 3) == "example-2-3"


@pytest.mark.parametrize("attempt", [1, 999, 1000, 1007, 12_345])
def test_the_number_in_a_name_gives_the_same_name(attempt: int) -> None:
    name = cluster_name("my-job-7", attempt)
    assert cluster_name("my-job-7", attempt_in_name(name)) == name


def test_two_jobs_of_one_name_share_neither_token_nor_secret() -> None:
    other = JobIdentity("team-a", "example", "7c9e6679-7425-40de-944b-e07fc1f90ae7")
    assert derived_token(b"key", inputs.IDENTITY, "example-1") != derived_token(b"key", other, "example-1")
    assert derived_token(b"key", inputs.IDENTITY, "example-1") != derived_token(b"key", inputs.IDENTITY, "example-2")
    assert derived_token(b"key", inputs.IDENTITY, "example-1") != derived_token(
        b"another", inputs.IDENTITY, "example-1"
    )
    assert companion_name("example-1", inputs.IDENTITY.uid) != companion_name("example-1", other.uid)


def test_the_token_is_the_keyed_hash_of_job_and_cluster() -> None:
    message = b"0f8fad5b-d9cb-469f-a165-70867728950e/example-1"
    assert derived_token(b"key", inputs.IDENTITY, "example-1") == hmac.new(b"key", message, hashlib.sha256).hexdigest()
    # First digits of the SHA-256 of "key", from sha256sum.
    assert key_id(b"key") == "2c70e12b"


def test_the_secret_is_deleted_with_the_job() -> None:
    assert token_secret(inputs.IDENTITY, "example-1", b"key") == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": "example-1-0f8fad5b-2c70e12b",
            "namespace": "team-a",
            "labels": LABELS,
            "ownerReferences": [OWNER],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {"auth_token": derived_token(b"key", inputs.IDENTITY, "example-1")},
    }


def test_only_the_attempts_own_pods_and_the_operator_reach_its_pods() -> None:
    pods = {"matchLabels": {"rljob.dev/job-uid": "0f8fad5b-d9cb-469f-a165-70867728950e", "rljob.dev/attempt": "2"}}
    assert network_policy(inputs.IDENTITY, 2, inputs.DEFAULTS) == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": "example-2-0f8fad5b",
            "namespace": "team-a",
            "labels": LABELS | {"rljob.dev/attempt": "2"},
            "ownerReferences": [OWNER],
        },
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": pods}]},
                {
                    "from": [
                        {
                            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "rljob-system"}},
                            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "rljob-operator"}},
                        }
                    ],
                    "ports": [{"protocol": "TCP", "port": 8265}],
                },
            ],
        },
    }


def test_the_installer_adds_rules_to_the_network_policy() -> None:
    pods = {"matchLabels": {"rljob.dev/job-uid": "0f8fad5b-d9cb-469f-a165-70867728950e", "rljob.dev/attempt": "1"}}
    monitoring: Manifest = {"podSelector": {}}
    hub: Manifest = {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}
    gateway: Manifest = {"from": [{"ipBlock": {"cidr": "10.2.0.0/16"}}], "ports": [{"port": 8265}]}
    added = JobNetworkPolicy(
        ingress=(gateway,), metrics_from=(monitoring,), metrics_port=9999, restrict_egress=True, egress=(hub,)
    )
    plain = spec_of(network_policy(inputs.IDENTITY, 1, inputs.DEFAULTS))
    found = spec_of(network_policy(inputs.IDENTITY, 1, replace(inputs.DEFAULTS, network_policy=added)))
    ingress = plain["ingress"]
    assert isinstance(ingress, list)
    metrics: Manifest = {"from": [monitoring], "ports": [{"protocol": "TCP", "port": 9999}]}
    assert found == {
        "podSelector": pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [*ingress, metrics, gateway],
        "egress": [
            {"to": [{"podSelector": pods}]},
            {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
            hub,
        ],
    }
    dns: Manifest = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    few = network_policy(inputs.IDENTITY, 1, replace(inputs.DEFAULTS, network_policy=replace(added, dns_to=(dns,))))
    egress = spec_of(few)["egress"]
    assert isinstance(egress, list)
    assert egress[1] == {"to": [dns], "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def spec_of(policy: Manifest) -> Manifest:
    spec = policy["spec"]
    assert isinstance(spec, dict)
    return spec


def test_a_default_ray_that_is_too_old_is_rejected_and_the_charts_is_not() -> None:
    values = YAML(typ="safe").load((CHART / "values.yaml").read_text(encoding="utf-8"))
    replace(inputs.DEFAULTS, ray_version=values["trainer"]["rayVersion"])
    for version in ("2.53.9", "newest"):
        with pytest.raises(SettingsError, match=rf"at least 2\.54\.0, such as 2\.60\.0 \(seen: '{version}'\)"):
            replace(inputs.DEFAULTS, ray_version=version)


def test_the_submission_is_a_constant_command_and_data() -> None:
    assert submission(inputs.IDENTITY, inputs.spec(), "example-1-2", attempt=1, start_number=1_700_000_002) == {
        "entrypoint": "python -m rljob_trainer",
        "submission_id": "example-1-2",
        "runtime_env": {
            "env_vars": {
                "RLJOB_ATTEMPT": "1",
                "RLJOB_START_NUMBER": "1700000002",
                "RLJOB_RUN_STATE_FILE": "/tmp/ray/session_latest/logs/rljob-run-state-example-1-2.json",
                "RAY_JOB_STOP_WAIT_TIME_S": "110",
            }
        },
        "metadata": {"rljob.dev/job-uid": "0f8fad5b-d9cb-469f-a165-70867728950e"},
    }


def test_a_short_grace_period_leaves_ray_a_second() -> None:
    short = inputs.spec({"runPolicy.gracePeriodSeconds": 5})
    body = submission(inputs.IDENTITY, short, "example-1-1", 1, 1)
    environment = body["runtime_env"]
    assert isinstance(environment, dict)
    assert isinstance(environment["env_vars"], dict)
    assert environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "1"
