"""The documents are correct: commands and values exist, permissions are sufficient and complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from rljob_api.constants import ExitCode
from rljob_cli.__main__ import app
from rljob_operator.reconcile.attempt_endings import _EXIT_REASONS
from rljob_testing import pages
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster, StandInKubelet
from rljob_trainer.algorithms.function_results import NOT_FINITE_SUM
from rljob_trainer.algorithms.policy_losses import CLIPPED_SUM, DUAL_CLIPPED_SUM, KL_SUM
from rljob_trainer.observability import metrics
from rljob_trainer.observability.memory import Boundary, Owner

INSTALL = (pages.REPOSITORY / "docs" / "install.md").read_text()
CHART = pages.REPOSITORY / "charts" / "rljob-operator"
SINCE = "2026-01-31T12:30:00Z"

Rljob = Callable[..., tuple[int, str, str]]


def command_lines() -> Iterator[tuple[str, str]]:
    for document in pages.all_pages():
        for line in re.findall(r"(?:^|^\$ |`)rljob ([a-z][^`\n#|]*)", document.read_text(), re.MULTILINE):
            yield document.name, line.strip()


def test_every_documented_command_exists_with_its_options() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for document, line in command_lines():
        name, *words = line.split()
        assert name in commands, f"{document}: rljob {line}"
        options = {option for parameter in commands[name].params for option in parameter.opts}
        for word in words:
            option = word.partition("=")[0]
            assert not word.startswith("-") or option in {*options, "--help"}, f"{document}: rljob {line}"
        seen.add(name)
    assert seen >= {"run", "submit", "status", "logs", "explain", "delete"}


def test_every_metric_is_documented_by_its_name() -> None:
    page = (pages.REPOSITORY / "docs" / "metrics.md").read_text()
    prefixes = {
        metrics.REWARD_PREFIX,
        metrics.SAMPLING_REWARD_PREFIX,
        metrics.RESPONSE_LENGTH_PREFIX,
        metrics.TURNS_PREFIX,
        metrics.TIMING_PREFIX,
        metrics.MEMORY_PREFIX,
    }
    losses = {f"actor/{name}" for name in (CLIPPED_SUM, DUAL_CLIPPED_SUM, KL_SUM, NOT_FINITE_SUM)}
    names = {
        value for value in vars(metrics).values() if isinstance(value, str) and re.fullmatch(r"[a-z_]+/[a-z_/]*", value)
    }
    assert len(names | losses) > 25
    assert [name for name in sorted((names | losses) - prefixes) if f"`{name}`" not in page] == []


def test_every_owner_and_boundary_of_memory_is_documented() -> None:
    page, table = ((pages.REPOSITORY / "docs" / name).read_text() for name in ("metrics.md", "memory.md"))
    assert [owner for owner in Owner if f"`memory/{owner}_bytes_max`" not in page] == []
    assert [boundary for boundary in Boundary if f"| `{boundary}`" not in table] == []


def test_the_documented_chart_values_are_those_of_the_chart() -> None:
    values = YAML(typ="safe", pure=True).load(CHART / "values.yaml")
    assert [name for name in values if not re.search(rf"`{name}[`.]", INSTALL)] == []
    table = INSTALL[INSTALL.index("### Values") : INSTALL.index("## Storage")]
    for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        parent: list[str] = []
        for name in re.findall(r"`([^`]+)`", cell):
            path = [*parent, *name.strip(".").split(".")] if name.startswith(".") else name.split(".")
            found = values
            for part in path:
                assert part in found, f"{name} in {cell}"
                found = found[part]
            parent = path[:-1]


def test_the_documented_permissions_of_the_operator_are_those_of_the_chart() -> None:
    text = (CHART / "templates" / "_rules.tpl").read_text()
    rules = YAML(typ="safe", pure=True).load(re.sub(r"\{\{.*?\}\}", "", text, flags=re.DOTALL))
    table = {
        "rljobs": ["get", "list", "watch", "delete"],
        "rljobs/status": ["patch"],
        "rayclusters": ["get", "list", "watch", "create", "delete"],
        "pods": ["list", "watch"],
        "events": ["create", "list"],
        "secrets": ["create"],
        "networkpolicies": ["list", "create", "patch"],
        "workloads": ["list", "watch"],
    }
    granted: dict[str, set[str]] = {}
    for rule in rules:
        for resource in rule["resources"]:
            granted.setdefault(resource, set()).update(rule["verbs"])
    assert granted == {resource: set(verbs) for resource, verbs in table.items()}
    for resource, verbs in table.items():
        row = next(line for line in INSTALL.splitlines() if line.startswith("|") and f"`{resource}`" in line)
        assert set(re.findall(r"get|list|watch|create|patch|delete", row.split("|")[2])) == set(verbs), row


def test_the_documented_exit_codes_are_those_of_the_operator() -> None:
    text = (pages.REPOSITORY / "docs" / "cluster.md").read_text()
    for code in (ExitCode.CONFIGURATION, ExitCode.INFRASTRUCTURE, ExitCode.INTERRUPTED):
        row = next(line for line in text.splitlines() if line.startswith(f"| {code.value}"))
        assert f"`{_EXIT_REASONS[code]}`" in row


@pytest.mark.apiserver
def test_the_documented_user_role_suffices_for_every_command(
    job_cluster: JobCluster, kubelet: StandInKubelet, rljob: Rljob, job_file: Path
) -> None:
    manifest = re.search(r"```yaml\n(apiVersion: rbac.*?)```", INSTALL, re.DOTALL)
    assert manifest is not None
    role, binding = YAML(typ="safe", pure=True).load_all(manifest[1])
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    token = job_cluster.account_token(role)
    job_cluster.kubeconfig.write_text(job_cluster.server.kubeconfig(token=token, namespace=job_cluster.namespace))

    job_file.write_text(job_file.read_text() + "  checkpoint: {storage: {persistentVolumeClaim: results}}\n")
    assert rljob("submit", str(job_file))[0] == 0
    job_file.write_text(job_file.read_text() + "  runPolicy: {gracePeriodSeconds: 60}\n")
    assert rljob("submit", str(job_file))[0] == 0
    metadata = job_cluster.job("small")["metadata"]
    assert isinstance(metadata, dict)
    labels = {"rljob.dev/job-uid": str(metadata["uid"]), "rljob.dev/attempt": "1", "ray.io/node-type": "head"}
    state = {"running": {"startedAt": SINCE}}
    status = {"name": "driver", "ready": True, "restartCount": 0, "image": "i", "imageID": "i", "state": state}
    job_cluster.create_pod("head", labels, ["ray", "driver"], {"containerStatuses": [status]})
    job_cluster.write_status("small", job_statuses.full_status())
    kubelet.logs[f"{job_cluster.namespace}/head/driver"] = [b"a line\n"]
    assert rljob("logs", "small") == (0, "a line\n", "")
    steering = (["suspend", "small"], ["resume", "small"], ["stop", "small"])
    for command in (["status", "small"], ["list"], ["explain", "small"], *steering):
        code, _, errors = rljob(*command)
        assert (code, errors) == (0, ""), command
    result = {"outcome": "Failed", "reason": "OutOfMemory", "at": SINCE}
    job_cluster.write_status("small", {"result": result})
    for command in (["retry", "small"], ["delete", "small"]):
        code, _, errors = rljob(*command)
        assert (code, errors) == (0, ""), command
