"""The pods of a job whose checkpoints are in a bucket."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_operator.manifests.ownership import Manifest
from rljob_operator.manifests.ray_cluster import ray_cluster
from rljob_operator.raw_json import object_at, objects_at
from rljob_testing.operator import inputs

BUCKET = {"bucket": "team-checkpoints", "endpoint": "http://minio.storage:9000", "secret": "minio"}


def pods(storage: Mapping[str, object], **fields: object) -> list[Manifest]:
    """The pod specs of head and workers."""
    spec = inputs.spec({"checkpoint.storage": storage, **fields})
    found = ray_cluster(inputs.IDENTITY, spec, 1, inputs.DEFAULTS, "2c70e12b")
    groups = [object_at(found, "spec", "headGroupSpec"), *objects_at(found, "spec", "workerGroupSpecs")]
    return [object_at(group, "template", "spec") for group in groups]


def environment(pod: Manifest) -> dict[object, Manifest]:
    """The variables of Ray's container by name."""
    return {each["name"]: each for each in objects_at(objects_at(pod, "containers")[0], "env")}


def test_the_credentials_are_references_and_no_claim_is_mounted() -> None:
    for pod in pods({"s3": BUCKET}):
        found = environment(pod)
        for name, is_optional in (
            ("AWS_ACCESS_KEY_ID", False),
            ("AWS_SECRET_ACCESS_KEY", False),
            ("AWS_SESSION_TOKEN", True),
        ):
            reference = {"name": "minio", "key": name, "optional": is_optional}
            assert found[name] == {"name": name, "valueFrom": {"secretKeyRef": reference}}
        volumes = {each["name"]: each for each in objects_at(pod, "volumes")}
        assert volumes["rljob-storage"] == {"name": "rljob-storage", "emptyDir": {}}
        assert not [volume for volume in volumes.values() if "persistentVolumeClaim" in volume]
        mounts = [objects_at(container, "volumeMounts") for container in objects_at(pod, "containers")]
        assert all({"name": "rljob-storage", "mountPath": "/rljob/storage"} in each for each in mounts)


def test_without_a_secret_the_pods_use_their_own_identity() -> None:
    for pod in pods({"s3": {"bucket": "team-checkpoints"}}, serviceAccountName="trainer"):
        assert not [name for name in environment(pod) if str(name).startswith("AWS_")]
        assert pod["serviceAccountName"] == "trainer"


def test_variables_of_the_job_take_precedence() -> None:
    own = {"name": "AWS_SESSION_TOKEN", "valueFrom": {"secretKeyRef": {"name": "other", "key": "token"}}}
    for pod in pods({"s3": BUCKET}, env=[own]):
        names = [each["name"] for each in objects_at(objects_at(pod, "containers")[0], "env")]
        assert names.count("AWS_SESSION_TOKEN") == 1
        assert object_at(environment(pod)["AWS_SESSION_TOKEN"], "valueFrom", "secretKeyRef")["name"] == "other"


def test_addresses_in_a_bucket_stay_unchanged() -> None:
    spec = inputs.spec({"checkpoint.storage": {"s3": BUCKET}})
    for uri in ("s3://team-checkpoints/example/run/export", "file:///rljob/storage/run/export"):
        state = inputs.run_state(export_uri=uri)
        assert inputs.decide(inputs.healthy(state=state, job_spec=spec)).status.export_uri == uri
