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
from dataclasses import dataclass
from functools import cached_property

from rljob_planner.memory.train_activations import HeadBytes, LayerBytes, head_bytes, layer_bytes, whole_logits_tokens
from rljob_planner.memory.train_state import (
    MASTER_BYTES,
    adapter_tensors,
    gathered_elements,
    gradient_bytes,
    layer_tensors,
    moment_bytes,
    moments_part,
    num_elements,
    parameters_part,
    root_tensors,
    trained_elements,
    trained_shard_elements,
)
from rljob_planner.plan_types import Part, Peak
from rljob_planner.workload import Head, TrainLayout, TrainModel, Workload


@dataclass(frozen=True)
class _Moment:
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


def train_peak(model: TrainModel, layout: TrainLayout, micro_batch_tokens: int, *, is_cpu: bool = False) -> Peak:
    """Of an update of several micro-batches, after the first update, on the fullest rank. `micro_batch_tokens`: those
    that a rank's layers work on; all of them count as tokens of responses. On CPUs tiles of logits are smaller."""
    passes = _Passes(model, layout, micro_batch_tokens, is_cpu)
    return passes.peak(max(passes.of_update(), key=lambda moment: moment.total))


def scoring_peak(model: TrainModel, layout: TrainLayout, micro_batch_tokens: int, *, is_cpu: bool = False) -> Peak:
    """Of passes without a backward pass. There are moments, unless they are offloaded, and no gradients."""
    passes = _Passes(model, layout, micro_batch_tokens, is_cpu)
    return passes.peak(max(passes.of_scoring(), key=lambda moment: moment.total))


def micro_batch_tokens(workload: Workload, model: TrainModel, layout: TrainLayout) -> int:
    """Tokens that a rank's layers work on in the largest micro-batch, of an update for a trained model, else of a pass
    over the batch, as `plan_micro_batches` (engines/train/passes.py) fills them."""
    prompts = workload.mini_batch_size if model.is_trained else workload.batch_size
    return _tokens_of_rank(workload, layout, prompts * workload.group_size)


def scoring_tokens(workload: Workload, layout: TrainLayout) -> int:
    """The same of a pass without a backward pass, which is over the whole batch, of whatever model."""
    return _tokens_of_rank(workload, layout, workload.num_responses)


def _tokens_of_rank(workload: Workload, layout: TrainLayout, num_rows: int) -> int:
    rows = -(-num_rows // layout.num_data_ranks)
    tokens = min(workload.max_tokens_per_micro_batch * layout.sequence_parallel, rows * workload.lengths.longest_row)
    return -(-tokens // layout.sequence_parallel)


@dataclass(frozen=True)
class _Passes:
    model: TrainModel
    layout: TrainLayout
    num_tokens: int
    is_cpu: bool

    def peak(self, moment: _Moment) -> Peak:
        """This moment with the state beside it, and how its parts come about."""
        model, layout = self.model, self.layout
        parameters, moments = parameters_part(model, layout), moments_part(model, layout)
        own_moments = 0.0 if model.offload.optimizer else moments.num_bytes
        resident = (0 if model.offload.parameters else parameters.num_bytes) + own_moments
        tokens, m = self.num_tokens, model.compute_bytes
        trained = f"{MASTER_BYTES} x {trained_elements(model):.4g} / {layout.shard_size}"
        whole = f"{m} bytes each, {MASTER_BYTES} in sums over ranks, at the {moment.name}"
        gathered = f"{m} x {self._root / m:.4g} in no layer, layers, and buffers"
        activations = f"{tokens:,} tokens x {moment.activations / tokens:,.0f} at the {moment.name}"
        parts = (
            parameters,
            Part("moments", own_moments + moment.moments, moments.formula),
            Part("gradients", moment.gradients, trained),
            Part("gathered parameters", moment.gathered, gathered),
            Part("whole gradients", moment.whole_gradients, whole),
            Part("activations", moment.activations, activations),
        )
        total = parameters.num_bytes + own_moments + moment.total
        return Peak(resident, total - resident, moment.name, tuple(part for part in parts if part.num_bytes))

    def of_update(self) -> Iterator[_Moment]:
        """All moments of it."""
        gradients = self._gradients(self.model.shape.num_layers)
        at_head = self._root + self._next_layer(self.model.shape.num_layers)
        kept = self._kept_by_layers[-1]
        yield self._gathering(gradients)
        for share, head in self._heads():
            yield _Moment("output head", share * kept + head.backward, at_head, self._head_gradient, gradients)
        yield _Moment("last norm", kept + self._head.norm, at_head, self._head_gradient, gradients)
        for number in self._telling_layers():
            yield from self._of_layer(number, self._gradients(number + 1))
        yield from self._of_root()
        moments = moment_bytes(self.model, self.layout) if self.model.offload.optimizer else 0
        yield _Moment("optimizer step", gradients=self._shards, moments=float(moments))

    def of_scoring(self) -> Iterator[_Moment]:
        """All moments of it."""
        yield self._gathering(0.0)
        for number in {0, self.model.shape.num_layers - 1}:
            # As with the root, but that a layer's own parameters have gone by then.
            unit = self._of_unit(number)
            gathered = self._root + unit + self._in_buffer(unit)
            yield _Moment("gathering a layer", 2 * self._input, gathered + self._in_buffer(unit))
            yield _Moment("activations of a layer", self._layer(number).forward * self.num_tokens, gathered)
        last = self._of_unit(self.model.shape.num_layers - 1)
        for _, head in self._heads():
            yield _Moment("output head", head.forward, self._root + last)

    def _gathering(self, gradients: float) -> _Moment:
        """The buffer in which the root's parameters came is there until those of a layer have been copied out of theirs
        (torch, `FSDPParamGroup.wait_for_unshard`)."""
        gathered = self._root + self._of_unit(0) + self._in_buffer(self._root + self._of_unit(0))
        return _Moment("gathering the root", self._input, gathered, 0.0, gradients)

    def _of_layer(self, number: int, gradients: float) -> Iterator[_Moment]:
        layer, tokens = self._layer(number), self.num_tokens
        is_last = number == self.model.shape.num_layers - 1
        before = self._kept_by_layers[number]
        itself = before + layer.kept * tokens
        gathered = self._root + self._of_unit(number) + self._next_layer(number)
        reduced = 0.0 if is_last else self._reduced(number + 1)
        if self.model.checkpoints_activations and self._is_recomputed(number):
            # Its own input is kept, too.
            before += self._input
            itself += self._beside_recomputed
        whole = self._head_gradient + reduced
        own = self.model.compute_bytes * self._trained_of_layer(number)
        first = 0.0 if self._has_experts(number) or self.model.lora is not None else self._down_projection
        yield _Moment("MLP of a layer", itself + layer.in_mlp * tokens, gathered, whole + first, gradients)
        yield _Moment("attention of a layer", before + layer.in_attention * tokens, gathered, whole + own, gradients)
        yield _Moment("end of a layer", before + layer.at_end * tokens, gathered, whole + own, gradients)

    def _of_root(self) -> Iterator[_Moment]:
        model = self.model
        gradients = float(gradient_bytes(model, self.layout))
        if model.lora is not None:
            return
        trained = model.compute_bytes * num_elements(root_tensors(model))
        both = trained + (self._head_gradient if model.shape.ties_head and model.head is Head.TOKENS else 0)
        reduced = self._reduced(0)
        yield _Moment("end of backward", 0.0, self._root, both + reduced, gradients)
        in_sums = MASTER_BYTES * gathered_elements(root_tensors(model), self.layout.shard_size)
        if model.defers_reduction:
            # What the micro-batches have added up, and its sum over ranks; that of layers is reduced by now.
            yield _Moment("end of backward", 0.0, 0.0, 2 * in_sums, self._shards)
            return
        # Whole gradients go when they are copied, before there is room for the sum.
        reducing = in_sums + max(trained, in_sums / self.layout.shard_size)
        yield _Moment("end of backward", 0.0, 0.0, reducing, gradients)

    def _telling_layers(self) -> Iterator[int]:
        """The last ones: before them less is kept. With offloaded gradients, of which more and more come, the first."""
        last = self.model.shape.num_layers - 1
        every = self.model.checkpoints_every_nth_layer if self.model.checkpoints_activations else 1
        found = range(max(0, last - every - 1), last + 1)
        yield from found
        if self.model.offload.gradients and 0 not in found:
            yield 0

    def _gradients(self, number: int) -> float:
        """Shards when the backward pass has come to this layer, in the second micro-batch. Offloaded ones are those of
        this micro-batch alone, of the layers that it has passed."""
        if not self.model.offload.gradients:
            return float(gradient_bytes(self.model, self.layout))
        layers = self.model.shape.num_layers
        return self._shards * (layers - number) / layers

    def _heads(self) -> Iterator[tuple[float, HeadBytes]]:
        """Of all tokens; and of the most that have whole logits, with their share of all."""
        yield 1.0, self._head
        fewer = whole_logits_tokens(self.model)
        if fewer < self.num_tokens and self.model.head is Head.TOKENS:
            yield fewer / self.num_tokens, head_bytes(self.model, fewer, is_cpu=self.is_cpu)

    @cached_property
    def _head(self) -> HeadBytes:
        return head_bytes(self.model, self.num_tokens, is_cpu=self.is_cpu)

    @cached_property
    def _head_gradient(self) -> float:
        """Whole, of the output head, from where the backward pass begins."""
        if self.model.lora is not None or not self.model.is_trained:
            return 0.0
        rows = self.model.shape.vocabulary_size if self.model.head is Head.TOKENS else 1
        return float(self.model.compute_bytes * rows * self.model.shape.hidden_size)

    @cached_property
    def _root(self) -> float:
        return float(self.model.compute_bytes * gathered_elements(root_tensors(self.model), self.layout.shard_size))

    @cached_property
    def _shards(self) -> float:
        """Of gradients."""
        return float(MASTER_BYTES * trained_shard_elements(self.model, self.layout))

    @cached_property
    def _down_projection(self) -> float:
        """The first gradient of a weight in a dense layer's backward pass."""
        shape = self.model.shape
        return float(self.model.compute_bytes * shape.hidden_size * (shape.dense_mlp_size or shape.mlp_size))

    @cached_property
    def _input(self) -> float:
        """Of a layer."""
        return float(self.model.compute_bytes * self.model.shape.hidden_size * self.num_tokens)

    @cached_property
    def _beside_recomputed(self) -> float:
        """A recomputed layer's own input. In 32 bits its first norm keeps the same tensor. With adapters the second
        forward pass stops behind the layer's last product, where their last tensor is saved."""
        if self.model.lora is not None:
            return 3 * self._input
        return self._input if self.model.compute_bytes < MASTER_BYTES else 0.0

    @cached_property
    def _kept_by_layers(self) -> list[float]:
        """Before each layer, by those before it and by what all layers read: rotary positions, places, tokens."""
        shape = self.model.shape
        found = [self.num_tokens * float(2 * self.model.compute_bytes * shape.head_size + 4 * 8)]
        for number in range(self.model.shape.num_layers):
            own = self._input if self._is_recomputed(number) else self._layer(number).kept * self.num_tokens
            found.append(found[-1] + own)
        return found

    def _is_recomputed(self, number: int) -> bool:
        return self.model.checkpoints_activations and number % self.model.checkpoints_every_nth_layer == 0

    def _has_experts(self, number: int) -> bool:
        return self.model.shape.has_experts and number >= self.model.shape.num_dense_layers

    def _layer(self, number: int) -> LayerBytes:
        return self._layers[self._has_experts(number)]

    @cached_property
    def _layers(self) -> tuple[LayerBytes, LayerBytes]:
        exchanges = self.layout.sequence_parallel > 1
        dense, sparse = (
            layer_bytes(self.model, has_experts=has_experts, exchanges_heads=exchanges) for has_experts in (False, True)
        )
        return dense, sparse

    @cached_property
    def _unit_elements(self) -> tuple[int, int]:
        shape, shards = self.model.shape, self.layout.shard_size
        dense, sparse = (
            gathered_elements(layer_tensors(shape, has_experts=has_experts), shards) for has_experts in (False, True)
        )
        return dense, sparse

    def _of_unit(self, number: int) -> float:
        """Bytes of a layer's parameters, whole."""
        return float(self.model.compute_bytes * (self._unit_elements[self._has_experts(number)] + self._adapters))

    def _next_layer(self, number: int) -> float:
        """Gathered ahead, in its buffer."""
        return self._in_buffer(self._of_unit(number - 1)) if number else 0.0

    def _in_buffer(self, num_bytes: float) -> float:
        """Of gathered parameters; one rank by itself copies without one."""
        return num_bytes if self.layout.shard_size > 1 else 0.0

    @cached_property
    def _adapters(self) -> int:
        lora = self.model.lora
        if lora is None:
            return 0
        return gathered_elements(adapter_tensors(lora, self.model.shape), self.layout.shard_size)

    def _reduced(self, number: int) -> float:
        """The sums of a layer's gradients over ranks, in 32 bits, until those of the layer before begin. Where
        reduction is deferred they take the place of whole gradients."""
        return 0.0 if self.model.defers_reduction else float(MASTER_BYTES * self._trained_of_layer(number))

    def _trained_of_layer(self, number: int) -> int:
        if self.model.lora is not None:
            return self._adapters
        return self._unit_elements[self._has_experts(number)]
