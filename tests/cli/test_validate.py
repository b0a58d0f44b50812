"""`rljob validate`: every problem with its path and source line, or one line for a valid file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from rich.cells import cell_len
from rich.console import Console

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_file, load_job_text
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_cli.validate import validate_file
from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: example}
spec:
  pools: [{name: main, nodes: 2, gpusPerNode: 6}]
  checkpoint: {storage: {persistentVolumeClaim: results}}
  training:
    model: {source: owner/model}
    dataset: {type: File, file: {path: "[bold]train.jsonl"}}
    rewards: [{type: MathAnswer}]
    steps: 10
    batchSize: 72
"""


def validated(path: Path) -> tuple[bool, str]:
    output = io.StringIO()
    job = validate_file(path, (), Console(file=output, width=80))
    return job is not None, output.getvalue()


def test_a_valid_file_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert validated(path) == (True, f"{path}: RLJob example is valid (pool main: 2 nodes x 6 GPUs)\n")


def test_every_problem_is_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("batchSize: 72", "batchSize: 64").replace("type: MathAnswer", "type: Function"))
    accepted, output = validated(path)
    assert not accepted
    with pytest.raises(JobFileError) as caught:
        load_job_file(path)
    missing, uneven = map(str, caught.value.problems)
    assert missing == Mentions("spec.training.rewards[0].function:", "required")
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
  volumes: [{name: scratch, mountPath: /scratch, type: EmptyDir, emptyDir: {sizeLimit: 800m}}]
  checkpoint: {storage: {persistentVolumeClaim: results}}
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
    no_bytes, old_label, no_queue = "whole number of bytes", "deprecated label", "Kueue"
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    head, affinity = "spec.head.template", "spec.pools[0].template.affinity.podAntiAffinity"
    terms = f"{head}.affinity.nodeAffinity.{required}.nodeSelectorTerms[0].matchExpressions[0]"
    expected = [
        ("6:44", "metadata.annotations.kueue.x-k8s.io/queue-name", no_queue, '(seen: "team")'),
        ("9:36", "spec.head.resources.requests.memory", no_bytes, '(seen: "400m")'),
        ("9:95", "spec.head.resources.limits.ephemeral-storage", no_bytes, '(seen: "0.5")'),
        ("11:47", f"{head}.nodeSelector.beta.kubernetes.io/arch", old_label, "kubernetes.io/arch"),
        ("13:61", f"{head}.annotations.container.apparmor.security.beta.kubernetes.io/ray", "deprecated", "1.30"),
        ("14:47", f"{head}.annotations.security.alpha.kubernetes.io/sysctls", "no effect", "annotation"),
        ("19:40", f"{terms}.key", old_label, '(seen: "failure-domain.beta.kubernetes.io/zone")'),
        ("20:88", "spec.volumes[0].emptyDir.sizeLimit", no_bytes, '(seen: "800m")'),
        ("26:19", "spec.pools[0].sharedMemory", no_bytes, '(seen: "600m")'),
        ("31:13", f"{affinity}.{required}[0]", "labelSelector", "pods"),
        ("32:27", f"{affinity}.{required}[1].topologyKey", old_label, "failure-domain.beta.kubernetes.io/region"),
        ("39:27", "spec.training.rollout.cpuKvCache", no_bytes, '(seen: "1500m")'),
    ]
    assert warnings == [Mentions(f"{path}:{where}: warning: {field}:", *parts) for where, field, *parts in expected]
    assert last == f"{path}: RLJob example is valid (pool main: 2 nodes x 6 GPUs)"


def test_what_a_cluster_would_reject_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("checkpoint: {storage: {persistentVolumeClaim: results}}", "rayVersion: 2.9.0"))
    accepted, output = validated(path)
    assert accepted
    assert output == Mentions("warning: spec.checkpoint.storage:", "required on a Kubernetes cluster", "is valid")
    assert output == Mentions("6:15: warning: spec.rayVersion:", "at least 2.54.0 on a Kubernetes cluster")


@pytest.mark.parametrize(
    ("shared_memory", "limit", "is_warned_of"), [("64Gi", "64Gi", True), ("8Gi", "4Gi", True), ("8Gi", "64Gi", False)]
)
def test_shared_memory_that_can_use_up_the_memory_limit_is_warned_of(
    tmp_path: Path, shared_memory: str, limit: str, *, is_warned_of: bool
) -> None:
    path = tmp_path / "job.yaml"
    pool = f"gpusPerNode: 6, sharedMemory: {shared_memory}, resources: {{limits: {{memory: {limit}}}}}"
    path.write_text(JOB.replace("gpusPerNode: 6", pool))
    accepted, output = validated(path)
    assert accepted
    assert ("warning" in output) is is_warned_of
    if is_warned_of:
        assert output == Mentions("spec.pools[0].sharedMemory:", limit, f'(seen: "{shared_memory}")', "reduce")


@pytest.mark.parametrize(
    ("min_nodes", "batch_size", "is_warned_of"),
    [(1, 72, False), (2, 72, True), (5, 72, True), (3, 15, False), (4, 15, True)],
)
def test_an_elastic_job_that_never_uses_fewer_nodes_is_warned_of(
    tmp_path: Path, min_nodes: int, batch_size: int, *, is_warned_of: bool
) -> None:
    path = tmp_path / "job.yaml"
    elastic = f"  runPolicy: {{elastic: {{minNodes: {min_nodes}}}}}\n"
    text = JOB.replace("batchSize: 72", f"batchSize: {batch_size}")
    if batch_size == 15:
        # 15 x 8 responses can be divided among 5 x 8 and 3 x 8 GPUs, but not among 4 x 8.
        text = text.replace("nodes: 2, gpusPerNode: 6", "nodes: 5, gpusPerNode: 8")
    path.write_text(text + elastic)
    accepted, output = validated(path)
    assert accepted, output
    assert ("warning" in output) is is_warned_of
    if is_warned_of:
        assert output == Mentions("spec.runPolicy.elastic.minNodes:", "no effect", f"(seen: {min_nodes})")


def test_the_last_line_says_that_rules_were_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("batchSize: 72", "batchSize: 64").replace("steps: 10", "stepss: 10"))
    _, output = validated(path)
    assert output == Mentions("2 problems found", "validate again", "rules", "not checked")
    path.write_text(JOB.replace("batchSize: 72", "batchSize: 64"))
    _, output = validated(path)
    assert output.splitlines()[-1] == f"{path}: 1 problem found"
    for change in ("batchSize: yes", "batchSize: 64\n    steps: 11", 'batchSize: "64'):
        path.write_text(JOB.replace("batchSize: 72", change))
        _, output = validated(path)
        assert output == Mentions("1 problem found", "validate again", "fields", "not checked")


def test_a_job_that_is_too_large_for_a_cluster_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    annotations = "".join(f"        note-{number}: {'x' * 4096}\n" for number in range(17))
    path.write_text(JOB.replace("spec:\n", "spec:\n  head:\n    template:\n      annotations:\n" + annotations))
    accepted, output = validated(path)
    assert accepted
    assert output == Mentions("warning: spec:", "too large", "example")


def test_advice_on_a_quantity_leads_to_an_accepted_value(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for written in ("1e3", "0.5"):
        resources = f"spec:\n  head: {{resources: {{requests: {{cpu: {written}}}}}}}\n"
        path.write_text(JOB.replace("spec:\n", resources))
        accepted, output = validated(path)
        assert not accepted
        assert output == Mentions("spec.head.resources.requests.cpu:", f"(seen: {float(written)})", "quotes")
        path.write_text(JOB.replace("spec:\n", resources.replace(written, f'"{written}"')))
        assert validated(path) == (True, f"{path}: RLJob example is valid (pool main: 2 nodes x 6 GPUs)\n")


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
    assert output == Mentions("spec.head.template.labels.team:", "label value")
    assert output == Mentions("spec.head.resources.limits.memory:", "quantity", "16Gi")
    assert output == Mentions("spec.image:", "container image", "registry.example/team/trainer:1.2")
    assert output == Mentions("metadata.labels.a b:", "label key", "example.com/team")
    path.write_text(
        path.read_text().replace("team: a b", "team: ab").replace("-1", "1Gi").replace("Trainer", "trainer")
    )
    path.write_text(path.read_text().replace(", labels: {a b: c}", ""))
    _, output = validated(path)
    assert output == Mentions(f"{path}:7:32: spec.head.resources.limits.cpuu:", "resource", "did you mean cpu?")
    assert output == Mentions(f"{path}:8:33: spec.head.template.labels.team a:", "key")


def test_resolved_prints_a_job_file_and_the_rest_goes_to_standard_error(rljob: Rljob, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "    algorithm: {type: DrGRPO}\n")
    _, output, errors = rljob("validate", "--resolved", str(path))
    assert errors == f"{path}: RLJob example is valid (pool main: 2 nodes x 6 GPUs)\n"
    resolved, job = load_job_text(output).spec.training, load_job_file(path).spec.training
    assert resolved.algorithm == resolve_algorithm(job.algorithm)
    assert [each.on_error for each in resolved.rewards] == [each.error_policy for each in job.rewards]
    assert resolved.model_copy(update={"algorithm": job.algorithm, "rewards": job.rewards}) == job


def test_resolved_prints_no_job_if_there_is_a_problem(rljob: Rljob, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "    algorithm: {type: A2C}\n")
    code, output, errors = rljob("validate", "--resolved", str(path))
    assert (code, output) == (2, "")
    assert errors == Mentions("13:23: spec.training.algorithm.type:", "GRPO, DrGRPO")


def test_square_brackets_in_a_file_are_not_markup(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("path:", "paht:"))
    _, output = validated(path)
    assert '{paht: "[bold]train.jsonl"}' in output


@pytest.mark.parametrize("value", ["日本語", "x\ty", "e\u0301", "a\u202eb", "z" * 5000])
def test_the_mark_is_below_the_problem(tmp_path: Path, value: str) -> None:
    path = tmp_path / "job.yaml"
    reward = f"{{name: '{value}', type: Function, fnction: 1, more: '{value}'}}"
    path.write_text(JOB.replace("{type: MathAnswer}", reward))
    _, output = validated(path)
    lines = output.splitlines()
    at = next(index for index, line in enumerate(lines) if "fnction: is not" in line)
    before, found, _ = lines[at + 1].partition("fnction")
    assert found
    assert cell_len(before) == lines[at + 2].index("^")
    assert len(lines[at + 1]) < 200


def test_a_job_from_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for text, accepted, lines in (
        (JOB, True, [f"{pipe}: RLJob example is valid (pool main: 2 nodes x 6 GPUs)"]),
        (JOB.replace("{name: example}", "{name: example, labels: {kueue.x-k8s.io/queue: a}}"), True, None),
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
    ("env", "parts"),
    [
        (f"[{{name: HF_TOKEN, value: {SECRET}}}]", ("14:33: spec.env[0].value:", "TOKEN")),
        (
            f"[{{name: HF_TOKEN, value: [{SECRET}]}}]",
            ("14:33: spec.env[0].value:", "string", "(seen: a list with 1 entry)"),
        ),
        (f"[{{name: HF_TOKEN, vlaue: {SECRET}}}]", ("14:26: spec.env[0].vlaue:", "known field", "did you mean")),
        (f"[{{name: wandbKey, value: {SECRET}{'x' * 4096}}}]", ("spec.env[0].value:", "4096 characters")),
        (f"[{{name: A, valu: 1}}, {{name: MYKEY, value: {SECRET}}}]", ("14:19: spec.env[0].valu:", "known field")),
        (f"[{{name: HF_TOKEN, value: a{SECRET}: b: c}}]", ("14",)),
    ],
)
def test_a_secret_is_not_printed(tmp_path: Path, env: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + f"  image: trainer:1\n  env: {env}\n")
    accepted, output = validated(path)
    assert not accepted
    assert output == Mentions(*parts)
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
    assert output == Mentions("spec.env[1].value:", "string", "(seen: 1)", "quotes")
    assert "\n   17 |     value: 1\n" in output
    assert "   18 |   nodes: 3\n" in output
    assert SECRET not in output


def test_a_missing_file_is_a_problem_without_a_source_line(tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    accepted, output = validated(path)
    assert not accepted
    first, last = output.splitlines()
    assert first == Mentions(f"{path}:1:1:", "No such file or directory")
    assert last == f"{path}: 1 problem found"


def test_a_reward_file_named_like_a_module_of_python_is_rejected_by_name(workplace: JobFolder) -> None:
    text = workplace.job_file.read_text()
    rewards = "rewards: [{type: Function, function: {path: 'numbers:score'}}]"
    workplace.job_file.write_text(text.replace("rewards: [{type: MathAnswer}]", rewards))
    for command in (("validate", "job.yaml"), ("run", "job.yaml"), ("submit", "job.yaml")):
        process = workplace.command(*command)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        where = "job.yaml:12:49: spec.training.rewards[0].function.path:"
        assert output == Mentions(where, "Python's standard library", "my_numbers")
    assert not workplace.run_folder.exists()
