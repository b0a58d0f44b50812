"""An update of random models of 0.6 to 4 billion parameters on one device: tokens per second, fraction of the device's
peak, and memory compared with the planner's formula.

    PYTHONPATH=crds/src:cli/src:operator/src:trainer/src:tests/support python bench/gpu_step.py
        [--device cuda|cpu] [--models NAME,...] [--kernels Plain|Liger] [--tokens N] [--longest N] [--rounds N]
        [--quick] [--seconds N] [--json PATH] [--markdown PATH]

It needs torch, transformers, safetensors, numpy, pydantic and ruamel.yaml (with `--kernels Liger` liger-kernel, too),
but neither Ray nor vLLM. The update is that
of `workers/actor.py` on random rows: micro-batches of `--tokens` tokens in BFloat16 (on a CPU Float32), gradient
clipping, AdamW. A case that does not fit according to the formula, or that may exceed `--seconds`, is skipped and
listed. On a CPU a tiny model only shows that the program works; the data sheets are for GPUs.

Fraction of the peak: the operations per second of forward and backward pass without recomputation, divided by the dense
BFloat16 peak of the data sheet (`rljob_bench/device_peak.py`), and by the speed of a large matrix product in this run.
Memory: the allocator's peak in an update after the first one, which has no moments yet. The planner's formulas count
both (`rljob_bench/update_work.py`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rljob_api.v1alpha1.model import Kernels
from rljob_bench.device_peak import measured_peak, stated_peak, synchronize
from rljob_bench.machine import installed_versions
from rljob_bench.memory import peak_growth_bytes
from rljob_bench.report import Bar, Measurement, Report
from rljob_bench.single_actor import (
    build_actor,
    only_worker,
    random_model,
    random_rollout,
    random_work,
    release_cached_memory,
)
from rljob_bench.time_limit import TimeLimit
from rljob_bench.update_work import SHAPES, TINY, Work, planned_peak_bytes, update_operations
from rljob_planner.model_shape import ModelShape
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.memory import MEMORY
from rljob_trainer.observability.metrics import MEMORY_PREFIX
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.columns import token_batch

GIB = 2**30
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
INTERVALS = {"kept": 0, "every 2nd layer again": 2, "all again": 1}
"""How activations are handled for the backward pass: every n-th layer recomputes them; 0 keeps all."""
NUM_MICRO_BATCHES = 2
MAX_MEMORY_RATIO = 1.1
DEFAULT_SECONDS = 90.0
USABLE_SHARE = 0.9
"""Usable fraction of the device's memory: the rest is for the CUDA context and for memory that the allocator cannot
reuse. On one H100 an update of 73.8 GiB by the formula ran out of memory at its third step, with 4.9 of 79.2 GiB
reserved but unused."""
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "liger-kernel")


@dataclass(frozen=True)
class GpuOptions:
    """The options of the command line."""

    device_type: str
    shapes: tuple[ModelShape, ...]
    kernels: Kernels
    micro_batch_tokens: int
    longest: int
    num_rounds: int
    time_limit: TimeLimit
    json_path: Path | None
    markdown_path: Path | None


@dataclass(frozen=True)
class Peaks:
    """Peak operations per second."""

    stated: float | None
    measured: float


def read_gpu_options() -> GpuOptions:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Measure an update of random models on one device.")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--models", metavar="NAME,...", help=f"models to measure, of {', '.join(SHAPES)}")
    parser.add_argument("--kernels", choices=list(Kernels), default=Kernels.PLAIN, help="model.kernels of a job")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a micro-batch")
    parser.add_argument("--longest", type=int, metavar="N", help="tokens of the longest row")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of measured updates, after a warm-up update")
    parser.add_argument("--quick", action="store_true", help="one round, only to check the program")
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="N",
        help="time limit: a case that may exceed it is not started; the default is %(default)g",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="also write the tables to this file")
    chosen = parser.parse_args()
    on_cpu = chosen.device == "cpu"
    # The largest first, because the longest case so far tells whether there is time for another one.
    names = chosen.models.split(",") if chosen.models else [TINY] if on_cpu else [*SHAPES][:0:-1]
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        parser.error(f"--models: unknown model {', '.join(unknown)}; use {', '.join(SHAPES)}")
    return GpuOptions(
        device_type=chosen.device,
        shapes=tuple(SHAPES[name] for name in names),
        kernels=Kernels(chosen.kernels),
        micro_batch_tokens=chosen.tokens or (128 if on_cpu else 16_384),
        longest=chosen.longest or (48 if on_cpu else 4096),
        num_rounds=chosen.rounds or (1 if chosen.quick else 3),
        time_limit=TimeLimit(chosen.seconds),
        json_path=chosen.json,
        markdown_path=chosen.markdown,
    )


def measure(shape: ModelShape, options: GpuOptions, context: WorkerContext, peaks: Peaks, report: Report) -> None:
    """Measures one model with every way to handle activations."""
    speeds: dict[str, tuple[float | None, ...]] = {}
    memory: dict[str, tuple[float | None, ...]] = {}
    ratios: list[float] = []
    work = random_work(NUM_MICRO_BATCHES * options.micro_batch_tokens, options.longest)
    dtype, on_gpu = DTYPES[context.device_type], context.device_type == "cuda"
    with ExitStack() as stack:
        folder: Path | None = None
        for name, every in INTERVALS.items():
            expected = planned_peak_bytes(shape, dtype, every, options.micro_batch_tokens, is_cpu=not on_gpu)
            if reason := reason_to_skip(expected, options.time_limit, context.device):
                report.notes.append(f"{shape.name}, {name}: skipped: {reason}")
                print(report.notes[-1], flush=True)
                continue
            with options.time_limit.case():
                if folder is None:
                    folder = stack.enter_context(random_model(shape, context.device))
                actor = build_actor(folder, context, dtype, work, every, options.micro_batch_tokens, options.kernels)
                update, forward, found = measured_update(actor, shape, work, options.num_rounds)
                del actor
                gc.collect()
                release_cached_memory(context.device)
            speed = update_operations(shape, work) / update
            speeds[name] = (
                work.num_tokens / update,
                1e3 * update,
                1e-12 * speed,
                None if peaks.stated is None else speed / peaks.stated,
                speed / peaks.measured,
                work.num_tokens / forward,
            )
            # On a CPU, the process has grown for earlier cases.
            memory[name] = (found / GIB, expected / GIB, found / expected if on_gpu else None)
            ratios += [found / expected] if on_gpu else []
    if not speeds:
        return
    title = f"{shape.name} ({shape.num_parameters / 1e9:.3g}e9), {NUM_MICRO_BATCHES} x {options.micro_batch_tokens:,}"
    title += "" if options.kernels is Kernels.PLAIN else f", kernels {options.kernels.value}"
    header = ("tokens/s", "ms", "TFLOP/s", "/ data sheet", "/ product of matrices", "forward alone, tokens/s")
    report.add(Measurement(f"{title} tokens: update", header, speeds))
    where = "allocator's peak" if on_gpu else "growth of the process"
    bar = Bar(f"at most {MAX_MEMORY_RATIO:g} x the formula", max(ratios, default=None), MAX_MEMORY_RATIO)
    report.add(
        Measurement(f"{title} tokens: memory", (f"{where}, GiB", "planner's formula, GiB", "ratio"), memory, (bar,))
    )


def reason_to_skip(expected_bytes: float, time_limit: TimeLimit, device: torch.device) -> str | None:
    """Why a case is not measured; None if it is."""
    if expected_bytes > USABLE_SHARE * memory_of(device):
        return f"it needs {expected_bytes / GIB:.1f} GiB by the planner's formula"
    if not time_limit.has_time:
        return f"it may exceed --seconds {time_limit.seconds:g}"
    return None


def measured_update(actor: ActorWorker, shape: ModelShape, work: Work, num_rounds: int) -> tuple[float, float, float]:
    """Seconds of an update and of a forward pass (medians), and the bytes at the update's peak. One warm-up update
    creates the moments."""
    rollout, device = random_rollout(shape, work), actor.engine.device
    tokens = token_batch(rollout)
    actor.update_policy(rollout, 0)
    MEMORY.take_metrics()
    if device.type == "cuda":
        actor.update_policy(rollout, 1)
        # The memory timeline resets the allocator's peak at each boundary, so the allocator knows only the last peak.
        found = MEMORY.take_metrics()
        peak = max(value for name, value in found.items() if name.startswith(f"{MEMORY_PREFIX}during_"))
    else:
        peak = float(peak_growth_bytes(lambda: actor.update_policy(rollout, 1)))
    updates, forwards = [], []
    for step in range(num_rounds):
        updates.append(timed(partial(actor.update_policy, rollout, 2 + step), device))
        forwards.append(timed(partial(actor.engine.forward, tokens, 1.0), device))
    return statistics.median(updates), statistics.median(forwards), peak


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, including the device's work."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def memory_of(device: torch.device) -> float:
    """Total memory of the device in bytes; on a CPU, of the host."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float("inf")


def main() -> None:
    """Runs the benchmark."""
    options = read_gpu_options()
    report = Report("bench/gpu_step.py", installed_versions(LIBRARIES))
    with only_worker(options.device_type) as context:
        name = torch.cuda.get_device_name() if options.device_type == "cuda" else "cpu"
        peaks = Peaks(stated_peak(name), measured_peak(context.device, DTYPES[context.device_type]))
        stated = "not in the table" if peaks.stated is None else f"{1e-12 * peaks.stated:,.0f}"
        report.notes.append(
            f"{name}: TFLOP/s in BFloat16 by its data sheet {stated}; in a product of matrices "
            f"({str(DTYPES[options.device_type]).removeprefix('torch.')}) {1e-12 * peaks.measured:.3g}"
        )
        if options.device_type == "cpu":
            report.notes.append("on a CPU this only checks the program; the numbers have no meaning")
        report.print_head()
        for shape in options.shapes:
            measure(shape, options, context, peaks, report)
    report.write(options.json_path, options.markdown_path)


if __name__ == "__main__":
    main()
