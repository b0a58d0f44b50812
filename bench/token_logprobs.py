"""Log-probabilities of given tokens from hidden states: time and memory of RLJob's tiles against whole logits.

    python bench/token_logprobs.py [--quick] [--json PATH]

Each contender gets hidden states [N, D], an output head's weight [V, D] and targets [N], and computes
log-probabilities, then the gradients of hidden states and weight. `whole logits` are log_softmax and gather on all
logits. `checkpointed chunks` do the same for 2,048 tokens at a time, and again in the backward pass. The floor is only
the matrix products, one in the forward pass and three with the backward pass, in tiles that fit into a cache. verl is
not part of this benchmark.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rljob_bench.command_line import read_options
from rljob_bench.machine import installed_versions
from rljob_bench.memory import peak_growth_bytes
from rljob_bench.report import FLOOR, OURS, Bar, Measurement, Report, of_timings, ratio
from rljob_bench.rounds import interleaved, timed_calls
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, token_distribution

WHOLE = "whole logits"
CHUNKS = "checkpointed chunks"
WITH_ENTROPY = ", with entropy"
CHUNK_TOKENS = 2048
FLOOR_COLUMNS = 1024
MIB = 1024 * 1024
MAX_MEMORY = 1.2
BUFFER_BYTES = 128 * MIB
MAX_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHECKED_TOKENS = 256


@dataclass(frozen=True)
class Inputs:
    """The inputs of a contender. Hidden states and weight require gradients."""

    hidden_ND: Tensor
    weight_VD: Tensor
    targets_N: Tensor


Function = Callable[[Inputs], tuple[Tensor, Tensor | None]]
"""Returns log-probabilities and, if the contender computes it, entropy."""


@dataclass(frozen=True)
class Case:
    """A size, the number of calls, and the bars as multiples of `whole logits`."""

    title: str
    num_tokens: int
    num_vocabulary: int
    hidden_size: int
    dtype: torch.dtype
    num_rounds: int
    num_calls: int
    max_forward: float
    max_both: float

    def inputs(self, num_tokens: int) -> Inputs:
        """Random inputs whose logits have a standard deviation of about 1."""
        torch.manual_seed(0)
        hidden_ND = torch.randn(num_tokens, self.hidden_size).to(self.dtype).requires_grad_()
        weight_VD = torch.randn(self.num_vocabulary, self.hidden_size).mul_(self.hidden_size**-0.5).to(self.dtype)
        return Inputs(hidden_ND, weight_VD.requires_grad_(), torch.randint(0, self.num_vocabulary, (num_tokens,)))

    def __str__(self) -> str:
        sizes = f"N={self.num_tokens:,}, V={self.num_vocabulary:,}, D={self.hidden_size:,}"
        return f"{self.title}: {sizes}, {str(self.dtype).removeprefix('torch.')}"


def ours(inputs: Inputs, entropy: Entropy = Entropy.NO) -> tuple[Tensor, Tensor | None]:
    """RLJob's tiles."""
    found = token_distribution(inputs.hidden_ND, inputs.targets_N, OutputHead(inputs.weight_VD), entropy=entropy)
    return found.logprobs_N, found.entropy_N


def whole_logits(inputs: Inputs, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """The most common way to write it."""
    return _whole(inputs.hidden_ND, inputs.weight_VD, inputs.targets_N, with_entropy)


def checkpointed_chunks(inputs: Inputs) -> tuple[Tensor, None]:
    """Whole logits of some tokens at a time."""
    num_chunks = -(-len(inputs.targets_N) // CHUNK_TOKENS)
    logprobs = []
    for hidden, targets in zip(
        inputs.hidden_ND.tensor_split(num_chunks), inputs.targets_N.tensor_split(num_chunks), strict=True
    ):
        logprobs.append(checkpoint(_whole, hidden, inputs.weight_VD, targets, False, use_reentrant=False)[0])
    return torch.cat(logprobs), None


def _whole(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    all_NV = torch.log_softmax((hidden_ND @ weight_VD.T).float(), dim=-1)
    entropy_N = -(all_NV.exp() * all_NV).sum(dim=-1) if with_entropy else None
    return all_NV.gather(1, targets_N[:, None])[:, 0], entropy_N


FORWARD: Mapping[str, Function] = {
    OURS: ours,
    WHOLE: whole_logits,
    OURS + WITH_ENTROPY: partial(ours, entropy=Entropy.VALUE),
    WHOLE + WITH_ENTROPY: partial(whole_logits, with_entropy=True),
}
BOTH: Mapping[str, Function] = {OURS: ours, WHOLE: whole_logits, CHUNKS: checkpointed_chunks}


def without_gradient(function: Function, inputs: Inputs) -> None:
    """Runs the forward pass only, without gradients."""
    with torch.no_grad():
        function(inputs)


def gradients(function: Function, inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients of hidden states and weight."""
    return torch.autograd.grad(function(inputs)[0].sum(), (inputs.hidden_ND, inputs.weight_VD))


def products(inputs: Inputs, with_backward: bool) -> tuple[Tensor, ...]:
    """The floor: only the matrix products, for some columns of the vocabulary at a time."""
    with torch.no_grad():
        hidden_ND, weight_VD = inputs.hidden_ND, inputs.weight_VD
        tile_NC = hidden_ND.new_empty(len(hidden_ND), min(FLOOR_COLUMNS, len(weight_VD)))
        hidden_gradient_ND = torch.empty_like(hidden_ND) if with_backward else hidden_ND
        weight_gradient_VD = torch.empty_like(weight_VD) if with_backward else weight_VD
        for start in range(0, len(weight_VD), FLOOR_COLUMNS):
            weight_CD = weight_VD[start : start + FLOOR_COLUMNS]
            logits_NC = tile_NC[:, : len(weight_CD)]
            torch.mm(hidden_ND, weight_CD.T, out=logits_NC)
            if with_backward:
                torch.mm(logits_NC.T, hidden_ND, out=weight_gradient_VD[start : start + FLOOR_COLUMNS])
                hidden_gradient_ND.addmm_(logits_NC, weight_CD, beta=0 if start == 0 else 1)
    return hidden_gradient_ND, weight_gradient_VD


def difference(case: Case) -> float:
    """Relative difference between our gradients and those of whole logits, by norm; the larger of the two."""
    inputs = case.inputs(min(case.num_tokens, CHECKED_TOKENS))
    pairs = zip(gradients(ours, inputs), gradients(whole_logits, inputs), strict=True)
    return max(float((mine.float() - other.float()).norm() / other.float().norm()) for mine, other in pairs)


def measure_times(case: Case, report: Report) -> None:
    """Measures the forward pass, then forward and backward pass."""
    inputs = case.inputs(case.num_tokens)
    turns: dict[str, Callable[[], object]] = {
        name: partial(without_gradient, each, inputs) for name, each in FORWARD.items()
    }
    turns[FLOOR] = partial(products, inputs, with_backward=False)
    forward = interleaved(
        {name: partial(timed_calls, call, case.num_calls) for name, call in turns.items()}, case.num_rounds
    )
    bar = Bar(f"at most {case.max_forward:g} x {WHOLE}", ratio(forward, OURS, WHOLE), case.max_forward)
    report.add(of_timings(f"{case}: forward", forward, WHOLE, (bar,)))
    # As in an update: the value of the entropy together with the gradient of the log-probabilities.
    asked = {**BOTH, OURS + WITH_ENTROPY: FORWARD[OURS + WITH_ENTROPY]}
    calls: dict[str, Callable[[], object]] = {name: partial(gradients, each, inputs) for name, each in asked.items()}
    calls[FLOOR] = partial(products, inputs, with_backward=True)
    both = interleaved(
        {name: partial(timed_calls, call, case.num_calls) for name, call in calls.items()}, case.num_rounds
    )
    limit = MAX_DIFFERENCE[case.dtype]
    bars = (
        Bar(f"at most {case.max_both:g} x {WHOLE}", ratio(both, OURS, WHOLE), case.max_both),
        Bar(f"gradients differ by at most {limit:g} of their norm", difference(case), limit),
    )
    report.add(of_timings(f"{case}: forward and backward", both, WHOLE, bars))


def peak_bytes(case: Case, name: str) -> int:
    """Peak memory of a process that does nothing else: inputs, gradients and intermediate values, without PyTorch
    itself."""
    gradients(BOTH[name], case.inputs(8))
    inputs = case.inputs(case.num_tokens)
    return _size(inputs) + peak_growth_bytes(partial(gradients, BOTH[name], inputs))


def measure_memory(case: Case) -> Measurement:
    """Measures every contender in its own process."""
    needed = 2 * case.num_tokens * case.hidden_size + 2 * case.num_vocabulary * case.hidden_size
    least = needed * case.dtype.itemsize + BUFFER_BYTES
    peaks = {}
    for name in BOTH:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks[name] = pool.submit(peak_bytes, case, name).result()
    text = f"at most {MAX_MEMORY:g} x (inputs, gradients and {BUFFER_BYTES // MIB} MiB)"
    return Measurement(
        f"{case}: peak memory with inputs and gradients",
        ("MiB", f"multiple of inputs, gradients and {BUFFER_BYTES // MIB} MiB"),
        {name: (peak / MIB, peak / least) for name, peak in peaks.items()},
        (Bar(text, peaks[OURS] / least, MAX_MEMORY),),
    )


def _size(inputs: Inputs) -> int:
    return sum(tensor.nbytes for tensor in (inputs.hidden_ND, inputs.weight_VD))


def cases(is_quick: bool) -> list[Case]:
    """The sizes of the benchmarks' own models, where we should not be slower, and a large vocabulary. The small model's
    logits are not cut into tiles: its bar is equal time, with room for noise."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        small, middle = (3, 2) if is_quick else (30, 5)
        found.append(Case("small model", 1000, 512, 256, dtype, small, 5, 1.05, 1.05))
        found.append(Case("SmolLM2", 64 if is_quick else 1536, 49_152, 576, dtype, middle, 1, 1.0, 1.0))
    num_tokens, num_rounds = (64, 2) if is_quick else (4096, 4)
    return [*found, Case("large vocabulary", num_tokens, 151_936, 1024, torch.float32, num_rounds, 1, 1.1, 1.45)]


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Log-probabilities from hidden states: RLJob and whole logits.")
    report = Report("bench/token_logprobs.py", installed_versions(("torch",)))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    for case in cases(options.is_quick):
        measure_times(case, report)
    for dtype in (torch.float32, torch.bfloat16):
        num_tokens = 256 if options.is_quick else 4096
        report.add(measure_memory(Case("large vocabulary", num_tokens, 151_936, 1024, dtype, 1, 1, 1.1, 1.45)))
    report.write(options.json_path)


if __name__ == "__main__":
    main()
