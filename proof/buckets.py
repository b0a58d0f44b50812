"""Shows that a job whose checkpoints are in a bucket survives failures on a real cluster. The server of the bucket
(versitygw) is a pod. The head pod is deleted, and later the server is stopped for a while during the training.

    python proof/buckets.py [--steps 40] [--away-seconds 45]

Uses the kind cluster of the end-to-end tests, creates it if needed, and keeps it. Prints one line for each fact. The
exit code is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ruamel.yaml import YAML

from rljob_api.v1alpha1.status import RLJobStatus
from rljob_kind.cluster import GPU_NODE, make_volume
from rljob_kind.settings import repository
from rljob_proof.cluster import ready_cluster
from rljob_testing.buckets.s3_server import ACCESS_KEY, BUCKET, CREDENTIALS, SECRET_KEY
from rljob_testing.cluster.go_programs import ensure_program
from rljob_testing.cluster.kubectl import Kubectl, wait_for
from rljob_testing.training import training_runs

NAMESPACE, CLAIM, SERVER, SECRET = "rljob-proof-buckets", "objects", "bucket-server", "bucket-keys"
JOB = "in-a-bucket"
PORT, NODE_PORT = 7070, 30707
PREFIX = f"team/{JOB}"
CHECKPOINT_EVERY = 3
END_SECONDS = 900


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--away-seconds", type=int, default=45, help="time without the server (default: 45)")
    options = parser.parse_args()
    with ready_cluster("buckets", NAMESPACE) as (kubectl, image, _):
        objects = make_volume(CLAIM, NAMESPACE)
        endpoint = start_server(kubectl, image, objects)
        print(f"the server of the bucket: {endpoint}", flush=True)
        kubectl("apply", "-f", "-", stdin=json.dumps(job_document(endpoint, options.steps)))
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for text, holds in facts(kubectl, objects, options, Path(folder)):
                print(f"{'yes' if holds else 'NO '}  {text}", flush=True)
                found[text] = holds
    return 0 if all(found.values()) else 1


def facts(kubectl: Kubectl, objects: Path, options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, bool]]:
    """Interrupts the job twice. Yields each fact as a sentence, and whether it is true."""
    wait(kubectl, lambda status: status.checkpoint, "a checkpoint")
    saved = kubectl.status(JOB).checkpoint
    assert saved is not None
    head = kubectl.names("pods", f"rljob.dev/job={JOB},ray.io/group=headgroup")[0]
    kubectl("delete", head, "--force", "--grace-period=0")
    wait(kubectl, lambda status: len(status.attempts) == 2 and trains(status), "the second attempt trains")
    resumed = kubectl.status(JOB).attempts[1].resumed_from_step or 0
    yield f"the second attempt resumed at step {resumed}; step {saved.step} was saved", resumed >= saved.step

    kubectl("scale", f"deployment/{SERVER}", "--replicas=0")
    time.sleep(options.away_seconds)
    kubectl("scale", f"deployment/{SERVER}", "--replicas=1")
    kubectl("wait", "--for=condition=Finished", f"rljob/{JOB}", f"--timeout={END_SECONDS}s", timeout_seconds=910)
    status = kubectl.status(JOB)
    reason = status.result.reason if status.result else status.reason
    yield f"the job ended with {reason}", reason == "Succeeded"
    yield (
        f"{options.away_seconds} s without the server ended no attempt ({len(status.attempts)} attempts)",
        len(status.attempts) == 2,
    )
    state = status.checkpoint
    yield f"the newest checkpoint is that of the last step: {state}", state is not None and state.step == options.steps

    # The endpoint is that of the job: a port of the node, which this machine reaches as well.
    variables = {**os.environ, **CREDENTIALS, "KUBECONFIG": str(kubectl.kubeconfig)}
    command = [sys.executable, "-m", "rljob_cli", "get-results", JOB, str(folder / "copy"), "--namespace", NAMESPACE]
    copied = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
    yield f"rljob get-results ends with 0: {copied.stderr.strip()[-200:]}", copied.returncode == 0
    files = training_runs.RunFiles(folder / "copy")
    steps = files.training_steps()
    yield f"each of {options.steps} steps was recorded once", steps == list(range(1, options.steps + 1))
    yield "the copy has the page", (folder / "copy" / "view.html").is_file()
    yield "the copy has the exported model", (folder / "copy" / "export" / "model.safetensors").is_file()

    bucket = objects / BUCKET / PREFIX
    manifests = sorted(path.parent.name for path in (bucket / "checkpoints").glob("step-*/manifest.json"))
    yield f"two complete checkpoints are kept: {', '.join(manifests)}", len(manifests) == 2
    seen = [kubectl("get", "rljob,events,rayclusters,pods", "-o", "json"), copied.stdout, copied.stderr]
    seen += [path.read_text(errors="replace") for path in bucket.rglob("*") if is_text(path)]
    yield (
        f"no key in the cluster's objects and in {len(seen)} texts",
        not any(key in text for key in (ACCESS_KEY, SECRET_KEY) for text in seen),
    )
    kubectl("delete", "rljob", JOB, timeout_seconds=180)
    wait_for(lambda: not kubectl.names("pods", f"rljob.dev/job={JOB}"), "no pods are left", 120)
    kept = sorted(path.parent.name for path in (bucket / "checkpoints").glob("step-*/manifest.json"))
    yield "the checkpoints stay when the job is deleted", kept == manifests


def start_server(kubectl: Kubectl, image: str, objects: Path) -> str:
    """Starts the server in a pod, in the trainer's image, and returns its URL: a port of the node, which both the pods
    and this machine reach. The program and the objects are in the volume."""
    program = objects / "versitygw"
    program.write_bytes(ensure_program("versitygw").read_bytes())
    program.chmod(0o755)
    (objects / BUCKET).mkdir()
    (objects / BUCKET).chmod(0o777)
    metadata = {"name": SECRET}
    keys = {**CREDENTIALS, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}
    labels = {"app": SERVER}
    port = {"port": PORT, "nodePort": NODE_PORT}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVER},
        "spec": {"type": "NodePort", "selector": labels, "ports": [port]},
    }
    container = {
        "name": "server",
        "image": image,
        "command": ["/objects/versitygw", "--port", f":{PORT}", "--quiet", "posix", "/objects"],
        "envFrom": [{"secretRef": {"name": SECRET}}],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "objects", "mountPath": "/objects"}],
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "objects", "persistentVolumeClaim": {"claimName": CLAIM}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": SERVER},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    items = {"apiVersion": "v1", "kind": "List", "items": [secret, service, deployment]}
    kubectl("apply", "-f", "-", stdin=json.dumps(items))
    kubectl("rollout", "status", f"deployment/{SERVER}", "--timeout=180s", timeout_seconds=190)
    address = kubectl(
        "get", "node", GPU_NODE, "-o", 'jsonpath={.status.addresses[?(@.type=="InternalIP")].address}'
    ).split()[0]
    return f"http://{address}:{NODE_PORT}"


def job_document(endpoint: str, num_steps: int) -> training_runs.Document:
    """The job of the end-to-end tests, with its checkpoints in the bucket."""
    job: training_runs.Document = YAML(typ="safe", pure=True).load(
        (repository() / "e2e" / "jobs" / "sort-digits.yaml").read_text()
    )
    s3: training_runs.Document = {"bucket": BUCKET, "prefix": PREFIX, "endpoint": endpoint, "secret": SECRET}
    changed = training_runs.merged(
        job,
        {
            "metadata": {"name": JOB},
            "spec": {"training": {"steps": num_steps}, "checkpoint": {"everySteps": CHECKPOINT_EVERY, "keep": 2}},
        },
    )
    spec = changed["spec"]
    assert isinstance(spec, dict)
    checkpoint = spec["checkpoint"]
    assert isinstance(checkpoint, dict)
    checkpoint["storage"] = {"s3": s3}
    return changed


def trains(status: RLJobStatus) -> bool:
    """Whether the newest attempt has completed a step."""
    newest = status.attempts[-1]
    return bool(
        newest.state == "Running" and status.progress and status.progress.step > (newest.resumed_from_step or 0)
    )


def wait(kubectl: Kubectl, look: Callable[[RLJobStatus], object], what: str) -> None:
    """Waits until the job's status is as expected."""
    wait_for(lambda: bool(look(kubectl.status(JOB))), f"{JOB}: {what}", END_SECONDS)


def is_text(path: Path) -> bool:
    """Whether a file of the run may contain text."""
    return path.is_file() and path.suffix in {".json", ".jsonl", ".log", ".txt", ".html", ".yaml"}


if __name__ == "__main__":
    sys.exit(main())
