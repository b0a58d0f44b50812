"""Code of a response cannot escape from the sandbox in a restricted pod either: an ordinary user without capabilities,
in the container runtime's default seccomp profile."""

from __future__ import annotations

import json
from pathlib import Path

import rljob_testing.sandbox
from rljob_kind.installation import ensure_own_images
from rljob_kind.progress import Progress
from rljob_testing.cluster.kubectl import Kubectl, wait_for

NAME = "sandbox-attacks"
USER = 1000
PROGRAM = """
import json, os, runpy, sys
folder = "/tmp/attacks/rljob_testing/sandbox"
os.makedirs(folder)
for name, text in json.loads(sys.argv[1]).items():
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)
sys.path.insert(0, "/tmp/attacks")
runpy.run_module("rljob_testing.sandbox.run_attacks", run_name="__main__")
"""


def test_every_attack_is_stopped_in_a_restricted_pod(kubectl: Kubectl, progress: Progress) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps(_pod(ensure_own_images(progress).trainer)))
    try:
        phase = wait_for(lambda: _final_phase(kubectl), "the pod has ended", timeout_seconds=120)
        log = kubectl("logs", NAME)
        assert phase == "Succeeded", log
        found = json.loads(log.splitlines()[-1])
        assert {name: each for name, each in found["seen"].items() if not each["is_stopped"]} == {}
        assert found["is_target_unharmed"]
        assert (found["uid"], found["after"], found["num_left"]) == (USER, ["", "fine\n"], 0)
    finally:
        kubectl("delete", "pod", NAME, "--wait=false")


def _final_phase(kubectl: Kubectl) -> str | None:
    phase = kubectl("get", "pod", NAME, "-o", "jsonpath={.status.phase}")
    return phase if phase in ("Succeeded", "Failed") else None


def _pod(image: str) -> dict[str, object]:
    folder = Path(str(rljob_testing.sandbox.__file__)).parent
    sources = {name: (folder / name).read_text() for name in ("attacks.py", "run_attacks.py")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "attacks",
                    "image": image,
                    # A dollar sign in a command would begin a variable of Kubernetes.
                    "command": ["python", "-c", PROGRAM, json.dumps(sources).replace("$(", "$$(")],
                    "resources": {"limits": {"memory": "2Gi"}, "requests": {"cpu": "100m", "memory": "512Mi"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
