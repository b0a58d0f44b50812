"""Peaks of a train engine's passes: the largest of a few moments of an update, or of a pass without a backward pass.

Moments, in the order of an update, and where the trainer makes them (engines/train): the root's parameters are gathered
(`sharded_model.py`: one unit for what is in no layer, which FSDP2 leaves whole until the end); the output head's
backward pass in tiles (`token_logprobs.py`, `logit_tiles.py`), then the last norm's; a layer's MLP, attention and end,
while the next layer's parameters are gathered already and the last one's gradients are still being reduced in 32 bits;
the root's gradients; AdamW, which is fused and needs nothing on top (`optimizer.py`). A second micro-batch finds
gradients of the first, unless they are offloaded (`offload.py`).

Legend: as in `model_shape`, and P parameters, W ranks that hold a copy together, m bytes of a number in the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from rljob_planner.memory.train_activations import HeadBytes, head_bytes, layer_bytes
from rljob_planner.memory.train_state import (
    gradient_bytes,
    moments_part,
    parameters_part,
    trained_shard_elements,
)
from rljob_planner.model_shape import gathered_elements, shard_elements
from rljob_planner.plan_types import Part, Peak
from rljob_planner.workload import MASTER_BYTES, Head, TrainLayout, TrainModel, Workload


class _Moment(NamedTuple):
    """Bytes beside the state that is there all the time."""

    name: str
    activations: float = 0.0
    gathered: float = 0.0
    """Whole parameters."""
    whole_gradients: float = 0.0
    gradients: float = 0.0
    """Shards, or what deferred reduction has in their place."""
    moments: float = 0.0
    """Those that are offloaded come for the optimizer step."""

    @property
    def total(self) -> float:
        return self.activations + self.gathered + self.whole_gradients + self.gradients + self.moments


@lru_cache(maxsize=4096)
def train_peak(model: TrainModel, layout: TrainLayout, micro_batch_tokens: int, *, is_cpu: bool = False) -> Peak:
    """Of an update of several micro-batches, after the first update, on the fullest rank. `micro_batch_tokens`: those
    that a rank's layers work on; all of them count as tokens of responses. On CPUs tiles of logits are smaller."""
    passes = _Passes(model, layout, micro_batch_tokens, is_cpu=is_cpu)
    return passes.peak(passes.of_update())


@lru_cache(maxsize=4096)
def scoring_peak(model: TrainModel, layout: TrainLayout, micro_batch_tokens: int, *, is_cpu: bool = False) -> Peak:
    """Of passes without a backward pass. There are moments, unless they are offloaded, and no gradients."""
    passes = _Passes(model, layout, micro_batch_tokens, is_cpu=is_cpu)
    return passes.peak(passes.of_scoring())


def tokens_of_rank(workload: Workload, layout: TrainLayout, num_prompts: int) -> int:
    """That a rank's layers work on in the largest micro-batch of a pass over so many prompts with their responses, as
    `plan_micro_batches` (engines/train/micro_batching.py) fills them."""
    rows = -(-num_prompts * workload.group_size // layout.num_data_ranks)
    tokens = min(workload.max_tokens_per_micro_batch * layout.sequence_parallel, rows * workload.lengths.longest_row)
    return -(-tokens // layout.sequence_parallel)


class _Passes:
    """Sizes in bytes; pairs are of a layer without and with experts."""

    def __init__(self, model: TrainModel, layout: TrainLayout, num_tokens: int, *, is_cpu: bool) -> None:
        self.model, self.layout, self.num_tokens, self.is_cpu = model, layout, num_tokens, is_cpu
        shape, m, shards = model.shape, model.compute_bytes, layout.shard_size
        kinds = (False, True)
        base = [gathered_elements(shape.layer_tensors(has_experts=each), shards) for each in kinds]
        adapters = gathered_elements(model.layer_adapters, shards)
        self.gradient_shards = float(MASTER_BYTES * trained_shard_elements(model, layout))
        self.root = m * gathered_elements(model.root_tensors, shards)
        self.units = [m * (each + adapters) for each in base]
        """Parameters of a layer, whole."""
        self.trained = [adapters, adapters] if model.lora is not None else base
        self.has_buffers = shards > 1
        """One rank by itself copies what it gathers without one."""
        self.input = m * shape.hidden_size * num_tokens
        exchanges = layout.sequence_parallel > 1
        self.layers = [layer_bytes(model, has_experts=each, exchanges_heads=exchanges) for each in kinds]
        self.head = head_bytes(model, num_tokens, is_cpu=is_cpu)
        rows = shape.vocabulary_size if model.head is Head.TOKENS else 1
        self.head_gradient = m * rows * shape.hidden_size if model.is_wholly_trained else 0
        """Whole, from where the backward pass begins."""
        # By what all layers read (rotary positions, places, tokens), and by each layer.
        self.kept = [num_tokens * float(2 * m * shape.head_size + 4 * 8)]
        for number in range(shape.num_layers):
            own = self.input if self.is_recomputed(number) else self.layers[self.kind(number)].kept * num_tokens
            self.kept.append(self.kept[-1] + own)

    def kind(self, number: int) -> bool:
        return self.model.shape.has_experts and number >= self.model.shape.num_dense_layers

    def is_recomputed(self, number: int) -> bool:
        return self.model.checkpoints_activations and number % self.model.checkpoints_every_nth_layer == 0

    def peak(self, passing: Iterator[_Moment]) -> Peak:
        """The largest of these moments with the state beside it, and how its parts come about."""
        model, layout, tokens, m = self.model, self.layout, self.num_tokens, self.model.compute_bytes
        moment = max(passing, key=lambda each: each.total)
        parameters, moments = parameters_part(model, layout), moments_part(model, layout)
        own_moments = 0 if model.offload.optimizer else moments.num_bytes
        resident = (0 if model.offload.parameters else parameters.num_bytes) + own_moments
        whole = f"{m} bytes each, {MASTER_BYTES} in sums over ranks, at the {moment.name}"
        gathered = f"{m} x {self.root / m:.4g} in no layer, layers, and buffers"
        activations = f"{tokens:,} tokens x {moment.activations / tokens:,.0f} at the {moment.name}"
        parts = (
            parameters,
            Part("moments", own_moments + moment.moments, moments.formula),
            Part("gradients", moment.gradients, f"{MASTER_BYTES} x {model.num_learned:.4g} / {layout.shard_size}"),
            Part("gathered parameters", moment.gathered, gathered),
            Part("whole gradients", moment.whole_gradients, whole),
            Part("activations", moment.activations, activations),
        )
        total = parameters.num_bytes + own_moments + moment.total
        return Peak(resident, total - resident, moment.name, tuple(part for part in parts if part.num_bytes))

    def of_update(self) -> Iterator[_Moment]:
        num_layers, kept = self.model.shape.num_layers, self.kept[-1]
        gradients = self.gradients(num_layers)
        at_head = self.root + self.next_layer(num_layers)
        yield self.gathering(gradients)
        for share, head in self.heads():
            yield _Moment("output head", share * kept + head.backward, at_head, self.head_gradient, gradients)
        yield _Moment("last norm", kept + self.head.norm, at_head, self.head_gradient, gradients)
        # Before the last layers less is kept. With offloaded gradients, of which more and more come, the first tells.
        every = self.model.checkpoints_every_nth_layer if self.model.checkpoints_activations else 1
        first = {0} if self.model.offload.gradients else set[int]()
        for number in sorted(first.union(range(max(0, num_layers - every - 2), num_layers))):
            yield from self.of_layer(number)
        if self.model.lora is None:
            yield from self.end_of_backward()
        moments = moments_part(self.model, self.layout).num_bytes if self.model.offload.optimizer else 0
        yield _Moment("optimizer step", gradients=self.gradient_shards, moments=moments)

    def of_scoring(self) -> Iterator[_Moment]:
        last = self.model.shape.num_layers - 1
        yield self.gathering(0.0)
        for kind in {self.kind(0), self.kind(last)}:
            # As with the root, but that a layer's own parameters have gone by then.
            unit = self.units[kind]
            buffer = unit if self.has_buffers else 0
            yield _Moment("gathering a layer", 2 * self.input, self.root + unit + 2 * buffer)
            forward = self.layers[kind].forward * self.num_tokens
            yield _Moment("activations of a layer", forward, self.root + unit + buffer)
        for _, head in self.heads():
            yield _Moment("output head", head.forward, self.root + self.units[self.kind(last)])

    def gathering(self, gradients: float) -> _Moment:
        """The buffer in which the root's parameters came is there until those of a layer have been copied out of theirs
        (torch, `FSDPParamGroup.wait_for_unshard`)."""
        gathered = self.root + self.units[self.kind(0)]
        return _Moment("gathering the root", self.input, (2 if self.has_buffers else 1) * gathered, 0.0, gradients)

    def of_layer(self, number: int) -> Iterator[_Moment]:
        kind, model, tokens = self.kind(number), self.model, self.num_tokens
        layer, m, gradients = self.layers[kind], model.compute_bytes, self.gradients(number + 1)
        before = self.kept[number]
        itself = before + layer.kept * tokens
        gathered = self.root + self.units[kind] + self.next_layer(number)
        reduced = 0 if number == model.shape.num_layers - 1 else self.reduced(number + 1)
        if self.is_recomputed(number):
            # Its own input is kept, too. In 32 bits its first norm keeps the same tensor. With adapters the second
            # forward pass stops behind the layer's last product, where their last tensor is saved.
            before += self.input
            beside = 1 if m < MASTER_BYTES else 0
            itself += self.input * (beside if model.lora is None else 3)
        whole = self.head_gradient + reduced
        own = m * self.trained[kind]
        # The down projection's, which come first in a dense layer.
        first = 0 if kind or model.lora is not None else m * model.shape.hidden_size * model.shape.dense_width
        yield _Moment("MLP of a layer", itself + layer.in_mlp * tokens, gathered, whole + first, gradients)
        yield _Moment("attention of a layer", before + layer.in_attention * tokens, gathered, whole + own, gradients)
        yield _Moment("end of a layer", before + layer.at_end * tokens, gathered, whole + own, gradients)

    def end_of_backward(self) -> Iterator[_Moment]:
        """The root's gradients."""
        model, shards, root = self.model, self.layout.shard_size, self.model.root_tensors
        gradients = gradient_bytes(model, self.layout)
        trained = model.compute_bytes * shard_elements(root)
        both = trained + (self.head_gradient if model.shape.ties_head and model.head is Head.TOKENS else 0)
        yield _Moment("end of backward", 0.0, self.root, both + self.reduced(0), gradients)
        in_sums = MASTER_BYTES * gathered_elements(root, shards)
        if model.defers_reduction:
            # What the micro-batches have added up, and its sum over ranks; that of layers is reduced by now.
            yield _Moment("end of backward", 0.0, 0.0, 2 * in_sums, self.gradient_shards)
        else:
            # Whole gradients go when they are copied, before there is room for the sum.
            yield _Moment("end of backward", 0.0, 0.0, in_sums + max(trained, in_sums / shards), gradients)

    def gradients(self, number: int) -> float:
        """Shards when the backward pass has come to this layer, in the second micro-batch. Offloaded ones are those of
        this micro-batch alone, of the layers that it has passed."""
        if not self.model.offload.gradients:
            return gradient_bytes(self.model, self.layout)
        return self.gradient_shards * (1 - number / self.model.shape.num_layers)

    def heads(self) -> Iterator[tuple[float, HeadBytes]]:
        """Of all tokens; and of the most that have whole logits, with their share of all."""
        yield 1.0, self.head
        fewer = self.model.whole_logits_tokens
        if fewer < self.num_tokens and self.model.head is Head.TOKENS:
            yield fewer / self.num_tokens, head_bytes(self.model, fewer, is_cpu=self.is_cpu)

    def next_layer(self, number: int) -> float:
        """Gathered ahead, in its buffer."""
        return self.units[self.kind(number - 1)] if number and self.has_buffers else 0

    def reduced(self, number: int) -> float:
        """The sums of a layer's gradients over ranks, in 32 bits, until those of the layer before begin. Where
        reduction is deferred they take the place of whole gradients."""
        return 0 if self.model.defers_reduction else MASTER_BYTES * self.trained[self.kind(number)]
