"""Peak memory of a train engine's passes. Memory is computed at several points of an update, or of a pass without
backward; the largest of them is the peak. Moments are those of AdamW.

The points of an update in their order, with files of the trainer (engines/train):

1. The root's parameters are gathered; FSDP2 leaves them gathered until the end. Then the parameters of each other unit
   are gathered when its forward pass begins: the embedding, each layer, the output head. The root has the last norm,
   and the weight that embedding and head share, if they do (`sharded_model.py`).
2. The output head runs its forward and its backward pass in tiles (`token_logprobs.py`, `logit_tiles.py`). Its
   parameters stay gathered from the one to the other. Its gradient is summed over ranks in float32, unless the head is
   in the root. Then the last norm runs its backward pass.
3. Each layer, from the last to the first, runs the backward pass of its MLP, its attention and its first norm.
   Meanwhile the parameters of the layer before it are gathered, and the gradients of the unit after it are summed
   over ranks in float32.
4. The gradients of the root and of the embedding are summed over ranks.
5. AdamW updates the parameters. It is fused and needs no additional memory (`optimizer.py`).

From the second micro-batch on, gradients of earlier micro-batches are in memory, unless they are offloaded
(`offload.py`).

The package's docstring explains the letters of formulas.
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
from rljob_planner.plan_types import Part, Parts
from rljob_planner.workload import MASTER_BYTES, Head, TrainLayout, TrainModel, Workload


class _Point(NamedTuple):
    """Bytes at one point of a pass, in addition to the state that stays on the device."""

    name: str
    activations: float = 0.0
    gathered: float = 0.0
    """Gathered (whole) parameters."""
    whole_gradients: float = 0.0
    gradients: float = 0.0
    """Shards of gradients; with deferred reduction, the whole gradients that are kept instead."""
    moments: float = 0.0
    """AdamW's moments, if they are offloaded and loaded for the optimizer step."""

    @property
    def total(self) -> float:
        return self.activations + self.gathered + self.whole_gradients + self.gradients + self.moments


@lru_cache(maxsize=4096)
def train_peak(model: TrainModel, layout: TrainLayout, micro_batch_tokens: int, *, is_cpu: bool = False) -> Parts:
    """The peak of an update with several micro-batches, after the first update, on the fullest rank, by owner.

    `micro_batch_tokens`: T, the tokens that a rank's layers process in one micro-batch. All of them count as response
    tokens. `is_cpu`: tiles of logits are smaller on CPUs.
    """
    passes = _Passes(model, layout, micro_batch_tokens, is_cpu=is_cpu)
    return passes.peak(passes.of_update())


@lru_cache(maxsize=4096)
def scoring_peak(model: TrainModel, layout: TrainLayout, micro_batch_tokens: int, *, is_cpu: bool = False) -> Parts:
    """The peak of passes without backward. AdamW's moments are in memory unless they are offloaded; there are no
    gradients."""
    passes = _Passes(model, layout, micro_batch_tokens, is_cpu=is_cpu)
    return passes.peak(passes.of_scoring())


def tokens_of_rank(workload: Workload, layout: TrainLayout, num_prompts: int) -> int:
    """T for the largest micro-batch of a pass over `num_prompts` prompts with their responses. None has more tokens
    than the job allows (engines/train/micro_batching.py)."""
    rows = -(-num_prompts * workload.group_size // layout.num_data_ranks)
    tokens = min(workload.max_tokens_per_micro_batch * layout.sequence_parallel, rows * workload.lengths.longest_row)
    return -(-tokens // layout.sequence_parallel)


class _Passes:
    """Computes the points of passes. All sizes are in bytes. A list with two entries is for a layer without experts and
    for a layer with experts."""

    def __init__(self, model: TrainModel, layout: TrainLayout, num_tokens: int, *, is_cpu: bool) -> None:
        self.model, self.layout, self.num_tokens, self.is_cpu = model, layout, num_tokens, is_cpu
        shape, m, shards = model.shape, model.compute_bytes, layout.shard_size
        kinds = (False, True)
        base = [gathered_elements(shape.layer_tensors(has_experts=each), shards) for each in kinds]
        adapters = gathered_elements(model.layer_adapters, shards)
        self.gradient_shards = float(MASTER_BYTES * trained_shard_elements(model, layout))
        outside = model.non_layer_units
        self.root, self.embedding, self.head_unit = (m * gathered_elements(each, shards) for each in outside)
        """Whole parameters outside the decoder layers."""
        self.units = [m * (each + adapters) for each in base]
        """Parameters of a whole layer."""
        # Elements of a whole layer that have a gradient, if the model is trained.
        self.trained = [adapters, adapters] if model.lora is not None else base
        self.has_buffers = shards > 1
        """Whether gathering needs a buffer. A single rank does not need one."""
        self.input = m * shape.hidden_size * num_tokens
        """A layer's input."""
        exchanges = layout.sequence_parallel > 1
        self.layers = [layer_bytes(model, has_experts=each, exchanges_heads=exchanges) for each in kinds]
        self.head = head_bytes(model, num_tokens, is_cpu=is_cpu)
        rows = shape.vocabulary_size if model.head is Head.TOKENS else 1
        self.head_gradient = m * rows * shape.hidden_size if model.is_wholly_trained else 0
        """The whole gradient of the output head, from the start of the backward pass. If the head is in the root, it is
        kept until the end."""
        is_reduced_alone = model.is_wholly_trained and bool(outside.head)
        self.head_sums = MASTER_BYTES * gathered_elements(outside.head, shards) if is_reduced_alone else 0
        """The gradient of a head that is a unit of its own, in float32 while it is summed over ranks."""
        # self.kept[i]: bytes that are kept from the forward to the backward pass for everything before layer i. They
        # are tensors that all layers use (rotary positions, token positions, tokens), and what the layers before keep.
        self.kept = [num_tokens * float(2 * m * shape.head_size + 4 * 8)]
        for number in range(shape.num_layers):
            whole = self.layers[self.has_experts(number)].kept * num_tokens
            self.kept.append(self.kept[-1] + (self.input if self.is_recomputed(number) else whole))

    def has_experts(self, number: int) -> bool:
        return self.model.shape.has_experts and number >= self.model.shape.num_dense_layers

    def is_recomputed(self, number: int) -> bool:
        return self.model.checkpoints_activations and number % self.model.checkpoints_every_nth_layer == 0

    def peak(self, candidates: Iterator[_Point]) -> Parts:
        """The state together with the bytes at the largest of these points, by owner."""
        model, layout, tokens, m = self.model, self.layout, self.num_tokens, self.model.compute_bytes
        point = max(candidates, key=lambda each: each.total)
        parameters, moments = parameters_part(model, layout), moments_part(model, layout)
        resident_moments = 0 if model.offload.optimizer else moments.num_bytes
        whole = f"{m} bytes per element, {MASTER_BYTES} while summed over ranks (peak: {point.name})"
        gathered = f"{m} x {point.gathered / m:.4g}, with buffers (peak: {point.name})"
        activations = f"{tokens:,} tokens x {point.activations / tokens:,.0f} bytes (peak: {point.name})"
        parts = (
            parameters,
            Part("moments", resident_moments + point.moments, moments.formula),
            Part("gradients", point.gradients, self.gradients_formula(point.gradients)),
            Part("gathered parameters", point.gathered, gathered),
            Part("whole gradients", point.whole_gradients, whole),
            Part("activations", point.activations, activations),
        )
        return tuple(part for part in parts if part.num_bytes)

    def of_update(self) -> Iterator[_Point]:
        """The points of an update that can be its peak."""
        num_layers, kept = self.model.shape.num_layers, self.kept[-1]
        gradients = self.gradients(num_layers)
        at_head = self.root + self.head_unit + self.next_layer(num_layers)
        yield from self.gathering(gradients)
        for share, head in self.heads():
            if self.head_unit:
                yield from self.forward_of_head(share * kept + head.gathering, head.in_forward, gradients)
            yield _Point("output head", share * kept + head.backward, at_head, self.head_gradient, gradients)
        after_head = self.root + self.next_layer(num_layers)
        if self.head_sums:
            # With deferred reduction, the gradient was already added to those of other micro-batches.
            whole = self.in_reduction(self.head_sums, 0 if self.model.defers_reduction else self.head_gradient)
            yield _Point("reduction of the head", kept + self.head.reduced, after_head, whole, gradients)
        yield _Point("last norm", kept + self.head.norm, after_head, self.after_head(), gradients)
        # The backward pass frees activations layer by layer, so only the last layers can be the peak. With offload,
        # gradients grow during the backward pass, so the first layer can be the peak, too.
        every = self.model.checkpoints_every_nth_layer if self.model.checkpoints_activations else 1
        first = {0} if self.model.offload.gradients else set[int]()
        for number in sorted(first.union(range(max(0, num_layers - every - 2), num_layers))):
            yield from self.of_layer(number)
        if self.model.lora is None:
            yield from self.end_of_backward()
        moments = moments_part(self.model, self.layout).num_bytes if self.model.offload.optimizer else 0
        yield _Point("optimizer step", gradients=self.gradient_shards, moments=moments)

    def of_scoring(self) -> Iterator[_Point]:
        """The points of a pass without backward that can be its peak."""
        last = self.model.shape.num_layers - 1
        yield from self.gathering(0.0)
        for kind in {self.has_experts(0), self.has_experts(last)}:
            # As in `gathering`, but the sharded copy of this layer in the buffer is already freed.
            unit = self.units[kind]
            buffer = unit if self.has_buffers else 0
            yield _Point("gathering a layer", 2 * self.input, self.root + unit + 2 * buffer)
            forward = self.layers[kind].forward * self.num_tokens
            yield _Point("activations of a layer", forward, self.root + unit + buffer)
        for _, head in self.heads():
            if self.head_unit:
                yield from self.forward_of_head(2 * self.input, head.forward - 2 * self.input, 0.0)
            else:
                yield _Point("output head", head.forward, self.root + self.units[self.has_experts(last)])

    def gathering(self, gradients: float) -> Iterator[_Point]:
        """The points at which the first units are gathered. A unit's buffer is kept until the parameters of the next
        unit are copied out of their own buffer (torch, `FSDPParamGroup.wait_for_unshard`)."""
        buffers, first = 2 if self.has_buffers else 1, self.units[self.has_experts(0)]
        if not self.embedding:
            yield _Point("gathering the root", self.input, buffers * (self.root + first), 0.0, gradients)
            return
        yield _Point("gathering the embedding", 0.0, buffers * (self.root + self.embedding), 0.0, gradients)
        before = self.embedding if self.has_buffers else 0
        yield _Point("gathering a layer", self.input, self.root + before + buffers * first, 0.0, gradients)

    def forward_of_head(self, activations: float, in_head: float, gradients: float) -> Iterator[_Point]:
        """The forward pass of a head that is a unit of its own. `in_head`: bytes that its computation adds to the
        activations. The last layer's buffer is kept until the head is gathered, the head's buffer until the end of the
        forward pass."""
        last = self.model.shape.num_layers - 1
        if self.model.is_trained and self.model.lora is not None and self.is_recomputed(last):
            # Tensors that the recomputation for the micro-batch before has left (see `of_layer`).
            activations += 2 * self.input
        before = self.units[self.has_experts(last)] if self.has_buffers else 0
        gathered = self.root + (2 if self.has_buffers else 1) * self.head_unit
        yield _Point("gathering the head", activations, gathered + before, 0.0, gradients)
        yield _Point("output head", activations + in_head, gathered, 0.0, gradients)

    def of_layer(self, number: int) -> Iterator[_Point]:
        """The points of the backward pass of layer `number`."""
        kind, model, tokens = self.has_experts(number), self.model, self.num_tokens
        layer, m, gradients = self.layers[kind], model.compute_bytes, self.gradients(number + 1)
        before = self.kept[number]
        in_layer = before + layer.kept * tokens
        gathered = self.root + self.units[kind] + self.next_layer(number)
        whole = self.after_head()
        if number < model.shape.num_layers - 1:
            whole = (0 if self.head_unit else self.head_gradient) + self.reduced(number + 1)
        if self.is_recomputed(number):
            # The layer's input is also kept. In float32, the layer's first norm keeps the same tensor. With adapters,
            # the recomputation stops after the layer's last product, because there autograd saves the adapters' last
            # tensor.
            before += self.input
            num_copies = 1 if m < MASTER_BYTES else 0
            in_layer += self.input * (num_copies if model.lora is None else 3)
        all_gradients = whole + m * self.trained[kind]
        # The gradient of the down projection comes first in a dense layer.
        down_gradient = 0 if kind or model.lora is not None else m * model.shape.hidden_size * model.shape.dense_width
        yield _Point("MLP of a layer", in_layer + layer.in_mlp * tokens, gathered, whole + down_gradient, gradients)
        yield _Point("attention of a layer", before + layer.in_attention * tokens, gathered, all_gradients, gradients)
        yield _Point("end of a layer", before + layer.at_end * tokens, gathered, all_gradients, gradients)

    def after_head(self) -> float:
        """Bytes of the head's gradient between its backward pass and that of the last layer."""
        if not self.head_unit:
            return self.head_gradient
        return 0 if self.model.defers_reduction else self.head_sums

    def end_of_backward(self) -> Iterator[_Point]:
        """The points at which the gradients of the root and of the embedding are summed over ranks, one after the
        other."""
        model, shards, outside = self.model, self.layout.shard_size, self.model.non_layer_units
        gradients = gradient_bytes(model, self.layout)
        trained = model.compute_bytes * shard_elements(outside.root + outside.embedding)
        both = trained + (self.head_gradient if model.shape.ties_head and model.head is Head.TOKENS else 0)
        yield _Point("end of backward", 0.0, self.root, both + self.reduced(0), gradients)
        for unit in (outside.root, outside.embedding):
            in_sums = MASTER_BYTES * gathered_elements(unit, shards)
            if model.defers_reduction:
                # In memory: the sum over micro-batches, and its sum over ranks. The layers' gradients are already
                # reduced.
                yield _Point("end of backward", 0.0, 0.0, 2 * in_sums, self.gradient_shards)
                continue
            whole = model.compute_bytes * shard_elements(unit)
            reduced = in_sums + max(whole, in_sums / shards) if len(unit) > 1 else self.in_reduction(in_sums, whole)
            yield _Point("end of backward", 0.0, 0.0, reduced, gradients)

    def in_reduction(self, in_sums: float, whole: float) -> float:
        """Bytes while the gradient of a unit with one tensor is summed over ranks.

        `whole`: the gradient. It is copied into `in_sums`, in float32; then memory for the sum is allocated. With
        several ranks, a local variable of torch's `foreach_reduce` keeps the gradient until the end."""
        of_sum = in_sums / self.layout.shard_size
        return in_sums + (whole + of_sum if self.has_buffers else max(whole, of_sum))

    def gradients(self, number: int) -> float:
        """Bytes of gradients (`_Point.gradients`) when the backward pass of the second micro-batch reaches layer
        `number`. With offload, the device holds only gradients of this micro-batch, for the layers whose backward pass
        is done."""
        if not self.model.offload.gradients:
            return gradient_bytes(self.model, self.layout)
        return self.gradient_shards * (1 - number / self.model.shape.num_layers)

    def gradients_formula(self, num_bytes: float) -> str:
        whole = f"{MASTER_BYTES} x {self.model.num_trained_parameters:.4g}"
        if num_bytes > self.gradient_shards:
            return f"{whole}, not yet reduced"
        shards = f"{whole} / {self.layout.shard_size}"
        return shards if num_bytes == self.gradient_shards else f"{shards} x {num_bytes / self.gradient_shards:.2g}"

    def heads(self) -> Iterator[tuple[float, HeadBytes]]:
        """The two cases in which the output head can need the most memory, each with its share of all tokens: all
        tokens, and the largest number of tokens whose logits are computed without tiles."""
        yield 1.0, self.head
        fewer = self.model.whole_logits_tokens
        if fewer < self.num_tokens and self.model.head is Head.TOKENS:
            yield fewer / self.num_tokens, head_bytes(self.model, fewer, is_cpu=self.is_cpu)

    def next_layer(self, number: int) -> float:
        """Bytes of the layer that the backward pass reaches next, `number` - 1. Its parameters are gathered early."""
        return self.units[self.has_experts(number - 1)] if number and self.has_buffers else 0

    def reduced(self, number: int) -> float:
        """Bytes of a layer's gradients in float32 while they are summed over ranks. They are kept until the gradients
        of layer `number` - 1 are summed. 0 with deferred reduction, where they replace the whole gradients."""
        return 0 if self.model.defers_reduction else MASTER_BYTES * self.trained[self.has_experts(number)]
