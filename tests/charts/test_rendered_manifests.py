"""The rendered manifests of the chart, read as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_operator.settings import PREFIX, parse_settings
from rljob_testing.cluster import charts

REPOSITORY = Path(__file__).parents[2]
TWO_NAMESPACES = "watchNamespaces={team-a,team-b}"
IN_JOB_NAMESPACES = {
    ("rljob.dev", "rljobs", "get"),
    ("rljob.dev", "rljobs", "list"),
    ("rljob.dev", "rljobs", "watch"),
    ("rljob.dev", "rljobs", "delete"),
    ("rljob.dev", "rljobs/status", "patch"),
    ("ray.io", "rayclusters", "get"),
    ("ray.io", "rayclusters", "list"),
    ("ray.io", "rayclusters", "watch"),
    ("ray.io", "rayclusters", "create"),
    ("ray.io", "rayclusters", "delete"),
    ("", "pods", "list"),
    ("", "pods", "watch"),
    ("", "events", "list"),
    ("", "secrets", "create"),
    ("networking.k8s.io", "networkpolicies", "list"),
    ("networking.k8s.io", "networkpolicies", "create"),
    ("networking.k8s.io", "networkpolicies", "patch"),
    ("events.k8s.io", "events", "create"),
}
FOR_THE_LEASE = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")}
OF_NODES = [("coordination.k8s.io", "leases", "get")]
LEASE_ROLE = ("rljob-system", "rljob-operator-lease")
NODES_ROLE = ("kube-node-lease", "rljob-operator-nodes-rljob-system")


def pod_of(manifests: list[charts.Manifest]) -> object:
    return charts.value_at(charts.only_of_kind(manifests, "Deployment"), "spec", "template", "spec")


def test_helm_lint_reports_nothing(helm: charts.Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(charts.CHART))


def test_cluster_wide_permissions_are_exactly_those_that_are_used(helm: charts.Helm) -> None:
    manifests = helm.rendered()
    assert sorted(charts.granted_rights(charts.only_of_kind(manifests, "ClusterRole"))) == sorted(IN_JOB_NAMESPACES)
    assert rights_by_role(manifests) == {LEASE_ROLE: sorted(FOR_THE_LEASE), NODES_ROLE: OF_NODES}
    assert bound(manifests) == {
        ("ClusterRole", "rljob-operator", ""),
        ("Role", "rljob-operator-lease", "rljob-system"),
        ("Role", "rljob-operator-nodes-rljob-system", "kube-node-lease"),
    }


def test_kueue_adds_only_the_right_to_read_workloads(helm: charts.Helm) -> None:
    granted = charts.granted_rights(charts.only_of_kind(helm.rendered("kueue.enabled=true"), "ClusterRole"))
    assert set(granted) - IN_JOB_NAMESPACES == {
        ("kueue.x-k8s.io", "workloads", "list"),
        ("kueue.x-k8s.io", "workloads", "watch"),
    }


def rights_by_role(manifests: list[charts.Manifest]) -> dict[tuple[object, object], list[tuple[str, str, str]]]:
    """What each Role allows, by its namespace and name."""
    return {
        (charts.value_at(role, "metadata", "namespace"), charts.value_at(role, "metadata", "name")): sorted(
            charts.granted_rights(role)
        )
        for role in charts.of_kind(manifests, "Role")
    }


def test_namespaced_permissions_are_the_same_in_each_namespace_and_nowhere_else(helm: charts.Helm) -> None:
    manifests = helm.rendered(TWO_NAMESPACES)
    assert charts.of_kind(manifests, "ClusterRole") == charts.of_kind(manifests, "ClusterRoleBinding") == []
    assert rights_by_role(manifests) == {
        ("team-a", "rljob-operator"): sorted(IN_JOB_NAMESPACES),
        ("team-b", "rljob-operator"): sorted(IN_JOB_NAMESPACES),
        LEASE_ROLE: sorted(FOR_THE_LEASE),
        NODES_ROLE: OF_NODES,
    }
    assert bound(manifests) == {
        ("Role", "rljob-operator", "team-a"),
        ("Role", "rljob-operator", "team-b"),
        ("Role", "rljob-operator-lease", "rljob-system"),
        ("Role", "rljob-operator-nodes-rljob-system", "kube-node-lease"),
    }


def bound(manifests: list[charts.Manifest]) -> set[tuple[object, object, object]]:
    """(kind of role, its name, namespace) of every binding, after checking that all bind only the operator."""
    found = set()
    for binding in charts.of_kind(manifests, "ClusterRoleBinding") + charts.of_kind(manifests, "RoleBinding"):
        operator = {"kind": "ServiceAccount", "name": "rljob-operator", "namespace": "rljob-system"}
        assert charts.items_at(binding, "subjects") == [operator]
        metadata = charts.value_at(binding, "metadata")
        namespace = charts.value_at(metadata, "namespace") if binding["kind"] == "RoleBinding" else ""
        found.add((charts.value_at(binding, "roleRef", "kind"), charts.value_at(binding, "roleRef", "name"), namespace))
    return found


def test_only_the_operators_own_lease_can_be_changed(helm: charts.Helm) -> None:
    roles = [
        role
        for role in charts.of_kind(helm.rendered(), "Role")
        if charts.value_at(role, "metadata", "namespace") == "rljob-system"
    ]
    rules = charts.items_at(charts.only_of_kind(roles, "Role"), "rules")
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in rules] == [
        (["create"], None),
        (["get", "update"], ["rljob-operator"]),
    ]
    container = charts.value_at(pod_of(helm.rendered()), "containers", 0)
    assert {"name": "RLJOB_OPERATOR_LEASE_NAME", "value": "rljob-operator"} in charts.items_at(container, "env")


def test_numeric_names_stay_strings(helm: charts.Helm) -> None:
    text = helm(
        *("template", "2024", str(charts.CHART), "--namespace=2025"),
        *("--set-json", 'watchNamespaces=["2026"]', "--set-string", "fullnameOverride=2027,priorityClassName=2028"),
        *("--set", "metrics.serviceMonitor.enabled=true,replicas=2,crds.install=false"),
    )
    found = [scalar for manifest in YAML(typ="safe").load_all(text) for scalar in scalars(manifest)]
    assert {scalar for scalar in found if isinstance(scalar, str)} >= {"2024", "2025", "2026", "2027", "2028"}
    assert [scalar for scalar in found if scalar in range(2024, 2029)] == []


def scalars(value: object) -> Iterator[object]:
    """All values at the leaves of a manifest."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from scalars(each)
    else:
        yield value


@pytest.mark.parametrize("settings", [(), (TWO_NAMESPACES,)])
def test_no_permission_is_a_wildcard(helm: charts.Helm, settings: tuple[str, ...]) -> None:
    manifests = helm.rendered(*settings)
    for role in charts.of_kind(manifests, "ClusterRole") + charts.of_kind(manifests, "Role"):
        for permission in charts.granted_rights(role):
            assert "*" not in permission


def test_the_operator_reads_what_the_chart_sets(helm: charts.Helm) -> None:
    settings = (
        TWO_NAMESPACES,
        "trainer.image=registry.local:5000/trainer:9",
        "maxConcurrentReconciles=3",
        "kueue.enabled=true",
        "logLevel=debug",
        "jobs.allowedLabelPrefixes={volcano.sh/,example.com/team-}",
    )
    variables = charts.items_at(pod_of(helm.rendered(*settings)), "containers", 0, "env")
    metadata = {"metadata.name": "operator-1", "metadata.namespace": "rljob-system"}
    environment = {
        str(variable["name"]): str(
            variable["value"]
            if "value" in variable
            else metadata[str(charts.value_at(variable, "valueFrom", "fieldRef", "fieldPath"))]
        )
        for variable in variables
    }
    found = parse_settings(environment)
    assert found.namespaces == ("team-a", "team-b")
    assert found.trainer_image == "registry.local:5000/trainer:9"
    assert found.ray_version == "2.60.0"
    assert found.image_pull_policy == "IfNotPresent"
    assert (found.pod_name, found.pod_namespace) == ("operator-1", "rljob-system")
    assert found.lease_name == "rljob-operator"
    assert found.leader_election
    assert found.max_concurrent_reconciles == 3
    assert found.kueue
    assert found.log_level == "debug"
    assert found.allowed_label_prefixes == ("volcano.sh/", "example.com/team-")
    ports = {charts.value_at(port, "name"): charts.value_at(port, "containerPort") for port in ports_of(helm)}
    assert ports == {"health": found.health_port, "metrics": found.metrics_port}
    mounts = {charts.value_at(mount, "name"): charts.value_at(mount, "mountPath") for mount in mounts_of(helm)}
    assert mounts["token-keys"] == str(found.token_keys_folder)
    # A variable with a misspelt name would be ignored: each name must occur in the operator's code.
    code = (REPOSITORY / "operator/src/rljob_operator/settings.py").read_text()
    assert {name for name in environment if f'"{name.removeprefix(PREFIX)}"' not in code} == set()


def ports_of(helm: charts.Helm) -> list[charts.Manifest]:
    return charts.items_at(pod_of(helm.rendered()), "containers", 0, "ports")


def mounts_of(helm: charts.Helm) -> list[charts.Manifest]:
    return charts.items_at(pod_of(helm.rendered()), "containers", 0, "volumeMounts")


def test_the_pods_have_the_labels_that_network_policies_and_selectors_use(helm: charts.Helm) -> None:
    manifests = helm.rendered("replicas=2", "podLabels.team=a")
    labels = charts.value_at(charts.only_of_kind(manifests, "Deployment"), "spec", "template", "metadata", "labels")
    assert isinstance(labels, dict)
    assert labels["team"] == "a"
    variables = {
        charts.value_at(each, "name"): each for each in charts.items_at(pod_of(manifests), "containers", 0, "env")
    }
    labels_for_jobs = dict(
        pair.split("=") for pair in str(charts.value_at(variables["RLJOB_OPERATOR_POD_LABELS"], "value")).split(",")
    )
    assert labels_for_jobs == {
        "app.kubernetes.io/name": "rljob-operator",
        "app.kubernetes.io/instance": "rljob-operator",
    }
    for selector in (
        charts.value_at(charts.only_of_kind(manifests, "Deployment"), "spec", "selector", "matchLabels"),
        charts.value_at(charts.only_of_kind(manifests, "PodDisruptionBudget"), "spec", "selector", "matchLabels"),
        charts.value_at(charts.only_of_kind(manifests, "NetworkPolicy"), "spec", "podSelector", "matchLabels"),
        charts.value_at(charts.only_of_kind(manifests, "Service"), "spec", "selector"),
    ):
        assert selector == labels_for_jobs
    assert labels_for_jobs.items() <= labels.items()


def test_a_disruption_budget_is_made_only_if_a_replica_can_be_spared(helm: charts.Helm) -> None:
    assert charts.of_kind(helm.rendered(), "PodDisruptionBudget") == []
    assert (
        charts.value_at(
            charts.only_of_kind(helm.rendered("replicas=3"), "PodDisruptionBudget"), "spec", "maxUnavailable"
        )
        == 1
    )


def test_the_network_policy_admits_only_readers_of_metrics(helm: charts.Helm) -> None:
    policy = charts.value_at(
        charts.only_of_kind(
            helm.rendered(TWO_NAMESPACES, "networkPolicy.apiServer.cidrs={10.0.0.1/32}"), "NetworkPolicy"
        ),
        "spec",
    )
    assert charts.value_at(policy, "policyTypes") == ["Ingress", "Egress"]
    assert charts.value_at(policy, "ingress") == [{"ports": [{"port": "metrics", "protocol": "TCP"}]}]
    names, api_server, dashboards = charts.items_at(policy, "egress")
    assert names == {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    assert api_server == {
        "ports": [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}],
        "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
    }
    values = ["team-a", "team-b"]
    assert dashboards == {
        "ports": [{"port": 8265, "protocol": "TCP"}],
        "to": [
            {
                "podSelector": {"matchLabels": {"ray.io/node-type": "head"}},
                "namespaceSelector": {
                    "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": values}]
                },
            }
        ],
    }


def test_the_crd_is_the_generated_one(helm: charts.Helm) -> None:
    generated = REPOSITORY / "crds" / "rljobs.yaml"
    copy = charts.CHART / "files" / "rljobs.yaml"
    assert copy.read_text() == generated.read_text(), f"cp crds/rljobs.yaml {copy.relative_to(REPOSITORY)}"
    rendered = charts.only_of_kind(helm.rendered(with_crd=True), "CustomResourceDefinition")
    expected = YAML(typ="safe").load(generated.read_text())
    assert rendered["spec"] == expected["spec"]
    assert charts.value_at(rendered, "metadata", "name") == "rljobs.rljob.dev"
    assert charts.value_at(rendered, "metadata", "annotations") == {"helm.sh/resource-policy": "keep"}
    assert charts.of_kind(helm.rendered("crds.install=false", with_crd=True), "CustomResourceDefinition") == []
    unkept = charts.value_at(
        charts.only_of_kind(helm.rendered("crds.keep=false", with_crd=True), "CustomResourceDefinition"), "metadata"
    )
    assert isinstance(unkept, dict)
    assert "annotations" not in unkept


def test_every_image_has_a_tag_or_a_digest(helm: charts.Helm) -> None:
    def images(*settings: str) -> list[object]:
        containers = charts.items_at(pod_of(helm.rendered(*settings)), "containers")
        image_variable = [
            each for each in charts.items_at(containers[0], "env") if each["name"] == "RLJOB_OPERATOR_TRAINER_IMAGE"
        ]
        return [charts.value_at(container, "image") for container in containers] + [
            charts.value_at(image_variable[0], "value")
        ]

    assert images() == ["rljob-operator:0.1.0", "rljob-trainer:0.1.0"]
    digest = f"sha256:{'0a' * 32}"
    assert images(f"image.digest={digest}", f"trainer.image=t@{digest}") == [f"rljob-operator@{digest}", f"t@{digest}"]


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("replicas=-1", "at '/replicas'"),
        ("replicas=two", "at '/replicas'"),
        ("maxConcurrentReconciles=0", "at '/maxConcurrentReconciles'"),
        ("logLevel=verbose", "at '/logLevel'"),
        ("kueue.enabled=yes", "at '/kueue/enabled'"),
        ("watchNamespaces=team-a", "at '/watchNamespaces'"),
        ("watchNamespaces={Team_A}", "at '/watchNamespaces/0'"),
        ("image.tag=latest", "at '/image/tag'"),
        ("image.digest=sha256:12", "at '/image/digest'"),
        ("image.pullPolicy=Sometimes", "at '/image/pullPolicy'"),
        ("trainer.image=registry.local:5000/trainer", "at '/trainer/image'"),
        ("trainer.rayVersion=newest", "at '/trainer/rayVersion'"),
        ("networkPolicy.apiServer.ports={0}", "at '/networkPolicy/apiServer/ports/0'"),
        ("tokenKey.existingSecrt=a", "additional properties 'existingSecrt' not allowed"),
        ("watchNamespace={a}", "additional properties 'watchNamespace' not allowed"),
    ],
)
def test_a_wrong_value_is_rejected_by_its_name(helm: charts.Helm, setting: str, where: str) -> None:
    with pytest.raises(charts.HelmError, match=re.escape(where)):
        helm.rendered(setting)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "image",
            "replicas",
            "trainer",
            "jobs",
            "maxConcurrentReconciles",
            "logLevel",
            "tokenKey",
            "crds",
            "serviceAccount",
            "metrics",
        ),
        *(
            "kueue",
            "kueue.enabled",
            "networkPolicy",
            "podDisruptionBudget",
            "crds.install",
            "crds.keep",
            "networkPolicy.enabled",
        ),
        *("networkPolicy.apiServer.ports", "trainer.rayVersion", "image.repository", "metrics.serviceMonitor"),
    ],
)
def test_a_value_without_a_safe_empty_form_must_not_be_null(helm: charts.Helm, name: str) -> None:
    """Helm removes a default if a values file has its key with nothing behind it, such as `keep:`."""
    above, _, last = name.rpartition(".")
    where = f"/{above.replace('.', '/')}" if above else ""
    with pytest.raises(charts.HelmError, match=f"at '{where}': missing property '{last}'"):
        helm.rendered(f"{name}=null", with_crd=True)


def test_an_existing_key_is_mounted_and_none_is_made(helm: charts.Helm) -> None:
    manifests = helm.rendered("tokenKey.existingSecret=mine")
    assert charts.of_kind(manifests, "Secret") == []
    volumes = {charts.value_at(volume, "name"): volume for volume in charts.items_at(pod_of(manifests), "volumes")}
    assert volumes["token-keys"]["secret"] == {"secretName": "mine", "defaultMode": 0o440}


def test_the_installer_decides_where_the_pods_run(helm: charts.Helm) -> None:
    pod = pod_of(
        helm.rendered(
            "nodeSelector.pool=system",
            "tolerations[0].key=system",
            "topologySpreadConstraints[0].maxSkew=1",
            "affinity.podAntiAffinity.x=1",
            "imagePullSecrets[0].name=registry",
            "priorityClassName=high",
        )
    )
    assert charts.value_at(pod, "nodeSelector") == {"pool": "system"}
    assert charts.value_at(pod, "tolerations") == [{"key": "system"}]
    assert charts.value_at(pod, "topologySpreadConstraints") == [{"maxSkew": 1}]
    assert charts.value_at(pod, "affinity") == {"podAntiAffinity": {"x": 1}}
    assert charts.value_at(pod, "imagePullSecrets") == [{"name": "registry"}]
    assert charts.value_at(pod, "priorityClassName") == "high"


def test_the_service_monitor_finds_the_service(helm: charts.Helm) -> None:
    assert charts.of_kind(helm.rendered(), "ServiceMonitor") == []
    manifests = helm.rendered("metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prometheus")
    monitor, service = charts.only_of_kind(manifests, "ServiceMonitor"), charts.only_of_kind(manifests, "Service")
    assert charts.value_at(monitor, "metadata", "labels", "release") == "prometheus"
    wanted, there = (
        charts.value_at(monitor, "spec", "selector", "matchLabels"),
        charts.value_at(service, "metadata", "labels"),
    )
    assert isinstance(wanted, dict)
    assert isinstance(there, dict)
    assert wanted.items() <= there.items()
    assert charts.value_at(monitor, "spec", "endpoints", 0, "port") == charts.value_at(
        service, "spec", "ports", 0, "name"
    )
