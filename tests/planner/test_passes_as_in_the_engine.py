"""Operations and bytes of passes, compared with those of the training engine's own module, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen3Config

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.job_workload import lora_shape
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.timing.communication import NodeType, communication_time
from rljob_planner.timing.lengths import Lengths
from rljob_planner.timing.passes import (
    Operations,
    Rows,
    forward_operations,
    imbalance,
    num_micro_batches,
    optimizer_seconds,
    pass_cost,
    rows_of,
    update_cost,
    update_operations,
)
from rljob_planner.workload import Head, ModelOffload, TrainLayout, TrainModel
from rljob_testing.planner import engine_counts, memory_oracle
from rljob_trainer.engines.train.layout import ParallelLayout

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
QWEN = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
LLAMA = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
LARGE = Qwen3Config(**SIZES | {"vocab_size": 200_000}, num_attention_heads=4, num_key_value_heads=2)
"""The logits of 60 tokens are 46 MiB, which the engine computes in tiles."""
ROW = 32
TOKENS = 64
RANKS_1, COPIES, SHARED = ParallelLayout(4), ParallelLayout(2, 2), ParallelLayout(4, 1, 2)
UNIT_GPU = Gpu("unit", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""One byte and one operation per second."""
UNIT = Constants(
    training_efficiency={},
    default_efficiency=1.0,
    attention_efficiency=1.0,
    link_efficiency=1.0,
    network_efficiency=1.0,
    pass_seconds=0.0,
    update_seconds=0.0,
)
HAND = ModelShape("hand", 2, 8, 2, 1, 4, 16, 32, ties_head=False)


def total(operations: Operations) -> float:
    return operations.products + operations.attention


def train_model(case: memory_oracle.OracleCase) -> TrainModel:
    shape = shape_of_config(case.config.to_dict(), "tiny")
    lora = None if case.adapter_rank is None else lora_shape(shape, case.adapter_rank, None, syncs_alone=False)
    return TrainModel(
        shape,
        is_trained=case.is_trained,
        checkpoints_activations=case.recomputed_every > 0,
        checkpoints_every_nth_layer=max(1, case.recomputed_every),
        lora=lora,
        defers_reduction=case.defers_reduction,
    )


def rows(case: memory_oracle.OracleCase) -> Rows:
    """The rows, or parts of rows, of one rank."""
    count = case.tokens_of_rank / case.row_tokens
    # The engine's rows end with a token that the model does not read.
    response = case.row_tokens + 1 - memory_oracle.PROMPT_TOKENS
    prompt = case.row_tokens - response
    return Rows(count, prompt, response, case.row_tokens**2, case.row_tokens, case.row_tokens)


def layout(case: memory_oracle.OracleCase) -> TrainLayout:
    given = case.layout
    return TrainLayout(given.num_ranks, given.num_shards, given.num_sequence_ranks)


CASES = {
    "all kept, reduced once": memory_oracle.OracleCase(QWEN, RANKS_1, TOKENS, ROW, defers_reduction=True),
    "every second layer again": memory_oracle.OracleCase(QWEN, RANKS_1, TOKENS, ROW, recomputed_every=2),
    "two copies": memory_oracle.OracleCase(LLAMA, COPIES, TOKENS, ROW),
    "shared tokens": memory_oracle.OracleCase(QWEN, SHARED, TOKENS, ROW, recomputed_every=1),
    "adapters": memory_oracle.OracleCase(QWEN, RANKS_1, TOKENS, ROW, adapter_rank=4),
    "frozen": memory_oracle.OracleCase(QWEN, RANKS_1, TOKENS, ROW, is_trained=False),
    "large vocabulary": memory_oracle.OracleCase(LARGE, RANKS_1, TOKENS, ROW, recomputed_every=1),
    "large vocabulary, adapters": memory_oracle.OracleCase(LARGE, RANKS_1, TOKENS, ROW, adapter_rank=4),
    "large vocabulary, frozen": memory_oracle.OracleCase(LARGE, RANKS_1, TOKENS, ROW, is_trained=False),
}


@pytest.fixture(scope="module")
def engine() -> dict[str, engine_counts.Counts]:
    return {name: engine_counts.counted(case) for name, case in CASES.items()}


def spared(case: memory_oracle.OracleCase) -> float:
    """Operations that we count and torch does not execute. Recomputation skips the last product of a layer, because
    nothing needs its result; we count it, as published shares of a GPU's speed do. With adapters, the first layer needs
    no gradient of its input, because nothing before it is trained; we count that gradient for every layer."""
    shape, tokens, found = train_model(case).shape, case.tokens_of_rank, 0.0
    if case.recomputed_every:
        num_layers = -(-shape.num_layers // case.recomputed_every)
        found += 2 * tokens * num_layers * shape.hidden_size * shape.mlp_size
    if case.adapter_rank is not None:
        outputs = shape.query_size + 2 * shape.kv_size
        found += 2 * tokens * shape.hidden_size * (outputs + 3 * case.adapter_rank)
    return found


@pytest.mark.parametrize("name", CASES)
def test_matrix_products_equal_those_of_the_engine(name: str, engine: dict[str, engine_counts.Counts]) -> None:
    case = CASES[name]
    model, own = train_model(case), rows(case)
    operations = update_operations(model, own) if case.is_trained else forward_operations(model, own)
    assert operations.products - spared(case) == engine[name].products


@pytest.mark.parametrize("name", CASES)
def test_attention_is_half_of_what_torch_counts_forward(name: str, engine: dict[str, engine_counts.Counts]) -> None:
    case = CASES[name]
    model = train_model(case)
    found = update_operations(model, rows(case)) if case.is_trained else forward_operations(model, rows(case))
    again = found.attention / forward_operations(model, rows(case)).attention
    # torch counts the backward pass of attention as two and a half forward passes, and ignores the mask.
    counted_as = again + 0.5 if case.is_trained else again
    assert found.attention / again * counted_as * 2 == pytest.approx(engine[name].attention)


@pytest.mark.parametrize("name", CASES)
def test_bytes_equal_those_of_the_engine(name: str, engine: dict[str, engine_counts.Counts]) -> None:
    case = CASES[name]
    model, spread = train_model(case), layout(case)
    links = communication_time(model, spread, NodeType(UNIT_GPU, spread.num_gpus), UNIT)
    share = (spread.shard_size - 1) / spread.shard_size
    found = engine[name].num_bytes
    gathered = found[engine_counts.GATHER] * share
    if not case.is_trained:
        # FSDP2 pads shards to equal numbers of rows; these sizes need no padding.
        assert links.per_pass == pytest.approx(gathered)
        return
    reduced = found[engine_counts.REDUCE] * share
    once = found[engine_counts.OVER_COPIES] * 2 * (spread.num_replicas - 1) / spread.num_replicas
    if case.defers_reduction:
        once, reduced = once + reduced, 0.0
    assert links.per_pass + links.per_backward == pytest.approx(gathered + reduced)
    assert links.per_update == pytest.approx(once)
    exchanged = found[engine_counts.EXCHANGE] * (spread.sequence_parallel - 1) / spread.sequence_parallel
    assert 3 * links.per_token * case.tokens_of_rank == pytest.approx(exchanged)


def test_operations_of_a_small_model_by_hand() -> None:
    # Per layer 8 x (2 x 8 + 2 x 4) + 3 x 8 x 16 = 576 weights, 1,152 in two; a head of 32 x 8 = 256.
    own = Rows(count=10, prompt=3, response=2, square=25, longest=5, shortest=5)
    model = TrainModel(HAND, is_trained=True)
    # 2 x 1,152 x 50 tokens + 2 x 256 x 20 response tokens; attention: 2 layers x 4 x 8 x 10 rows x 25 / 2.
    assert forward_operations(model, own) == Operations(115_200 + 10_240, 8_000)
    assert update_operations(model, own) == Operations(3 * 125_440, 24_000)
    again = replace(model, checkpoints_activations=True)
    assert update_operations(again, own) == Operations(4 * 115_200 + 3 * 10_240, 32_000)
    half = replace(again, checkpoints_every_nth_layer=2)
    assert update_operations(half, own) == Operations(3.5 * 115_200 + 3 * 10_240, 28_000)
    assert forward_operations(replace(model, head=Head.VALUE), own).products == 115_200


def test_recomputed_tiles_of_logits_by_hand() -> None:
    # 2**25 bytes are the float32 logits of 2**18 tokens with a vocabulary of 32.
    model, lora = TrainModel(HAND, is_trained=True), lora_shape(HAND, 2, None, syncs_alone=False)
    own = Rows(count=2**18, prompt=3, response=2, square=25, longest=5, shortest=5)
    head = 2 * 256 * own.count * own.response
    layers = forward_operations(model, own).products - head
    assert update_operations(model, own, 1).products == 3 * layers + 4 * head
    assert update_operations(model, own, 2).products == 3 * layers + 3 * head
    beside = replace(model, lora=lora)
    assert update_operations(beside, own, 1).products - update_operations(beside, own, 2).products == head


def test_tiles_depend_on_the_micro_batches_of_each_gpu() -> None:
    """Two GPUs have half of the tokens each, as two micro-batches have on one GPU."""
    model, own = TrainModel(HAND, is_trained=True), Rows(2**18, 0, 2, 4, 2, 2)
    slow = NodeType(replace(UNIT_GPU, link_bandwidth=1e12, bandwidth=1e12), 2)

    def seconds(max_tokens: int, num_gpus: int) -> float:
        return update_cost(model, own, 1, max_tokens, TrainLayout(num_gpus, num_gpus), slow, UNIT).seconds

    whole, in_tiles = (total(update_operations(model, own, parts)) for parts in (2, 1))
    assert seconds(2**20, 1) == pytest.approx(in_tiles)
    assert seconds(2**18 + 2, 1) == pytest.approx(whole)
    assert seconds(2**20, 2) == pytest.approx(whole / 2)


def test_experts_cost_only_those_that_a_token_uses() -> None:
    experts = replace(HAND, num_experts=8, experts_per_token=2)
    own = Rows(1, 0, 1, 1, 1, 1)
    # 192 for attention, two experts of 3 x 8 x 16, a router of 8 x 8; two layers; the head.
    assert forward_operations(TrainModel(experts, is_trained=False), own).products == 2 * (2 * (192 + 768 + 64) + 256)


def test_a_sliding_window_limits_what_a_token_sees() -> None:
    one_of_two = replace(HAND, sliding_window=4, num_full_attention_layers=1)
    own = Rows(1, 0, 16, 256, 16, 16)
    # One layer sees all: 256 / 2 pairs; the other has 16 x 4 - 4 x 4 / 2.
    assert forward_operations(TrainModel(one_of_two, is_trained=False), own).attention == 4 * 8 * (128 + 56)


def test_adapters_save_the_gradients_of_the_base() -> None:
    own = Rows(count=10, prompt=3, response=2, square=25, longest=5, shortest=5)
    lora = lora_shape(HAND, 2, None, syncs_alone=False)
    model = TrainModel(HAND, is_trained=True, lora=lora)
    adapters = 2 * lora.num_parameters * 50
    assert update_operations(model, own).products == pytest.approx(2 * 125_440 + 3 * adapters)


def test_workers_with_few_rows_wait_for_the_longest_row() -> None:
    own = Rows(count=8, prompt=0, response=10, square=100, longest=30, shortest=4)
    assert imbalance(own, 8) == 3.0
    assert imbalance(own, 4) == pytest.approx((30 + 4) / 20)
    assert imbalance(own, 1) == 1.0
    # With more workers than rows, some have none, and the others take as long as before.
    assert imbalance(own, 16) == 6.0
    assert imbalance(replace(own, longest=10), 3) == pytest.approx(3 / (8 / 3))


def test_half_a_row_of_a_micro_batch_stays_empty() -> None:
    own = rows_of(64, 0, Lengths(100, math.log(100)))
    assert num_micro_batches(own, 6400, TrainLayout(1, 1)) == 1
    # 10.5 rows fit, half a row stays empty: 64 / 10.
    assert num_micro_batches(own, 1050, TrainLayout(1, 1)) == 7
    # Two ranks that share rows have micro-batches of twice as many tokens, and twice as many rows.
    assert num_micro_batches(own, 1050, TrainLayout(4, 4, 2)) == num_micro_batches(own, 2100, TrainLayout(2, 2))


def test_all_gathers_are_hidden_by_compute_until_they_take_longer() -> None:
    own = rows_of(8, 0, Lengths(100, math.log(100)))
    model, spread = TrainModel(HAND, is_trained=True), TrainLayout(4, 4)
    slow = replace(UNIT_GPU, flops=1e-3)
    computing = total(update_operations(model, own))
    no_other = 1e9
    fast_links = replace(slow, link_bandwidth=no_other, bandwidth=no_other)
    found = update_cost(model, own, 3, 1000, spread, NodeType(fast_links, 4), UNIT)
    assert found.seconds == pytest.approx(3 * computing / 4 / 1e-3, rel=1e-6)
    assert found.bound_by == "compute"
    quick = replace(UNIT_GPU, flops=no_other, bandwidth=no_other)
    found = update_cost(model, own, 3, 1000, spread, NodeType(quick, 4), UNIT)
    # Gathered twice, the root once; reduced in float32: 3/4 of 2 P + 2 P_layers + 4 P.
    parameters = HAND.num_parameters
    assert found.seconds == pytest.approx(3 * 0.75 * (6 * parameters + 2 * HAND.layers_parameters), rel=1e-3)
    assert found.bound_by == "the link between GPUs"


def test_the_optimizer_reads_and_writes_its_shards() -> None:
    model = TrainModel(HAND, is_trained=True, offload=ModelOffload(optimizer=True))
    in_memory, on_the_link = optimizer_seconds(model, TrainLayout(4, 2), NodeType(UNIT_GPU, 4), 5)
    assert in_memory == 32 * HAND.num_parameters / 2
    assert on_the_link == 16 * HAND.num_parameters / 2


@pytest.mark.parametrize(("num_micro_batches", "num_copies"), [(1, 0), (2, 2), (5, 8)])
def test_offloaded_gradients_are_copied_between_micro_batches(num_micro_batches: int, num_copies: int) -> None:
    model = TrainModel(HAND, is_trained=True, offload=ModelOffload(gradients=True))
    _, on_the_link = optimizer_seconds(model, TrainLayout(4, 4), NodeType(UNIT_GPU, 4), num_micro_batches)
    assert on_the_link == num_copies * 4 * HAND.num_parameters / 4


def test_an_offloaded_frozen_model_is_loaded_for_its_pass() -> None:
    own = rows_of(8, 0, Lengths(100, math.log(100)))
    here, away = (TrainModel(HAND, is_trained=False, offload=ModelOffload(parameters=each)) for each in (False, True))
    spread, site = TrainLayout(4, 4), NodeType(UNIT_GPU, 4)
    seconds = [pass_cost(each, own, 1000, spread, site, UNIT).seconds for each in (here, away)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * HAND.num_parameters / 4)


def test_an_offloaded_critic_is_copied_for_values_and_for_its_updates() -> None:
    """Independent of the number of updates; an actor is loaded by the weight sync."""
    own = rows_of(8, 0, Lengths(100, math.log(100)))
    spread, site = TrainLayout(4, 4), NodeType(UNIT_GPU, 4)

    def seconds(head: Head, *, away: bool) -> list[float]:
        model = TrainModel(HAND, is_trained=True, head=head, offload=ModelOffload(parameters=away))
        values = pass_cost(model, own, 1000, spread, site, UNIT).seconds
        return [values, *(update_cost(model, own, num, 1000, spread, site, UNIT).seconds for num in (1, 3))]

    critic = TrainModel(HAND, is_trained=True, head=Head.VALUE)
    for here, away in zip(seconds(Head.VALUE, away=False), seconds(Head.VALUE, away=True), strict=True):
        assert away - here == pytest.approx(2 * 4 * critic.num_parameters / 4)
    assert seconds(Head.TOKENS, away=True) == seconds(Head.TOKENS, away=False)


def test_nodes_share_their_networks() -> None:
    node_of_4 = replace(UNIT_GPU, link_bandwidth=100.0, network_bandwidth=5.0)
    site = NodeType(node_of_4, 4)
    assert site.bandwidth(4, UNIT) == 100.0
    # Each byte enters a node once, over any of its four networks.
    assert site.bandwidth(8, UNIT) == 20.0
    # Replicas of two GPUs: two in each node reduce with two in the other. Replicas of four: one in each node.
    assert site.bandwidth(8, UNIT, 2) == 10.0
    assert site.bandwidth(8, UNIT, 4) == 5.0
    assert site.bandwidth(4, UNIT, 2) == 100.0


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8, 16, 32, 64, 128])
def test_more_gpus_are_never_slower_while_compute_is_the_bound(num_gpus: int) -> None:
    lengths = Lengths(4000, location=6.0, scale=0.8)
    own = rows_of(256, 200, lengths)
    model = TrainModel(HAND, is_trained=True)
    site = NodeType(replace(UNIT_GPU, link_bandwidth=1e12, bandwidth=1e12), 256)
    seconds = [
        update_cost(model, own, 1, 8192, TrainLayout(each, each), site, UNIT).seconds
        for each in (num_gpus, 2 * num_gpus)
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)
