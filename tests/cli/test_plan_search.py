"""`rljob plan --search` finds the best placement of a job's roles; `--write` writes a job file with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from rljob.differences import differences
from rljob_api.job_file import load_job_file, load_job_text
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.errors import CliError
from rljob_cli.plan.search import changed_spec
from rljob_cli.plan.write import changed_text
from rljob_planner.memory.job_changes import Change
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.usefixtures("empty_home")

Rljob = Callable[..., tuple[int, str, str]]

JOB = """\
# What the job is for.
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: grpo}  # its name
spec:
  # Where it runs.
  pools:
    - name: main         # all of it
      nodes: 1
      gpusPerNode: 8
      resources: {requests: {cpu: "8"}}

  training:
    steps: 100     # enough
    batchSize: 64
    model:
      source: "Qwen/Qwen3-4B"
      gradientCheckpointing: Always   # 80 GB are not much
    dataset: {type: File, file: {path: 'rows.jsonl'}, maxPromptTokens: 1024}
    rewards: [{type: MathAnswer}]
    optimizer: {learningRate: 1e-6}
    rollout: {groupSize: 8, maxNewTokens: 3072}
    algorithm: {kl: {coefficient: 0.001}}
"""
NOT_CHECKPOINTED = JOB.replace("gradientCheckpointing: Always", "gradientCheckpointing: Never")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The job file."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def moved(text: str, pools: str, roles: str) -> RLJobSpec:
    """The spec of a job file with its pools and roles replaced."""
    before = text.index("  # Where it runs.")
    after = text.index("  training:\n")
    return load_job_text(f"{text[:before]}  pools: {pools}\n  roles: {roles}\n{text[after:]}").spec


def test_placements_are_ranked_with_the_reasons_why_others_are_slower(rljob: Rljob, job: Path) -> None:
    code, output, errors = rljob("plan", str(job), "--cluster", "2x8xH100", "--search")
    assert (code, errors) == (0, "")
    assert output.startswith("grpo: 16 GPUs (2x8xH100)\n")
    rows = re.findall(r"^  (\d+) +([0-9.,]+) +[0-9.,]+ to [0-9.,]+ .*(yes|no) +(\S.*)$", output, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert 3 <= len(rows) <= 10
    assert any(runs == "no" for _, _, runs, _ in rows)
    assert len({where for *_, where in rows}) == len(rows)
    for at, line in enumerate(lines := output.splitlines()):
        if re.match(r"^  ([2-9]|10) +[0-9]", line):
            assert lines[at + 1].startswith("       "), line  # why it is behind
    assert output.splitlines()[-1].startswith("Plan: fits, ")
    assert output.count("  Not tried: ") == 1
    assert "template.nodeSelector" not in output
    output = rljob("plan", str(job), "--cluster", "1x8xH100,1x8xL4", "--search")[1]
    assert " ".join(output.split()) == Mentions("several GPU types", "main H100", "template.nodeSelector")


def test_the_json_document_has_the_search(rljob: Rljob, job: Path) -> None:
    code, output, _ = rljob("plan", str(job), "--cluster", "2x8xH100", "--search", "--json")
    assert code == 0
    plan = json.loads(output)
    assert (plan["formatVersion"], plan["kind"]) == ("1.1", "Plan")
    assert (plan["verdict"], plan["verdictOfFile"]) == ("FITS", "FITS")
    best, candidates = plan["search"]["bestSupported"]["plan"], [each["plan"] for each in plan["search"]["candidates"]]
    assert all(isinstance(each["fullestPhase"]["total"], int) for each in candidates)
    assert best["placement"]["isSupported"]
    fastest = min(each["step"]["total"]["likely"] for each in candidates)
    assert candidates[0]["step"]["total"]["likely"] <= 1.1 * fastest
    today = [each["step"]["total"]["likely"] for each in candidates if each["placement"]["isSupported"]]
    assert best["step"]["total"]["likely"] <= 1.1 * min(today)


def test_the_written_job_has_the_plan_that_was_printed(rljob: Rljob, job: Path, tmp_path: Path) -> None:
    target = tmp_path / "mapped.yaml"
    code, output, _ = rljob("plan", str(job), "--cluster", "2x8xH100", "--search", "--write", str(target))
    assert code == 0
    assert output.endswith(f"wrote {target}; next: rljob validate {target}\n")
    assert rljob("validate", str(target))[0] == 0
    shown = next(line for line in output.splitlines() if line.startswith("Plan: "))
    code, again, _ = rljob("plan", str(target), "--cluster", "2x8xH100")
    assert (code, again.splitlines()[-1]) == (0, shown)
    code, _, errors = rljob("plan", str(job), "--cluster", "2x8xH100", "--search", "--write", str(target))
    assert code == 2
    assert errors == Mentions("error: --write", str(target), "already exists")


def test_a_job_from_a_pipe_can_be_written(rljob: Rljob, job: Path, tmp_path: Path) -> None:
    pipe, target = tmp_path / "pipe", tmp_path / "mapped.yaml"
    os.mkfifo(pipe)
    Thread(target=pipe.write_text, args=(job.read_text(),), daemon=True).start()
    code, output, errors = rljob("plan", str(pipe), "--cluster", "2x8xH100", "--search", "--write", str(target))
    assert (code, errors) == (0, ""), output
    assert target.read_text().startswith("# What the job is for.\n")
    assert load_job_file(target).metadata.name == "grpo"


def test_if_nothing_fits_the_job_is_searched_again_with_changes(rljob: Rljob, job: Path, tmp_path: Path) -> None:
    job.write_text(NOT_CHECKPOINTED)
    target = tmp_path / "mapped.yaml"
    arguments = ("plan", str(job), "--cluster", "1x8xL40S", "--search")
    code, output, _ = rljob(*arguments)
    assert code == 1  # the job as it is does not fit
    assert output == Mentions("fits on 1x8xL40S")
    assert re.search(r"^The best placements .*\bspec\.training\.\S+ to \S+$", output, re.MULTILINE)
    assert re.search(r"^  - spec\.training\.\S+: \S+ -> \S+$", output, re.MULTILINE)
    assert output.splitlines()[-1].startswith("Plan: fits with the changes above, ")
    code, output, _ = rljob(*arguments, "--write", str(target))
    assert code == 0
    assert rljob("plan", str(target), "--cluster", "1x8xL40S")[0] == 0
    code, output, _ = rljob(*arguments, "--json")
    assert (code, json.loads(output)["verdict"], json.loads(output)["verdictOfFile"]) == (1, "TOO_LARGE", "TOO_LARGE")
    # With --write it is that of the job as it is written, whatever the file's own is.
    code, output, _ = rljob(*arguments, "--json", "--write", str(tmp_path / "again.yaml"))
    plan = json.loads(output)
    assert (code, plan["verdict"], plan["verdictOfFile"]) == (
        0,
        plan["search"]["bestSupported"]["plan"]["verdict"],
        "TOO_LARGE",
    )
    changes = plan["search"]["changes"]
    wire = load_job_file(target).spec.to_wire()
    for change in changes:
        place: object = {"spec": wire}
        for part in change["field"].split("."):
            assert isinstance(place, dict)
            place = place[part]
        assert str(place).lower() == change["value"].lower()


def test_the_help_explains_the_exit_code_of_a_search(rljob: Rljob) -> None:
    words = " ".join(rljob("plan", "--help")[1].split())
    assert words == Mentions(
        "Exit codes", "With --search: 0", "placement that the trainer can run", "With --write: 0", "written job"
    )


def test_if_no_change_helps_the_closest_placement_is_shown_and_nothing_written(
    rljob: Rljob, job: Path, tmp_path: Path
) -> None:
    job.write_text(JOB.replace("Qwen/Qwen3-4B", "meta-llama/Llama-3.1-405B"))
    target = tmp_path / "mapped.yaml"
    code, output, _ = rljob("plan", str(job), "--cluster", "1x8xL4", "--search", "--write", str(target))
    assert code == 1
    assert re.search("^No placement fits; the closest one ", output, re.MULTILINE)
    assert output == Mentions("fits on 1x8xL4")
    assert output.splitlines()[-1] == Mentions(str(target), "not written")
    assert not target.exists()


def test_a_search_ignores_that_the_files_pools_do_not_fit_into_the_cluster(rljob: Rljob, job: Path) -> None:
    code, output, _ = rljob("plan", str(job), "--cluster", "1x4xH100", "--search")
    assert code == 0
    assert "as written" not in output
    assert "  - spec.pools[main].gpusPerNode: 8 -> 4\n" in output


def test_a_search_reports_errors_that_no_placement_can_fix(rljob: Rljob, job: Path) -> None:
    here = "      gradientCheckpointing: Always"
    job.write_text(JOB.replace(here, f"      gradientCheckpointingEveryNthLayer: 99\n{here}"))
    code, _, errors = rljob("plan", str(job), "--cluster", "1x4xH100", "--search")
    assert code == 2
    assert errors == Mentions(
        "spec.training.model.gradientCheckpointingEveryNthLayer", "36 layers", "seen: 99", "remove it"
    )


@pytest.mark.parametrize("tflops", ["nan", "inf", "0", "-1", "1e300"])
def test_an_impossible_gpu_speed_is_rejected(rljob: Rljob, job: Path, tflops: str) -> None:
    three = ("--gpu-memory", "80Gi", "--gpu-tflops", tflops, "--gpu-bandwidth", "3350")
    code, _, errors = rljob("plan", str(job), "--cluster", "1x8xmine", *three)
    assert code == 2
    assert errors.startswith("error: --gpu-tflops, --gpu-bandwidth: must be at least 0.001 and at most 1,000,000 (seen")


def test_comments_and_quotes_stay_as_they_were() -> None:
    pools = "[{name: main, nodes: 2, gpusPerNode: 8, resources: {requests: {cpu: '8'}}}]"
    spec = moved(JOB, pools, "{rollout: {tensorParallel: 2}, actor: {shardSize: 8}}")
    assert changed_text(JOB, load_job_text(JOB).spec, spec) == JOB.replace("nodes: 1\n", "nodes: 2\n").replace(
        "\n  training:\n",
        "\n  roles:\n    actor: {shardSize: 8}\n    rollout: {tensorParallel: 2}\n  training:\n",
    )


def test_a_file_without_changes_is_written_as_it_is() -> None:
    spec = load_job_text(JOB).spec
    assert changed_text(JOB, spec, spec) == JOB


def test_pools_can_be_added_removed_and_reordered() -> None:
    resources = "resources: {requests: {cpu: '8'}}"
    two = f"[{{name: aside, gpusPerNode: 4}}, {{name: main, nodes: 2, gpusPerNode: 8, {resources}}}]"
    roles = "{actor: {pool: main}, rollout: {pool: main}, ref: {pool: aside, shardSize: 2}}"
    spec = moved(JOB, two, roles)
    old = load_job_text(JOB).spec
    text = changed_text(JOB, old, spec)
    found = load_job_text(text).spec
    assert found.pools == spec.pools
    assert found.placed_roles() == spec.placed_roles()
    assert "# all of it" in text
    assert "# enough" in text
    # And back again: what equals its default is left out.
    again = load_job_text(changed_text(text, found, old)).spec
    assert again.to_full_wire() == old.to_full_wire()


def test_an_invalid_result_is_reported_and_not_written() -> None:
    spec = load_job_text(JOB).spec
    [pool] = spec.pools
    uneven = spec.model_copy(update={"pools": (pool.model_copy(update={"nodes": 3, "gpus_per_node": 7}),)})
    with pytest.raises(CliError, match=r"(?s)^--write: nothing was written.*spec.training.batchSize"):
        changed_text(JOB, spec, uneven)


def test_yaml_aliases_are_not_changed() -> None:
    text = JOB.replace("  training:\n", "  roles: {actor: &where {shardSize: 8}, ref: *where}\n  training:\n")
    spec = load_job_text(text).spec
    ref = spec.roles.ref.model_copy(update={"shard_size": 4})
    other = spec.model_copy(update={"roles": spec.roles.model_copy(update={"ref": ref})})
    with pytest.raises(CliError, match=r"^--write: nothing was written.*YAML aliases"):
        changed_text(text, spec, other)


def test_changes_are_listed_field_by_field() -> None:
    old = load_job_text(JOB).spec
    resources = "resources: {requests: {cpu: '8'}}"
    pools = f"[{{name: main, nodes: 2, gpusPerNode: 8, {resources}}}, {{name: aside, nodes: 1, gpusPerNode: 2}}]"
    new = moved(JOB, pools, "{rollout: {tensorParallel: 2}, ref: {pool: aside}}")
    assert differences(old, new) == [
        "spec.pools[main].nodes: 1 -> 2",
        'spec.pools[aside]: unset -> {"name": "aside", "nodes": 1, "gpusPerNode": 2, "gpuResource...',
        "spec.roles.rollout.tensorParallel: 1 -> 2",
        'spec.roles.ref.pool: unset -> "aside"',
    ]
    assert differences(new, old)[1].endswith(" -> unset")
    assert differences(old, old) == []


def test_changes_of_training_settings_are_written_to_their_fields() -> None:
    spec = load_job_text(JOB).spec
    changes = [
        Change("spec.training.model.offload.optimizer", "true", "false"),
        Change("spec.training.rollout.gpuMemoryUtilization", "0.35", "0.5"),
    ]
    changed = changed_spec(spec, changes)
    assert changed.training.model.offload.optimizer
    assert changed.training.rollout.gpu_memory_utilization == 0.35
    assert changed.training.rollout.group_size == 8
    text = changed_text(JOB, spec, changed)
    assert load_job_text(text).spec == changed
    assert "# 80 GB are not much" in text
    judged = load_job_text(
        JOB.replace(
            "[{type: MathAnswer}]",
            "[{type: MathAnswer}, {type: RewardModel, name: taste, rewardModel: {source: a/b}}]",
        )
    ).spec
    field = Change("spec.training.rewards[].rewardModel.offload", "true", "false")
    assert differences(judged, changed_spec(judged, [field])) == [
        "spec.training.rewards[taste].rewardModel.offload: false -> true"
    ]
