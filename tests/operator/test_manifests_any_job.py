"""For any job: its pods pass restricted Pod Security, and the job cannot change what belongs to the operator."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from pydantic import JsonValue

from rljob_api.contract_documents import load_job
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.ownership import Manifest
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_testing.operator import inputs
from rljob_testing.operator.any_spec import any_specs

RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
HOST_FIELDS = {"hostNetwork", "hostPID", "hostIPC", "hostUsers", "hostAliases", "initContainers", "serviceAccountName"}
OWNED_ENVIRONMENT = {
    "RLJOB_RUN_FOLDER": "/rljob/storage/run",
    "RLJOB_CHECKPOINT_FOLDER": "/rljob/storage/checkpoints",
    "RLJOB_CACHE": "/rljob/cache",
}


def mapping(value: JsonValue) -> Manifest:
    assert isinstance(value, dict)
    return value


def mappings(value: JsonValue) -> list[Manifest]:
    assert isinstance(value, list)
    return [mapping(each) for each in value]


def templates(cluster: Manifest) -> Iterator[Manifest]:
    body = mapping(cluster["spec"])
    for group in [mapping(body["headGroupSpec"]), *mappings(body["workerGroupSpecs"])]:
        yield mapping(group["template"])


def made(job_spec: RLJobSpec) -> Manifest:
    return ray_cluster(inputs.IDENTITY, job_spec, 1, inputs.DEFAULTS, "2c70e12b")


def pod_security_faults(pod: Manifest) -> list[str]:
    """Violations of the restricted profile of the Pod Security Standards, checked field by field."""
    faults = [name for name in HOST_FIELDS if name in pod]
    everywhere = mapping(pod["securityContext"])
    for container in mappings(pod["containers"]):
        context = everywhere | mapping(container["securityContext"])
        capabilities = mapping(context.get("capabilities", {}))
        checks = {
            "privileged": not context.get("privileged", False),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "capabilities.drop": capabilities.get("drop") == ["ALL"],
            "capabilities.add": not capabilities.get("add"),
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser": context.get("runAsUser") not in (None, 0),
            "seccompProfile": mapping(context.get("seccompProfile", {})).get("type") in ("RuntimeDefault", "Localhost"),
            "procMount": context.get("procMount", "Default") == "Default",
            "hostPort": not any("hostPort" in port for port in mappings(container.get("ports", []))),
        }
        faults += [f"{container['name']}: {name}" for name, good in checks.items() if not good]
    for volume in mappings(pod["volumes"]):
        if not set(volume) - {"name"} <= RESTRICTED_VOLUMES:
            faults.append(f"volume {volume['name']}")
    return faults


@settings(max_examples=60)
@given(any_specs())
def test_the_pods_pass_restricted_pod_security(job_spec: RLJobSpec) -> None:
    for template in templates(made(job_spec)):
        assert pod_security_faults(mapping(template["spec"])) == []


@settings(max_examples=20)
@given(any_specs())
def test_the_cluster_chooses_users_if_the_installer_says_so(job_spec: RLJobSpec) -> None:
    cluster = ray_cluster(inputs.IDENTITY, job_spec, 1, replace(inputs.DEFAULTS, run_as_user=None), "2c70e12b")
    for template in templates(cluster):
        pod = mapping(template["spec"])
        contexts = [mapping(each["securityContext"]) for each in (pod, *mappings(pod["containers"]))]
        assert not any({"runAsUser", "runAsGroup", "fsGroup"} & set(context) for context in contexts)
        faults = pod_security_faults(pod)
        assert {fault.partition(": ")[2] for fault in faults} == {"runAsUser"}


def test_a_service_account_is_for_all_pods_and_without_a_token_for_the_api_server() -> None:
    for template in templates(made(inputs.spec({"serviceAccountName": "s3-reader"}))):
        pod = mapping(template["spec"])
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("s3-reader", False)


def test_the_check_can_fail() -> None:
    pod: Manifest = {
        "hostNetwork": True,
        "securityContext": {},
        "containers": [{"name": "ray", "securityContext": {"runAsUser": 0, "capabilities": {"add": ["SYS_ADMIN"]}}}],
        "volumes": [{"name": "root", "hostPath": {"path": "/"}}],
    }
    assert pod_security_faults(pod) == [
        "hostNetwork",
        *(f"ray: {name}" for name in ("allowPrivilegeEscalation", "capabilities.drop", "capabilities.add")),
        *(f"ray: {name}" for name in ("runAsNonRoot", "runAsUser", "seccompProfile")),
        "volume root",
    ]


def values(container: Manifest) -> dict[str, JsonValue]:
    return {str(each["name"]): each.get("value") for each in mappings(container["env"])}


@settings(max_examples=60)
@given(any_specs())
def test_reserved_fields_cannot_be_overridden(job_spec: RLJobSpec) -> None:
    cluster = made(job_spec)
    head, *workers = templates(cluster)
    for template in (head, *workers):
        labels, pod = mapping(mapping(template["metadata"])["labels"]), mapping(template["spec"])
        assert labels["app.kubernetes.io/managed-by"] == "rljob-operator"
        assert labels["rljob.dev/job"] == "example"
        assert labels["rljob.dev/job-uid"] == inputs.IDENTITY.uid
        assert labels["rljob.dev/attempt"] == "1"
        assert not any(
            name.startswith("ray.io/") for name in [*labels, *mapping(mapping(template["metadata"])["annotations"])]
        )
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["terminationGracePeriodSeconds"] == job_spec.run_policy.grace_period_seconds
        ray = mappings(pod["containers"])[0]
        assert ray["name"] == "ray"
        assert "command" not in ray
        assert "args" not in ray
        assert OWNED_ENVIRONMENT.items() <= values(ray).items()
        assert len(values(ray)) == len(mappings(ray["env"]))
        check_volumes(pod)
    assert "RLJOB_SPEC" not in values(mappings(mapping(workers[0]["spec"])["containers"])[0])


CLAIM = "persistentVolumeClaim"


def check_volumes(pod: Manifest) -> None:
    """Names and paths are unique, every mount has its volume, and ours are where they belong."""
    names = [volume["name"] for volume in mappings(pod["volumes"])]
    assert len(set(map(str, names))) == len(names)
    # A pod with two volumes of one claim never starts.
    claims = [str(volume["persistentVolumeClaim"]) for volume in mappings(pod["volumes"]) if CLAIM in volume]
    assert len(set(claims)) == len(claims)
    for container in mappings(pod["containers"]):
        mounts = mappings(container["volumeMounts"])
        names_by_path = {str(mount["mountPath"]).rstrip("/"): mount["name"] for mount in mounts}
        assert len(names_by_path) == len(mounts)
        assert set(names_by_path.values()) <= set(names)
        assert names_by_path["/rljob/storage"] == "rljob-storage"


@settings(max_examples=60)
@given(any_specs())
def test_the_job_reaches_the_trainer_unchanged_and_no_text_of_it_reaches_a_shell(job_spec: RLJobSpec) -> None:
    cluster = made(job_spec)
    head, *workers = templates(cluster)
    document = values(mappings(mapping(head["spec"])["containers"])[0])["RLJOB_SPEC"]
    # The trainer receives only the fields of the run policy that it reads.
    seconds = job_spec.run_policy.provisioning_deadline_seconds
    policy = RunPolicy(provisioning_deadline_seconds=seconds)
    assert load_job(str(document)).spec == job_spec.model_copy(update={"run_policy": policy})
    assert "$" not in str(document)
    # KubeRay puts these into the command line of `ray start`.
    groups = mappings(mapping(cluster["spec"])["workerGroupSpecs"])
    (pool,) = job_spec.pools
    assert [group["groupName"] for group in groups] == [pool.name]
    for group in groups:
        parameters = mapping(group["rayStartParams"])
        assert set(parameters) == {"num-cpus", "num-gpus", "resources"}
        # A shell parses it as one word; a user's only part of it is a pool's name: letters, digits and `-`.
        (word,) = shlex.split(str(parameters["resources"]))
        assert json.loads(word) == {f"rljob-pool-{pool.name}": pool.gpus_per_node}
        assert re.fullmatch(r'"\{\\"[a-z0-9-]+\\":\d+\}"', str(parameters["resources"]))
        assert parameters["num-gpus"] == str(pool.gpus_per_node)
        assert int(str(parameters["num-cpus"])) > pool.gpus_per_node
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == pool.nodes
    (worker,) = workers
    resources = mapping(mappings(mapping(worker["spec"])["containers"])[0]["resources"])
    for side in ("requests", "limits"):
        assert mapping(resources[side])[pool.gpu_resource] == str(pool.gpus_per_node)
    json.dumps(cluster)
