"""The chart on a real API server: accepted completely, admitted at the strictest Pod Security level, with exactly the
documented permissions, and with a key that outlives upgrades."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import httpx
import pytest

from rljob_operator.manifests.access import network_policy
from rljob_operator.settings import parse_settings
from rljob_testing.cluster import charts
from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.operator import inputs

pytestmark = pytest.mark.apiserver

OPERATOR = f"system:serviceaccount:{charts.NAMESPACE}:rljob-operator"
SECRET = f"/api/v1/namespaces/{charts.NAMESPACE}/secrets/rljob-operator-token-key"
PATHS = {
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}
POD = ("spec", "template", "spec")
STRICT_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
FULL = ("replicas=2", "topologySpreadConstraints[0].maxSkew=1", "topologySpreadConstraints[0].topologyKey=zone")
FULL_SPREAD = "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway"

Edit = Callable[[dict[str, object], dict[str, object]], object]


@pytest.mark.parametrize("settings", [(), ("watchNamespaces={team-a,team-b}",)], ids=["cluster-wide", "namespaced"])
def test_every_manifest_is_accepted(http: httpx.Client, helm: charts.Helm, settings: tuple[str, ...]) -> None:
    kinds = set()
    for manifest in helm.rendered(*settings, *FULL, FULL_SPREAD, with_crd=True):
        kind, metadata = str(manifest["kind"]), charts.value_at(manifest, "metadata")
        assert isinstance(metadata, Mapping)
        path = PATHS[kind].format(metadata.get("namespace", ""))
        answer = http.post(path, params=STRICT_DRY_RUN, json=manifest)
        assert answer.status_code == 201, f"{kind}: {answer.text}"
        kinds.add(kind)
    of_one_mode = {"Role", "RoleBinding"} if settings else {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    assert kinds == (set(PATHS) - {"ClusterRole", "ClusterRoleBinding"}) | of_one_mode


def pod(helm: charts.Helm, *settings: str) -> tuple[dict[str, object], dict[str, object]]:
    """The Deployment's pod as a pod of its own, and its only container."""
    template = charts.value_at(charts.only_of_kind(helm.rendered(*settings), "Deployment"), "spec", "template")
    spec = charts.value_at(template, "spec")
    assert isinstance(spec, dict)
    (container,) = charts.items_at(spec, "containers")
    assert isinstance(container, dict)
    metadata = {"name": "operator", "labels": charts.value_at(template, "metadata", "labels")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, container


def admitted(http: httpx.Client, manifest: charts.Manifest) -> httpx.Response:
    return http.post(f"/api/v1/namespaces/{charts.NAMESPACE}/pods", params=STRICT_DRY_RUN, json=manifest)


def test_the_strictest_pod_security_level_admits_the_operator(http: httpx.Client, helm: charts.Helm) -> None:
    manifest, _ = pod(helm)
    answer = admitted(http, manifest)
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda _, container: container.pop("securityContext"), "allowPrivilegeEscalation != false"),
        (lambda spec, _: spec.pop("securityContext"), "runAsNonRoot != true"),
        (lambda spec, _: spec.update(hostNetwork=True), "host namespaces"),
    ],
)
def test_pod_security_would_reject_anything_less(
    http: httpx.Client, helm: charts.Helm, edit: Edit, complaint: str
) -> None:
    manifest, container = pod(helm)
    spec = manifest["spec"]
    assert isinstance(spec, dict)
    edit(spec, container)
    answer = admitted(http, manifest)
    assert answer.status_code == 403
    assert complaint in answer.json()["message"]


def test_the_strictest_pod_security_level_admits_the_operator_without_a_user(
    http: httpx.Client, helm: charts.Helm
) -> None:
    manifest, _ = pod(helm, *(f"podSecurityContext.{name}=null" for name in ("runAsUser", "runAsGroup", "fsGroup")))
    answer = admitted(http, manifest)
    assert answer.status_code == 201, answer.text
    assert "runAsUser" not in answer.json()["spec"]["securityContext"]


def test_network_policies_with_rules_of_the_installer_are_accepted_and_a_misspelt_selector_is_not(
    http: httpx.Client, helm: charts.Helm
) -> None:
    def answer(selector: str) -> httpx.Response:
        peer = {"namespaceSelector": {selector: {"team": "a"}}}
        rule = {"ports": [{"protocol": "TCP", "port": 443, "endPort": 444}]}
        values = {"metricsFrom": [peer], "ingress": [{"from": [peer], **rule}], "restrictEgress": True}
        values["egress"] = [{"to": [peer, {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}], **rule}]
        manifests = helm.rendered(json.dumps({"jobs": {"networkPolicy": values}}))
        container = charts.value_at(charts.only_of_kind(manifests, "Deployment"), *POD, "containers", 0)
        variables = {str(each["name"]): str(each.get("value", "x")) for each in charts.items_at(container, "env")}
        added = parse_settings(variables).job_network_policy
        policy = network_policy(inputs.IDENTITY, 1, replace(inputs.DEFAULTS, network_policy=added))
        return http.post(PATHS["NetworkPolicy"].format("team-a"), params=STRICT_DRY_RUN, json=policy)

    assert answer("matchLabels").status_code == 201, answer("matchLabels").text
    assert (
        'unknown field "spec.ingress[2].from[0].namespaceSelector.matchLabel"' in answer("matchLabel").json()["message"]
    )


@pytest.fixture
def release(server: ApiServer, helm: charts.Helm) -> Iterator[charts.Helm]:
    """Helm connected to the server; everything that was installed is removed afterwards."""
    connection = charts.with_cluster_access(helm, server)
    yield connection
    if "rljob-operator" in connection("list", "--short", f"--namespace={charts.NAMESPACE}"):
        connection.uninstall()
    server.http.delete(SECRET)
    definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.rljob.dev"
    server.http.delete(definition)
    deadline = time.monotonic() + 120
    # It exists for a moment longer, with its definitions.
    while server.http.get(definition).status_code != 404:
        assert time.monotonic() < deadline, "the definition still exists after 120 s"
        time.sleep(0.05)


def allowed(http: httpx.Client, namespace: str, group: str, resource: str, verb: str, name: str = "") -> bool:
    """Whether the operator's service account may do that, by the server's own authorizer."""
    plain, _, subresource = resource.partition("/")
    attributes = {
        "namespace": namespace,
        "group": group,
        "resource": plain,
        "subresource": subresource,
        "verb": verb,
        "name": name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": OPERATOR, "resourceAttributes": attributes},
    }
    answer = http.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=review)
    return bool(answer.raise_for_status().json()["status"]["allowed"])


def wait_until_authorized(http: httpx.Client, namespace: str) -> None:
    """Waits for the authorizer, which learns of new roles a moment after they were written."""
    deadline = time.monotonic() + 120
    while not allowed(http, namespace, "ray.io", "rayclusters", "create"):
        assert time.monotonic() < deadline, "the operator has no permissions after 120 s"
        time.sleep(0.1)


def test_a_namespaced_operator_has_no_permissions_elsewhere(http: httpx.Client, release: charts.Helm) -> None:
    release.install("watchNamespaces={team-a,team-b}")
    for namespace in ("team-a", "team-b"):
        wait_until_authorized(http, namespace)
        assert allowed(http, namespace, "rljob.dev", "rljobs/status", "patch")
        assert not allowed(http, namespace, "rljob.dev", "rljobs", "patch")
        assert allowed(http, namespace, "", "secrets", "create")
        assert not allowed(http, namespace, "", "secrets", "get")
        assert not allowed(http, namespace, "coordination.k8s.io", "leases", "create")
    for namespace in ("others", charts.NAMESPACE, ""):
        assert not allowed(http, namespace, "rljob.dev", "rljobs", "list")
        assert not allowed(http, namespace, "", "secrets", "create")
        assert not allowed(http, namespace, "", "pods", "list")
    assert allowed(http, charts.NAMESPACE, "coordination.k8s.io", "leases", "update", "rljob-operator")
    assert not allowed(http, charts.NAMESPACE, "coordination.k8s.io", "leases", "update", "another")
    assert allowed(http, "kube-node-lease", "coordination.k8s.io", "leases", "get", "node-1")
    assert not allowed(http, "kube-node-lease", "coordination.k8s.io", "leases", "list")


def test_a_cluster_wide_operator_reads_jobs_everywhere_and_leases_only_in_its_namespace(
    http: httpx.Client, release: charts.Helm
) -> None:
    release.install()
    wait_until_authorized(http, "others")
    assert allowed(http, "", "rljob.dev", "rljobs", "watch")
    assert allowed(http, "others", "networking.k8s.io", "networkpolicies", "create")
    assert not allowed(http, "others", "networking.k8s.io", "networkpolicies", "delete")
    assert not allowed(http, "others", "", "secrets", "list")
    assert not allowed(http, "others", "coordination.k8s.io", "leases", "create")
    assert allowed(http, charts.NAMESPACE, "coordination.k8s.io", "leases", "create")


def key_of(http: httpx.Client) -> object:
    return http.get(SECRET).raise_for_status().json()["data"]


def test_the_key_outlives_upgrades_and_the_release(http: httpx.Client, release: charts.Helm) -> None:
    release.install()
    first = key_of(http)
    release.install("replicas=2", "maxConcurrentReconciles=4")
    assert key_of(http) == first
    # An administrator replaces it with 32 letters n, in base64.
    exchanged = {"key": "bm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm4=", "previous-key": charts.value_at(first, "key")}
    http.patch(SECRET, json={"data": exchanged}).raise_for_status()
    release.install()
    assert key_of(http) == exchanged
    release.uninstall()
    assert key_of(http) == exchanged
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.rljob.dev"
    assert http.get(crd).status_code == 200
    release.install()
    assert key_of(http) == exchanged


def test_two_installations_have_different_keys(http: httpx.Client, release: charts.Helm) -> None:
    release.install()
    first = charts.value_at(key_of(http), "key")
    release.uninstall()
    http.delete(SECRET).raise_for_status()
    release.install()
    second = charts.value_at(key_of(http), "key")
    assert first != second
    assert len(str(first)) == len(str(second)) == 88  # 64 characters in base64
