"""`rljob validate`: every problem with its path and source line, or one line for a valid file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_file, load_job_text
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_cli.validate import validate_file
from rljob_testing.cli.rljob_command import JobFolder

Rljob = Callable[..., tuple[int, str, str]]
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: example}
spec:
  pools:
  - {name: main, nodes: 2, gpusPerNode: 6}
  training:
    model: {source: owner/model}
    dataset: {type: File, file: {path: "[bold]train.jsonl"}}
    rewards: [{type: MathAnswer}]
    steps: 10
    batchSize: 72
"""


def validated(path: Path) -> tuple[bool, str]:
    output = io.StringIO()
    job = validate_file(path, Console(file=output, width=80))
    return job is not None, output.getvalue()


def test_a_valid_file_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert validated(path) == (True, f"{path}: RLJob example is valid (pools: main 2x6)\n")


def test_every_problem_is_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("batchSize: 72", "batchSize: 64").replace("type: MathAnswer", "type: Function"))
    accepted, output = validated(path)
    assert not accepted
    with pytest.raises(JobFileError) as caught:
        load_job_file(path)
    missing, uneven = map(str, caught.value.problems)
    assert missing.startswith("spec.training.rewards[0].function: is required")
    assert uneven.startswith("spec.training.batchSize: ")
    assert output == (
        f"{path}:10:15: {missing}\n"
        "   10 |     rewards: [{type: Function}]\n"
        "                      ^\n"
        f"{path}:12:16: {uneven}\n"
        "   12 |     batchSize: 64\n"
        "                       ^\n"
        f"{path}: 2 problems found\n"
    )


DOUBTFUL = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: example
  labels: {kueue.x-k8s.io/queue-name: team, kueue.x-k8s.io/priority-class: high, queue-name: x}
  annotations: {kueue.x-k8s.io/queue-name: team}
spec:
  head:
    resources: {requests: {memory: 400m, cpu: 500m}, limits: {memory: 2Gi, ephemeral-storage: "0.5"}}
    template:
      nodeSelector: {beta.kubernetes.io/arch: amd64, kubernetes.io/arch: amd64}
      annotations:
        container.apparmor.security.beta.kubernetes.io/ray: runtime/default
        security.alpha.kubernetes.io/sysctls: a=b
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions: [{key: failure-domain.beta.kubernetes.io/zone, operator: Exists}]
  volumes:
  - {name: scratch, mountPath: /scratch, type: EmptyDir, emptyDir: {sizeLimit: 800m}}
  pools:
  - name: main
    nodes: 2
    gpusPerNode: 6
    sharedMemory: 600m
    template:
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: zone
          - {topologyKey: failure-domain.beta.kubernetes.io/region, labelSelector: {}}
"""


def test_valid_but_unintended_values_are_warned_of_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(DOUBTFUL + JOB[JOB.index("  training:") :] + "    rollout: {cpuKvCache: 1500m}\n")
    accepted, output = validated(path)
    assert accepted
    *warnings, last = [line for line in output.splitlines() if line.startswith(str(path))]
    no_bytes, old_label = "is not a whole number of bytes", "is a deprecated label that new nodes may not have"
    no_queue = "has no effect: this version does not support Kueue, and the job does not wait in a queue"
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    assert [line.removeprefix(f"{path}:").split(";")[0] for line in warnings] == [
        f'5:39: warning: metadata.labels.kueue.x-k8s.io/queue-name: {no_queue} (seen: "team")',
        f'5:76: warning: metadata.labels.kueue.x-k8s.io/priority-class: {no_queue} (seen: "high")',
        f'6:44: warning: metadata.annotations.kueue.x-k8s.io/queue-name: {no_queue} (seen: "team")',
        f'9:36: warning: spec.head.resources.requests.memory: {no_bytes} (seen: "400m")',
        f'9:95: warning: spec.head.resources.limits.ephemeral-storage: {no_bytes} (seen: "0.5")',
        f"11:47: warning: spec.head.template.nodeSelector.beta.kubernetes.io/arch: {old_label}",
        "13:61: warning: spec.head.template.annotations.container.apparmor.security.beta.kubernetes.io/ray: is"
        " deprecated since Kubernetes 1.30, which still applies it",
        "14:47: warning: spec.head.template.annotations.security.alpha.kubernetes.io/sysctls: has no effect:"
        " Kubernetes no longer reads this annotation",
        f"19:40: warning: spec.head.template.affinity.nodeAffinity.{required}.nodeSelectorTerms[0].matchExpressions[0]"
        f'.key: {old_label} (seen: "failure-domain.beta.kubernetes.io/zone")',
        f'21:80: warning: spec.volumes[0].emptyDir.sizeLimit: {no_bytes} (seen: "800m")',
        f'26:19: warning: spec.pools[0].sharedMemory: {no_bytes} (seen: "600m")',
        f"31:13: warning: spec.pools[0].template.affinity.podAntiAffinity.{required}[0]: has no labelSelector and"
        " selects no pods",
        f"32:27: warning: spec.pools[0].template.affinity.podAntiAffinity.{required}[1].topologyKey: {old_label}"
        ' (seen: "failure-domain.beta.kubernetes.io/region")',
        f'39:27: warning: spec.training.rollout.cpuKvCache: {no_bytes} (seen: "1500m")',
    ]
    assert last == f"{path}: RLJob example is valid (pools: main 2x6)"


def test_a_job_that_is_too_large_for_a_cluster_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    annotations = "".join(f"        note-{number}: {'x' * 4096}\n" for number in range(17))
    path.write_text(JOB.replace("spec:\n", "spec:\n  head:\n    template:\n      annotations:\n" + annotations))
    accepted, output = validated(path)
    assert accepted
    assert "warning: spec: is too large for a cluster (job example: " in output


def test_advice_on_a_quantity_leads_to_an_accepted_value(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for written in ("1e3", "0.5"):
        resources = f"spec:\n  head: {{resources: {{requests: {{cpu: {written}}}}}}}\n"
        path.write_text(JOB.replace("spec:\n", resources))
        accepted, output = validated(path)
        assert not accepted
        assert (
            f"spec.head.resources.requests.cpu: must be a string (seen: {float(written)}); put it in quotes" in output
        )
        path.write_text(JOB.replace("spec:\n", resources.replace(written, f'"{written}"')))
        assert validated(path) == (True, f"{path}: RLJob example is valid (pools: main 2x6)\n")


def test_an_invalid_name_is_reported_with_a_valid_one(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    head = """spec:
  image: Trainer:1
  head:
    resources: {limits: {cpuu: 4, memory: -1}}
    template: {labels: {team a: b, team: a b}}
"""
    path.write_text(JOB.replace("spec:\n", head).replace("{name: example}", "{name: example, labels: {a b: c}}"))
    accepted, output = validated(path)
    assert not accepted
    assert "spec.head.template.labels.team: must be a label value" in output
    assert "spec.head.resources.limits.memory: must be a quantity such as 500m, 2, 1.5, 1e3 or 16Gi" in output
    assert "spec.image: must be the name of a container image, such as registry.example/team/trainer:1.2" in output
    assert "metadata.labels.a b: must be a label key such as team or example.com/team" in output
    path.write_text(
        path.read_text().replace("team: a b", "team: ab").replace("-1", "1Gi").replace("Trainer", "trainer")
    )
    path.write_text(path.read_text().replace(", labels: {a b: c}", ""))
    _, output = validated(path)
    assert f"{path}:7:32: spec.head.resources.limits.cpuu: must name a resource" in output
    assert "(did you mean cpu?)" in output
    assert f"{path}:8:33: spec.head.template.labels.team a: has an invalid key" in output


def test_resolved_prints_a_job_file_and_the_rest_goes_to_standard_error(rljob: Rljob, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "    algorithm: {type: DrGRPO}\n")
    _, output, errors = rljob("validate", "--resolved", str(path))
    assert errors == f"{path}: RLJob example is valid (pools: main 2x6)\n"
    resolved, job = load_job_text(output).spec.training, load_job_file(path).spec.training
    assert resolved.algorithm == resolve_algorithm(job.algorithm)
    assert resolved.model_copy(update={"algorithm": job.algorithm}) == job


def test_resolved_prints_no_job_if_there_is_a_problem(rljob: Rljob, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "    algorithm: {type: A2C}\n")
    code, output, errors = rljob("validate", "--resolved", str(path))
    assert (code, output) == (2, "")
    assert ":13:23: spec.training.algorithm.type: must be one of GRPO, DrGRPO, " in errors


def test_square_brackets_in_a_file_are_not_markup(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("path:", "paht:"))
    _, output = validated(path)
    assert '{paht: "[bold]train.jsonl"}' in output


def test_a_job_from_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for text, accepted, lines in (
        (JOB, True, [f"{pipe}: RLJob example is valid (pools: main 2x6)"]),
        (JOB.replace("{name: example}", "{name: example, labels: {kueue.x-k8s.io/queue-name: a}}"), True, None),
        (JOB.replace("steps: 10", "steps: 0"), False, None),
    ):
        writer = Thread(target=pipe.write_text, args=(text,))
        writer.start()
        found = validated(pipe)
        writer.join(timeout=10)
        assert not writer.is_alive()
        assert found[0] == accepted
        if lines is not None:
            assert found[1].splitlines() == lines
        else:
            source = "labels: {kueue.x-k8s.io" if accepted else "    steps: 0"
            assert source in found[1]


SECRET = "hf_SECRETVALUE"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (f"[{{name: HF_TOKEN, value: {SECRET}}}]", "14:33: spec.env[0].value: a variable whose name ends in TOKEN"),
        (f"[{{name: HF_TOKEN, value: [{SECRET}]}}]", "14:33: spec.env[0].value: must be a string (seen: a list of 1)"),
        (f"[{{name: HF_TOKEN, vlaue: {SECRET}}}]", "14:26: spec.env[0].vlaue: is not a known field; did you mean"),
        (f"[{{name: wandbKey, value: {SECRET}{'x' * 4096}}}]", "spec.env[0].value: must have at most 4096 characters"),
        (f"[{{name: A, valu: 1}}, {{name: MYKEY, value: {SECRET}}}]", "14:19: spec.env[0].valu: is not a known field"),
        (f"[{{name: HF_TOKEN, value: a{SECRET}: b: c}}]", "14:"),
    ],
)
def test_a_secret_is_not_printed(tmp_path: Path, env: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + f"  image: trainer:1\n  env: {env}\n")
    accepted, output = validated(path)
    assert not accepted
    assert message in output
    assert SECRET not in output
    with pytest.raises(JobFileError) as caught:
        load_job_file(path)
    assert SECRET not in str(caught.value)


def test_lines_beside_a_secret_and_other_values_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        JOB + f"  env:\n  - name: HF_TOKEN\n    value: {SECRET}\n  - name: NUMBER\n    value: 1\n  nodes: 3\n"
    )
    _, output = validated(path)
    assert "spec.env[1].value: must be a string (seen: 1); put it in quotes\n   17 |     value: 1\n" in output
    assert "   18 |   nodes: 3\n" in output
    assert SECRET not in output


def test_a_missing_file_is_a_problem_without_a_source_line(tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    accepted, output = validated(path)
    assert not accepted
    first, last = output.splitlines()
    assert first.startswith(f"{path}:1:1: cannot read the file (No such file or directory)")
    assert last == f"{path}: 1 problem found"


def test_a_reward_file_named_like_a_module_of_python_is_rejected_by_name(workplace: JobFolder) -> None:
    text = workplace.job_file.read_text()
    rewards = "rewards: [{type: Function, function: {path: 'numbers:score'}}]"
    workplace.job_file.write_text(text.replace("rewards: [{type: MathAnswer}]", rewards))
    for command in (("validate", "job.yaml"), ("run", "job.yaml"), ("submit", "job.yaml")):
        process = workplace.command(*command)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "job.yaml:12:49: spec.training.rewards[0].function.path: " in output
        assert "module of Python's standard library" in output
        assert "for example to my_numbers" in output
    assert not workplace.run_folder.exists()
