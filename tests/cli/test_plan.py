"""`rljob plan` of a job file: output, exit codes and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_cli.plan.profile import Profile, write_profile
from rljob_cli.plan.text import proposal_lines
from rljob_planner.constants import Constants
from rljob_planner.plan import plan_of
from rljob_planner.plan_types import Verdict
from rljob_testing.messages import Mentions
from rljob_testing.planner import samples
from rljob_testing.settings import inherited_environment

pytestmark = pytest.mark.usefixtures("empty_home")

Rljob = Callable[..., tuple[int, str, str]]

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: grpo}
spec:
  pools:
  - {name: main, nodes: 1, gpusPerNode: 8}
  training:
    steps: 100
    batchSize: 64
    model: {source: Qwen/Qwen3-4B, gradientCheckpointing: Always}
    dataset: {type: File, file: {path: rows.jsonl}, maxPromptTokens: 1024}
    rewards: [{type: MathAnswer}]
    rollout: {groupSize: 8, maxNewTokens: 3072}
    algorithm: {kl: {coefficient: 0.001}}
"""
TWO_POOLS = JOB.replace(
    "  training:\n",
    "  - {name: aside, nodes: 1, gpusPerNode: 8}\n  roles: {ref: {pool: aside}}\n  training:\n",
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The job file."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def replaced(job: Path, *changes: tuple[str, str]) -> str:
    text = job.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    job.write_text(text)
    return str(job)


def test_the_output_for_a_job_that_fits_ends_with_a_summary(rljob: Rljob, job: Path) -> None:
    code, output, errors = rljob("plan", str(job), "--cluster", "4x8xH100")
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "grpo: 8 of 32 GPUs (4x8xH100)"
    assert lines[1] == "  actor        Qwen/Qwen3-4B, 4.02 billion parameters (known model)"
    assert lines[2] == "  step         64 prompts x 8 responses, 1 update"
    assert "  pool main    actor+rollout+ref on 1x8 H100" in lines
    assert "Memory of the fullest GPU, GiB" in lines
    for phase in ("engine start", "first wake-up", "later wake-ups", "weight sync", "update", "checkpoint"):
        assert re.search(rf"^  {phase} +[0-9.]+ +78\.4  fits", output, re.MULTILINE), phase
    host = lines[lines.index("Host memory of a node, GiB") + 2]
    assert host == Mentions("  main ", "actor copies for checkpoints", "libraries 8.2", "sleeping rollout graphs 4.8")
    for phase in ("weight_sync", "generate", "ref", "update_actor", "step"):
        assert re.search(rf"^  {phase} +[0-9.]+ +[0-9.]+ to [0-9.]+ ", output, re.MULTILINE), phase
    assert re.fullmatch(
        r"Plan: fits, [0-9.]+ of 78\.4 GiB in [a-z -]+; [0-9.]+ s per step \([0-9.]+ to [0-9.]+\); 100 steps in \w+,"
        r" [0-9.]+ GPU-hours",
        lines[-1],
    )


def test_parts_in_the_json_document_add_up_to_the_total(rljob: Rljob, job: Path) -> None:
    code, output, _ = rljob("plan", str(job), "--gpu", "H100", "--json")
    assert code == 0
    plan = json.loads(output)
    assert (plan["formatVersion"], plan["kind"]) == ("1.1", "Plan")
    assert "verdictOfFile" not in plan
    [phases] = plan["phases"].values()
    for phase in phases:
        sizes = [phase[name] for name in ("total", "limit", "spare", "kvCacheShortage")]
        assert all(isinstance(size, int) for size in (*sizes, *(part["numBytes"] for part in phase["parts"])))
    assert plan["verdict"] == "FITS"
    for phase in phases:
        assert sum(part["numBytes"] for part in phase["parts"]) == pytest.approx(phase["total"])
        assert phase["spare"] == pytest.approx(phase["limit"] - phase["total"])
        assert phase["kvCacheShortage"] == 0
    # One pool: phases follow each other.
    total = sum(phase["seconds"]["likely"] for phase in plan["step"]["phases"])
    assert plan["step"]["total"]["likely"] == pytest.approx(total)
    assert plan["gpuHours"]["likely"] == pytest.approx(8 * 100 * total / 3600)
    assert plan["placement"]["pools"][0]["layouts"]["actor"] == {"shardSize": 8, "sequenceParallel": 1}
    gpu = plan["placement"]["pools"][0]["gpu"]
    assert (gpu["name"], isinstance(gpu["memoryBytes"], int), gpu["flops"]) == ("H100", True, 989e12)
    assert set(plan["step"]["phases"][0]) >= {"name", "pool", "seconds", "boundBy", "assumption", "formula"}
    assert plan["placement"]["schedule"] == "SYNCHRONOUS"
    assert [phase["phase"] for phase in phases][:3] == ["ENGINE_START", "FIRST_WAKE", "LATER_WAKE"]


def test_a_job_that_does_not_fit_exits_with_1_and_lists_changes(rljob: Rljob, job: Path) -> None:
    file = replaced(job, ("gradientCheckpointing: Always", "gradientCheckpointing: Never"))
    code, output, _ = rljob("plan", file, "--gpu", "L40S")
    assert code == 1
    assert re.search(r"^  update +[0-9.]+ +43\.7  [0-9.]+ too much", output, re.MULTILINE)
    assert re.search(r"^Proposals that make the job fit", output, re.MULTILINE)
    assert ". spec.training.model.gradientCheckpointing: Never -> Always" in output
    assert output.splitlines()[-1].startswith("Plan: does not fit, ")
    plan = json.loads(rljob("plan", file, "--gpu", "L40S", "--json")[1])
    assert plan["verdict"] == "TOO_LARGE"
    # What is proposed fits, as the plan of the changed file says, too.
    [change] = next(each["changes"] for each in plan["proposals"] if "Checkpointing" in each["changes"][0]["field"])
    assert change == {"field": "spec.training.model.gradientCheckpointing", "value": "Always", "before": "Never"}
    changed = replaced(job, ("gradientCheckpointing: Never", "gradientCheckpointing: Always"))
    assert rljob("plan", changed, "--gpu", "L40S")[0] == 0


def test_the_plan_says_what_auto_means(rljob: Rljob, job: Path) -> None:
    file = replaced(job, (", gradientCheckpointing: Always", ""))
    code, output, _ = rljob("plan", file, "--gpu", "L40S")
    assert code == 0
    assert " ".join(output.split()) == Mentions("spec.training.model.gradientCheckpointing: Auto is Always", "on GPUs")


def test_a_kv_cache_too_small_for_one_sequence_is_reported(rljob: Rljob, job: Path) -> None:
    file = replaced(job, ("groupSize: 8", "groupSize: 8, gpuMemoryUtilization: 0.1"))
    code, output, _ = rljob("plan", file, "--gpu", "H100")
    assert code == 1
    # 4.02e9 weights of two bytes are 7.5 GiB, a tenth of 79.1 GiB is 7.9: with its context the engine has no cache.
    assert re.search(r"^  engine start +[0-9.]+ +78\.4  KV cache [0-9.]+ too small ", output, re.MULTILINE)
    assert re.search(r"^Plan: does not fit, the KV cache is [0-9.]+ GiB too small in engine start; ", output, re.M)
    plan = json.loads(rljob("plan", file, "--gpu", "H100", "--json")[1])
    assert plan["phases"]["main"][0]["kvCacheShortage"] > 2 * 2**30


def test_explain_shows_formulas_with_their_numbers(rljob: Rljob, job: Path) -> None:
    short = rljob("plan", str(job), "--gpu", "H100")[1]
    code, output, _ = rljob("plan", str(job), "--gpu", "H100", "--explain")
    assert code == 0
    assert "8 x 4.022e+09 / 8" not in short
    assert re.search(r"^      actor moments +3\.75  8 x 4.022e\+09 / 8$", output, re.MULTILINE)  # 4.022e9 bytes
    assert re.search(r"  actor copies for checkpoints +[0-9.]+  8 workers x \(12 x 4.022e\+09 / 8\), each", output)
    assert re.search(r"^      actor whole gradients +[0-9.]+  2 bytes per element, 4 ", output, re.MULTILINE)
    assert re.search(r"^      actor activations +[0-9.]+  16,384 tokens x [0-9,]+ ", output, re.MULTILINE)
    assert re.search(r"^      35% of the GPU's .*\(defaults\)$", output, re.MULTILINE)
    assert output.splitlines()[-1] == short.splitlines()[-1]
    plan = json.loads(rljob("plan", str(job), "--gpu", "H100", "--json")[1])
    assert [part for phase in plan["phases"]["main"] for part in phase["parts"] if not part["formula"]] == []


def test_explain_shows_the_speed_of_cpu_cores(rljob: Rljob, job: Path) -> None:
    file = replaced(job, ("nodes: 1, gpusPerNode: 8", "nodes: 1, gpusPerNode: 1"))
    _, output, _ = rljob("plan", file, "--gpu", "cpu", "--explain")
    assert re.search(r" / \(1 x [0-9.]*[1-9][0-9.]* TFLOP/s\)", output)
    assert re.search(r"^      [0-9.]+% of the cores' .*\(defaults\)$", output, re.MULTILINE)
    assert "GPU's" not in output
    # The phases have it.
    assert "Host memory" not in output


def test_the_help_has_examples_and_required_arguments(rljob: Rljob) -> None:
    code, output, _ = rljob("plan", "--help")
    assert code == 0
    words = " ".join(output.replace("│", " ").split())
    for said in (
        "rljob plan job.yaml --gpu H100 --mean-response 800",
        "Required without --from-run or --calibrate.",
        "Cluster for --from-cluster",
        "Print the plan of a job file as JSON.",
    ):
        assert said in words


def test_the_origin_of_the_constants_is_printed(rljob: Rljob, job: Path, tmp_path: Path) -> None:
    _, output, _ = rljob("plan", str(job), "--gpu", "H100")
    assert re.search(r"^  constants    defaults; rljob plan --calibrate FOLDER ", output, re.MULTILINE)
    profile = tmp_path / "H100.json"
    write_profile(profile, Profile("H100", Constants(source="runs/x"), ("runs/x",), "2026-01-31T12:00:00Z"))
    _, output, _ = rljob("plan", str(job), "--gpu", "H100", "--profile", str(profile))
    assert "  constants    calibrated by runs/x\n" in output


def test_given_means_are_printed_and_shorter_responses_are_faster(rljob: Rljob, job: Path) -> None:
    _, output, _ = rljob("plan", str(job), "--gpu", "H100")
    assert output == Mentions("half of the limit", "--mean-response")
    code, output, _ = rljob("plan", str(job), "--gpu", "H100", "--mean-prompt", "100", "--mean-response", "200")
    assert code == 0
    assert "  lengths      prompts of 100 tokens (at most 1,024), responses of 200 (at most 3,072)\n" in output
    assert output == Mentions("lengths", without=["half of the limit"])

    def likely(*arguments: str) -> float:
        plan = json.loads(rljob("plan", str(job), "--gpu", "H100", "--json", *arguments)[1])
        return float(plan["step"]["total"]["likely"])

    assert likely("--mean-response", "200") < likely("--mean-response", "2000")
    code, _, errors = rljob("plan", str(job), "--gpu", "H100", "--mean-response", "9000")
    assert (code, errors) == (2, Mentions("--mean-response", "3072", "seen 9000"))


def test_pools_with_different_gpu_types_have_a_table_each(rljob: Rljob, job: Path) -> None:
    job.write_text(TWO_POOLS)
    code, output, _ = rljob("plan", str(job), "--cluster", "1x8xH200,1x8xL40S")
    assert code == 0
    assert "  pool main    actor+rollout on 1x8 H200\n" in output
    assert "  pool aside   ref on 1x8 L40S\n" in output
    assert "Memory of the fullest GPU of pool main, GiB\n" in output
    assert "Memory of the fullest GPU of pool aside, GiB\n" in output
    assert (
        rljob("plan", str(job), "--gpu", "main=H200", "--gpu", "aside=L40S")[1].splitlines()[3:]
        == (output.splitlines()[3:])
    )


def test_an_unknown_gpu_type_can_be_described(rljob: Rljob, job: Path) -> None:
    three = ("--gpu-memory", "79.1Gi", "--gpu-tflops", "989", "--gpu-bandwidth", "3350")
    code, output, _ = rljob("plan", str(job), *three, "--gpu", "mine")
    assert code == 0
    assert "  pool main    actor+rollout+ref on 1x8 mine\n" in output
    code, _, errors = rljob("plan", str(job), "--gpu", "mine", *three[:4])
    assert (code, errors) == (2, Mentions("--gpu-memory, --gpu-tflops, --gpu-bandwidth", "give all three"))
    code, _, errors = rljob("plan", str(job), "--gpu", "mine", "--gpu-memory", "lots", *three[2:])
    assert (code, errors) == (2, Mentions("error: --gpu-memory", "seen 'lots'", "80Gi"))


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("amd.com/gpu.product-name: MI300X", "MI300X"),
        ("cloud.google.com/gke-accelerator: nvidia-l4", "L4"),
        ("karpenter.k8s.aws/instance-gpu-name: h100", "H100"),
    ],
)
def test_gpu_labels_are_those_of_the_operator(rljob: Rljob, job: Path, label: str, kind: str) -> None:
    file = replaced(job, ("gpusPerNode: 8}", f"gpusPerNode: 8, template: {{nodeSelector: {{{label}}}}}}}"))
    assert rljob("plan", file)[1].startswith(f"grpo: 8 GPUs (1x8x{kind}, from the pools' nodeSelector)\n")


def test_the_gpu_type_comes_from_the_node_selector(rljob: Rljob, job: Path) -> None:
    selector = "template: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB}}"
    file = replaced(job, ("gpusPerNode: 8}", f"gpusPerNode: 8, {selector}}}"))
    code, output, _ = rljob("plan", file)
    assert code == 0
    assert output.startswith("grpo: 8 GPUs (1x8xA100-80, from the pools' nodeSelector)\n")
    assert "  pool main    actor+rollout+ref on 1x8 A100-80\n" in output
    # A cluster that has others first, too: the pool goes where its selector lets it.
    assert (
        "  pool main    actor+rollout+ref on 1x8 A100-80\n"
        in rljob("plan", file, "--cluster", "1x8xH100,1x8xA100-80")[1]
    )
    code, _, errors = rljob("plan", file, "--cluster", "1x8xH100")
    assert (code, errors) == (2, Mentions("spec.pools main", "1 x 8 GPUs", "A100-80", "seen 1x8xH100"))
    code, output, _ = rljob("plan", file, "--cluster", "1x8xH100", "--search")
    assert code == 0
    assert "! pool main: its nodeSelector or affinity selects A100-80, but this plan uses H100" in output


def test_the_gpu_type_comes_from_the_required_node_affinity(rljob: Rljob, job: Path) -> None:
    """Of two allowed types, the one with more memory, or the one that the cluster has."""
    kinds = "{key: nvidia.com/gpu.product, operator: In, values: [NVIDIA-L4, NVIDIA-H200]}"
    required = (
        f"{{requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [{{matchExpressions: [{kinds}]}}]}}}}"
    )
    file = replaced(job, ("gpusPerNode: 8}", f"gpusPerNode: 8, template: {{affinity: {{nodeAffinity: {required}}}}}}}"))
    assert rljob("plan", file)[1].startswith("grpo: 8 GPUs (1x8xH200, from the pools' affinity)\n")
    assert "on 1x8 L4\n" in rljob("plan", file, "--cluster", "1x8xH100,1x8xL4")[1]
    other = "! pool main: its nodeSelector or affinity selects H200, but this plan uses H100"
    assert other in rljob("plan", file, "--cluster", "1x8xH100", "--search")[1]
    # Nodes must have what both say.
    file = replaced(Path(file), ("template: {", "template: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100}, "))
    assert other in rljob("plan", file, "--cluster", "1x8xH100", "--search")[1]


def test_a_tight_job_without_helpful_changes_is_not_reported_as_too_large() -> None:
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.9))
    plan = plan_of(job, samples.placement(samples.one_pool(job)), with_proposals=False)
    assert (plan.verdict, plan.proposals) == (Verdict.TIGHT, ())
    assert [str(line) for line in proposal_lines(plan)] == ["", Mentions("None", "more room", without=["fit"])]


def test_a_label_with_an_unknown_gpu_type_is_an_error(rljob: Rljob, job: Path) -> None:
    label = "template: {nodeSelector: {nvidia.com/gpu.product: Some-New-One}}"
    code, _, errors = rljob("plan", replaced(job, ("gpusPerNode: 8}", f"gpusPerNode: 8, {label}}}")))
    assert (code, errors) == (2, Mentions("error: spec.pools main", "label", "seen 'Some-New-One'"))


def test_this_machines_gpus_are_used_last(
    rljob: Rljob, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "  pool main    actor+rollout+ref on 1x8 H100\n" in rljob("plan", str(job))[1]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    code, _, errors = rljob("plan", str(job))
    ways = ("--gpu H100", "--cluster 4x8xH100", "--from-cluster", "--gpu cpu")
    assert (code, errors) == (2, Mentions("error: spec.pools main", *ways))
    assert errors.count("\n") == 1


@pytest.mark.parametrize("name", ["quickstart", "quickstart-lora", "quickstart-ppo", "smollm2-arithmetic"])
def test_examples_are_planned_for_cpus_and_gpus(rljob: Rljob, name: str) -> None:
    file = str(EXAMPLES / f"{name}.yaml")
    code, output, errors = rljob("plan", file, "--gpu", "cpu")
    assert (code, errors) == (0, "")
    assert "Memory of the fullest worker, GiB\n" in output
    assert output.splitlines()[-1].endswith(" worker-hours")
    assert rljob("plan", file, "--gpu", "L4")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--gpu", "T4"), ("error: --gpu", "'T4'", "A100-40", "--gpu-memory")),
        (("--gpu", "other=H100"), ("error: --gpu other=H100", "no pool 'other'", "one of main")),
        (("--cluster", "1x4xH100"), ("error: spec.pools main", "1 x 8 GPUs", "seen 1x4xH100")),
        (("--cluster", "0x8xH100"), ("error: --cluster", "seen '0x8xH100'", "4x8xH100")),
        (("--cluster", "lots"), ("error: --cluster", "seen 'lots'", "4x8xH100")),
        (("--cluster", "8xH100", "--from-cluster"), ("error: --cluster", "--from-cluster", "remove one of them")),
        (("--cluster", "8xH100", "--gpu", "H200"), ("error: --gpu", "--cluster", "POOL=TYPE")),
        (
            ("--gpu", "H100", "--gpu-memory", "94Gi"),
            ("error: --gpu-memory, --gpu-tflops, --gpu-bandwidth", "seen H100", "--gpu mine"),
        ),
        (("--gpu", "H100", "--write", "x.yaml"), ("error: --write", "add --search")),
        (("--gpu", "H100", "--gpu", "L4"), ("error: --gpu", "all pools", "seen H100, L4", "once")),
        (("--gpu", "main=L4", "--gpu", "main=H100"), ("error: --gpu", "pool main", "seen main=L4, main=H100", "once")),
        (("--gpu", "H100", "--context", "far"), ("error: --context", "add --from-cluster")),
        (("--gpu", "H100", "--kubeconfig", "x y"), ("error: --kubeconfig", "add --from-cluster")),
        (("--gpu", "H100", "--json", "--explain"), ("error: --explain", "--json", "remove one of them")),
        (("--cluster", "lots", "--search", "--write", "/dev/null"), ("error: --write: /dev/null", "exists")),
        (("--from-run", "x"), ("error: rljob plan", "FILE, --from-run, --calibrate", "seen FILE and --from-run")),
    ],
)
def test_wrong_options_give_one_line_of_error(
    rljob: Rljob, job: Path, arguments: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    code, output, errors = rljob("plan", str(job), *arguments)
    assert (code, output, errors) == (2, "", Mentions(*facts))
    assert errors.count("\n") == 1


def test_layouts_that_do_not_divide_are_rejected(rljob: Rljob, job: Path) -> None:
    file = replaced(job, ("  training:\n", "  roles: {rollout: {tensorParallel: 8}}\n  training:\n"))
    replaced(job, ("Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B"))
    code, _, errors = rljob("plan", file, "--gpu", "H100")
    assert (code, errors) == (
        2,
        Mentions("error: spec.roles.rollout.tensorParallel", "28", "Qwen/Qwen2.5-7B", "seen 8"),
    )


def test_an_invalid_job_file_is_rejected_with_the_line(rljob: Rljob, job: Path) -> None:
    file = replaced(job, ("batchSize: 64", "batchSize: 63"), ("groupSize: 8", "groupSize: 3"))
    code, output, errors = rljob("plan", file, "--gpu", "H100")
    assert (code, output) == (2, "")
    assert f"{job}:9:16: spec.training.batchSize: " in errors


def test_without_a_file_or_a_run_the_choices_are_listed(rljob: Rljob) -> None:
    code, output, errors = rljob("plan")
    assert (code, output, errors) == (
        2,
        "",
        Mentions("error: rljob plan", "FILE, --from-run, --calibrate", "seen none"),
    )


def test_a_plan_is_fast_because_it_imports_little(job: Path) -> None:
    heavy = ("torch", "numpy", "transformers", "ray", "kubernetes", "urllib.request", "rljob_planner.search")
    program = (
        "import sys, time; sys.argv = ['rljob', 'plan', *sys.argv[1:]]; start = time.process_time()\n"
        "from rljob_cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as ended: code = ended.code\n"
        f"print(code, [name for name in {heavy} if name in sys.modules], time.process_time() - start)"
    )
    command = [sys.executable, "-c", program, str(job), "--cluster", "4x8xH100"]
    environment = inherited_environment()
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    last = result.stdout.splitlines()[-1]
    code, loaded, seconds = last.split(" ", 1)[0], last[last.index("[") : last.index("]") + 1], last.rsplit(" ", 1)[1]
    assert (code, loaded) == ("0", "[]")
    # Of the processor, which other programs on the machine do not make longer.
    assert float(seconds) < 2.0
