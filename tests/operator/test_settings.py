"""The operator's environment variables: what is read, what is rejected, and the messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from rljob_operator.errors import SettingsError
from rljob_operator.handlers.operator_process import run_operator
from rljob_operator.settings import JobNetworkPolicy, parse_settings, read_token_keys
from rljob_testing.messages import Mentions

NEEDED: Mapping[str, str] = {
    "RLJOB_OPERATOR_RAY_VERSION": "2.60.0",
    "RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": "/keys",
    "RLJOB_OPERATOR_POD_NAME": "operator-0",
    "RLJOB_OPERATOR_POD_NAMESPACE": "rljob-system",
}


def test_omitted_settings_have_defaults() -> None:
    settings = parse_settings(NEEDED)
    assert settings.namespaces == ()
    assert settings.trainer_image is None
    assert (settings.image_pull_policy, settings.leader_election, settings.max_concurrent_reconciles) == (
        "IfNotPresent",
        True,
        8,
    )
    assert settings.allowed_label_prefixes == settings.service_account_names == ()
    assert (settings.run_as_user, settings.job_network_policy) == (1000, JobNetworkPolicy())
    assert (settings.health_port, settings.metrics_port, settings.log_level) == (8080, 9090, "info")
    url = settings.dashboard_url.format(cluster="sorter-1", namespace="team-a")
    assert url == "http://sorter-1-head-svc.team-a.svc:8265"


def test_all_settings_are_read() -> None:
    settings = parse_settings(
        {
            **NEEDED,
            "RLJOB_OPERATOR_NAMESPACES": "team-a, team-b,team-a",
            "RLJOB_OPERATOR_TRAINER_IMAGE": "example/trainer:1",
            "RLJOB_OPERATOR_IMAGE_PULL_POLICY": "never",
            "RLJOB_OPERATOR_LEASE_NAME": "lease",
            "RLJOB_OPERATOR_MAX_CONCURRENT_RECONCILES": "16",
            "RLJOB_OPERATOR_LOG_LEVEL": "DEBUG",
            "RLJOB_OPERATOR_POD_LABELS": "app.kubernetes.io/name=rljob-operator, tier=",
            "RLJOB_OPERATOR_ALLOWED_LABEL_PREFIXES": "volcano.sh/, example.com/team-,volcano.sh/",
            "RLJOB_OPERATOR_SERVICE_ACCOUNT_NAMES": "reader,s3.writer",
            "RLJOB_OPERATOR_RUN_AS_USER": "none",
            "RLJOB_OPERATOR_JOB_NETWORK_POLICY": '{"enabled": false, "metricsFrom": [{"podSelector": {}}]}',
            "RLJOB_OPERATOR_DASHBOARD_URL": "http://localhost:1/{namespace}/{cluster}/",
            "RLJOB_OPERATOR_HEALTH_PORT": "1",
            "RLJOB_OPERATOR_METRICS_PORT": "65535",
            "RLJOB_OPERATOR_LEADER_ELECTION": "False",
            "RLJOB_OPERATOR_KUEUE": "True",
            "KUBECONFIG": "/kube/config",
        }
    )
    assert settings.namespaces == ("team-a", "team-b")
    assert (settings.trainer_image, settings.image_pull_policy) == ("example/trainer:1", "Never")
    assert (settings.lease_name, settings.max_concurrent_reconciles, settings.log_level) == ("lease", 16, "debug")
    assert settings.pod_labels == {"app.kubernetes.io/name": "rljob-operator", "tier": ""}
    assert settings.allowed_label_prefixes == ("volcano.sh/", "example.com/team-")
    assert settings.service_account_names == ("reader", "s3.writer")
    assert settings.run_as_user is None
    assert settings.job_network_policy == JobNetworkPolicy(enabled=False, metrics_from=({"podSelector": {}},))
    assert settings.dashboard_url == "http://localhost:1/{namespace}/{cluster}"
    assert (settings.health_port, settings.metrics_port, settings.leader_election) == (1, 65535, False)
    assert settings.kubeconfig == "/kube/config"
    assert settings.kueue
    assert settings.token_keys_folder == Path("/keys")


@pytest.mark.parametrize("name", NEEDED)
def test_missing_settings_are_named(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name}: is not set; set"):
        parse_settings({**NEEDED, name: " "})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAX_CONCURRENT_RECONCILES", "0", "from 1 to 1024 (seen: '0')"),
        ("MAX_CONCURRENT_RECONCILES", "²", "from 1 to 1024 (seen: '²')"),
        ("HEALTH_PORT", "70000", "from 1 to 65535 (seen: '70000')"),
        ("LOG_LEVEL", "loud", "unknown value (seen: 'loud'); use one of debug, info, warning, error"),
        ("LEADER_ELECTION", "maybe", "unknown value (seen: 'maybe'); use one of true, false"),
        ("NAMESPACES", "team-a,Team_B", "not a namespace (seen: 'Team_B')"),
        ("POD_LABELS", "a=b,c", "(seen: 'c'); use key=value"),
        ("ALLOWED_LABEL_PREFIXES", "team,volcano.sh/", "not the beginning of a label key (seen: 'team'); use a domain"),
        ("ALLOWED_LABEL_PREFIXES", "/", "not the beginning of a label key (seen: '/')"),
        ("ALLOWED_LABEL_PREFIXES", "rljob.dev/job", "begin with rljob.dev/, ray.io/, kueue.x-k8s.io/ belong"),
        ("ALLOWED_LABEL_PREFIXES", "ray.io/", "belong to the operator, KubeRay and Kueue (seen: 'ray.io/')"),
        ("SERVICE_ACCOUNT_NAMES", "reader,Writer", "not a name (seen: 'Writer')"),
        ("RUN_AS_USER", "0", "from 1 to 2147483647 (seen: '0')"),
        ("JOB_NETWORK_POLICY", "{", "not JSON (Expecting property name"),
        ("JOB_NETWORK_POLICY", "[]", "not a JSON object (seen: '[]')"),
        ("JOB_NETWORK_POLICY", '{"ingres": []}', "ingres: unknown field; remove it"),
        ("JOB_NETWORK_POLICY", '{"enabled": "yes"}', "enabled: must be true or false (seen: 'yes')"),
        ("JOB_NETWORK_POLICY", '{"metricsPort": true}', "metricsPort: not a port (seen: True)"),
        ("JOB_NETWORK_POLICY", '{"ingress": {}}', "ingress: not a list (seen: {}); use a list"),
        ("JOB_NETWORK_POLICY", '{"ingress": ["any"]}', "ingress[0]: not an object (seen: 'any')"),
        ("JOB_NETWORK_POLICY", '{"ingress": [{"to": []}]}', "ingress[0].to: unknown field; use one of from, ports"),
        ("JOB_NETWORK_POLICY", '{"ingress": [{"ports": 1}]}', "ingress[0].ports: not a list (seen: 1)"),
        ("JOB_NETWORK_POLICY", '{"metricsFrom": [{}]}', "metricsFrom[0]: selects nothing; set one of ipBlock"),
        ("JOB_NETWORK_POLICY", '{"egress": [{}]}', "egress: has no effect; set restrictEgress to true"),
        ("JOB_NETWORK_POLICY", '{"ingress": [{"from": []}]}', "ingress[0].from: an empty list allows every address"),
        ("JOB_NETWORK_POLICY", '{"ingress": [{"from": null}]}', "ingress[0].from: an empty list allows every address"),
        (
            "JOB_NETWORK_POLICY",
            '{"restrictEgress": true, "egress": [{"to": []}]}',
            "egress[0].to: an empty list",
        ),
        ("JOB_NETWORK_POLICY", '{"metricsFrom": [{"podSelector": null}]}', "metricsFrom[0].podSelector: not an object"),
        (
            "JOB_NETWORK_POLICY",
            '{"metricsPort": 8265}',
            "metricsPort: a port on which Ray can be controlled",
        ),
        (
            "JOB_NETWORK_POLICY",
            '{"metricsPort": 6379}',
            "Ray can be controlled (seen: 6379)",
        ),
        ("JOB_NETWORK_POLICY", '{"dnsTo": [{"podSelector": {}}]}', "dnsTo: has no effect; set restrictEgress to true"),
        ("JOB_NETWORK_POLICY", '{"enabled": true, "enabled": false}', "enabled: set more than once in one object"),
        ("JOB_NETWORK_POLICY", '{"ingress": [{"ports": [], "ports": []}]}', "ports: set more than once in one object"),
        ("JOB_NETWORK_POLICY", '{"ingress": [{"ports": [{"port": NaN}]}]}', "not JSON (seen: NaN)"),
        pytest.param("JOB_NETWORK_POLICY", 100_000 * "[", "nested too deeply", id="deep"),
        (
            "JOB_NETWORK_POLICY",
            '{"restrictEgress": true, "egress": [{"to": [{"pods": {}}]}]}',
            "egress[0].to[0].pods: unknown field; use one of ipBlock, namespaceSelector, podSelector",
        ),
        ("DASHBOARD_URL", "http://fixed:8265", "not a URL with {cluster} and {namespace} (seen: 'http://fixed:8265')"),
        ("DASHBOARD_URL", "http://{cluster}:8265", "not a URL with {cluster} and {namespace}"),
        ("DASHBOARD_URL", "http://proxy/{namespace}", "not a URL with {cluster} and {namespace}"),
        ("DASHBOARD_URL", "http://{name}:8265", "not a URL with {cluster} and {namespace}"),
        ("DASHBOARD_URL", "{cluster}.{namespace}", "not a URL with {cluster} and {namespace}"),
        ("IMAGE_PULL_POLICY", "Sometimes", "use one of Always, IfNotPresent, Never"),
    ],
)
def test_an_invalid_setting_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({**NEEDED, f"RLJOB_OPERATOR_{name}": value})
    assert str(caught.value).startswith(f"RLJOB_OPERATOR_{name}: ")
    assert message in str(caught.value)


def test_an_unsupported_ray_version_is_rejected_before_a_replica_waits_for_leadership(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    folder = {"RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(tmp_path), "KUBECONFIG": str(tmp_path / "missing")}
    settings = parse_settings(NEEDED | folder | {"RLJOB_OPERATOR_RAY_VERSION": "2.9.0"})
    with pytest.raises(SettingsError) as caught:
        asyncio.run(run_operator(settings))
    assert str(caught.value) == Mentions("RLJOB_OPERATOR_RAY_VERSION", "'2.9.0'", "trainer.rayVersion")


def test_token_keys_are_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"key: .*missing; mount the Secret"):
        read_token_keys(tmp_path)
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(SettingsError, match=r"key: .*5 bytes.*16 random"):
        read_token_keys(tmp_path)
    (tmp_path / "key").write_bytes(b"0123456789abcdef\n")
    assert read_token_keys(tmp_path).keys == (b"0123456789abcdef",)
    (tmp_path / "previous-key").write_bytes(b"")
    assert read_token_keys(tmp_path).keys == (b"0123456789abcdef",)
    (tmp_path / "previous-key").write_bytes(b"fedcba9876543210")
    keys = read_token_keys(tmp_path)
    assert (keys.current, keys.keys) == (b"0123456789abcdef", (b"0123456789abcdef", b"fedcba9876543210"))
    (tmp_path / "previous-key").unlink()
    (tmp_path / "previous-key").mkdir()
    with pytest.raises(SettingsError, match="previous-key: cannot be read"):
        read_token_keys(tmp_path)
