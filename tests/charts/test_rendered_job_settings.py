"""What the installer decides for jobs, as rendered by the chart: namespaces, identities, users and network policies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import pytest
from pydantic import JsonValue

from rljob_operator.settings import JobNetworkPolicy, Settings, parse_settings
from rljob_testing.cluster import charts

MONITORING: JsonValue = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
NUMBERS_OF_USERS = ("runAsUser", "runAsGroup", "fsGroup")


def pod_of(manifests: list[charts.Manifest]) -> Mapping[str, object]:
    found = charts.value_at(charts.only_of_kind(manifests, "Deployment"), "spec", "template", "spec")
    assert isinstance(found, Mapping)
    return found


def settings_of(manifests: list[charts.Manifest]) -> Settings:
    """The settings that the operator reads from the variables of its rendered pod."""
    variables = charts.items_at(pod_of(manifests), "containers", 0, "env")
    return parse_settings({str(each["name"]): str(each.get("value", "from-a-field")) for each in variables})


def test_without_a_choice_of_namespaces_nothing_is_rendered(helm: charts.Helm) -> None:
    with pytest.raises(charts.HelmError, match=r"--set 'watchNamespaces=\{team-a\}'.*--set watchAllNamespaces=true"):
        helm.rendered("watchAllNamespaces=false")
    with pytest.raises(charts.HelmError, match=r"both set; set one of them"):
        helm.rendered("watchAllNamespaces=true", "watchNamespaces={team-a}")


def test_of_a_namespaced_installation_only_the_definition_belongs_to_the_whole_cluster(helm: charts.Helm) -> None:
    def without_namespace(*settings: str) -> set[object]:
        manifests = helm.rendered(*settings, with_crd=True)
        return {each["kind"] for each in manifests if "namespace" not in dict(_mapping(each["metadata"]))}

    assert without_namespace("watchNamespaces={team-a}", "replicas=2") == {"CustomResourceDefinition"}
    assert without_namespace("watchNamespaces={team-a}", "crds.install=false") == set()
    assert without_namespace() == {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def test_jobs_may_use_only_the_listed_service_accounts(helm: charts.Helm) -> None:
    assert settings_of(helm.rendered()).service_account_names == ()
    assert settings_of(helm.rendered("jobs.serviceAccountNames={reader,s3.writer}")).service_account_names == (
        "reader",
        "s3.writer",
    )


def test_the_cluster_may_choose_all_users(helm: charts.Helm) -> None:
    """OpenShift rejects pods with a user or group of their own."""
    pod = pod_of(helm.rendered())
    assert charts.value_at(pod, "securityContext") == {
        **dict.fromkeys(NUMBERS_OF_USERS, 65532),
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert settings_of(helm.rendered()).run_as_user == 1000
    # Numbers of this size are written as 1.00065e+09 by Helm, unless a template prevents it.
    assert settings_of(helm.rendered("jobs.runAsUser=1000650000")).run_as_user == 1000650000

    nulls = [f"podSecurityContext.{name}=null" for name in NUMBERS_OF_USERS]
    manifests = helm.rendered(*nulls, "jobs.runAsUser=null")
    assert charts.value_at(pod_of(manifests), "securityContext") == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert settings_of(manifests).run_as_user is None
    bare = pod_of(helm.rendered("podSecurityContext=null", "securityContext=null"))
    assert "securityContext" not in bare
    assert "securityContext" not in charts.items_at(bare, "containers")[0]


def test_rules_for_the_network_policies_of_jobs_reach_the_operator(helm: charts.Helm) -> None:
    assert settings_of(helm.rendered()).job_network_policy == JobNetworkPolicy()
    rule: JsonValue = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    values = {
        "metricsFrom": [MONITORING],
        "metricsPort": 9999,
        "ingress": [{"from": [{"podSelector": {}}]}],
        "restrictEgress": True,
        "dnsTo": [MONITORING],
        "egress": [rule],
    }
    found = settings_of(helm.rendered(json.dumps({"jobs": {"networkPolicy": values}}))).job_network_policy
    assert found == JobNetworkPolicy(
        enabled=True,
        ingress=({"from": [{"podSelector": {}}]},),
        metrics_from=(MONITORING,),
        metrics_port=9999,
        restrict_egress=True,
        dns_to=(MONITORING,),
        egress=(rule,),
    )
    assert settings_of(helm.rendered("jobs.networkPolicy.ingress=null")).job_network_policy == JobNetworkPolicy()


def test_without_network_policies_the_operator_has_no_permission_for_them(helm: charts.Helm) -> None:
    manifests = helm.rendered("jobs.networkPolicy.enabled=false")
    assert not settings_of(manifests).job_network_policy.enabled
    rights = list(charts.granted_rights(charts.only_of_kind(manifests, "ClusterRole")))
    assert [right for right in rights if right[1] == "networkpolicies"] == []
    assert len(rights) == 15


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("jobs.allowedLabelPrefixes={team}", "at '/jobs/allowedLabelPrefixes/0'"),
        ("jobs.serviceAccountNames={A}", "at '/jobs/serviceAccountNames/0'"),
        ("jobs.runAsUser=0", "at '/jobs/runAsUser'"),
        ("jobs.runAsUser=nobody", "at '/jobs/runAsUser'"),
        ("jobs.networkPolicy.metricsPort=0", "at '/jobs/networkPolicy/metricsPort'"),
        ("jobs.networkPolicy.ingress[0].form[0].podSelector.a=b", "additional properties 'form' not allowed"),
        ("jobs.networkPolicy.metricsFrom[0].pods.a=b", "additional properties 'pods' not allowed"),
        ("jobs.networkPolicy.egress[0].ports[0].port=443", "at '/jobs/networkPolicy/egress'"),
        ("jobs.networkPolicy=null", "at '/jobs': missing property 'networkPolicy'"),
        ("networkPolicy.metricsFrom[0].pods.a=b", "additional properties 'pods' not allowed"),
        ("podSecurityContext=restricted", "at '/podSecurityContext'"),
    ],
)
def test_a_wrong_value_for_jobs_is_rejected_by_its_name(helm: charts.Helm, setting: str, where: str) -> None:
    with pytest.raises(charts.HelmError, match=re.escape(where)):
        helm.rendered(setting)
