"""Which rank holds what, and which models divide over which ranks. Results of layouts are in test_update_invariance."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GptOssConfig, LlamaConfig, PreTrainedConfig

from rljob_api.v1alpha1.job import RLJob
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.controller.checks.fit import check_layouts, check_tensor_parallel
from rljob_trainer.controller.model_roles import layout_of
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.engines.train.layout import ParallelLayout, check_layout
from rljob_trainer.errors import ConfigurationError


def test_neighbours_share_rows() -> None:
    layout = ParallelLayout.of(8, shard_size=4, sequence_parallel=2)
    assert (layout.num_replicas, layout.num_shards, layout.num_ranks, layout.num_data_ranks) == (2, 4, 8, 4)
    assert layout.gradient_divisor == 8
    assert [layout.position(rank) for rank in (0, 1, 2, 7)] == [
        MeshPosition(0, 4, is_collected=True),
        MeshPosition(0, 4, is_collected=False),
        MeshPosition(1, 4, is_collected=True),
        MeshPosition(3, 4, is_collected=False),
    ]
    assert str(layout) == "2 replicas x 4 shards, 2 sequence ranks"


def test_by_default_all_ranks_shard_the_model_and_have_their_own_rows() -> None:
    layout = ParallelLayout.of(6)
    assert (layout.num_replicas, layout.num_shards, layout.num_data_ranks) == (1, 6, 6)


@pytest.mark.parametrize(
    ("shard_size", "sequence_parallel", "message"),
    [
        (4, 1, r"spec\.roles: shardSize must divide the role's 6 workers \(seen: 4\);"),
        (3, 5, r"sequenceParallel must .* 6 workers \(seen: 5\);"),
    ],
)
def test_a_layout_that_does_not_divide_the_workers_is_rejected(
    shard_size: int, sequence_parallel: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParallelLayout.of(6, shard_size, sequence_parallel)


def heads(num_heads: int, num_key_value_heads: int) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=num_heads * 8, num_attention_heads=num_heads, num_key_value_heads=num_key_value_heads
    )


def vocabulary_of(size: int) -> PreTrainedConfig:
    return LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=6, vocab_size=size)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (heads(6, 6), 4, r"in spec\.roles: must divide the model's 6 .*heads.* \(seen: 4\);"),
        (heads(12, 3), 2, r"must divide the model's 3 key and value heads or be a multiple of them \(seen: 2\);"),
        (
            tiny_models.ARCHITECTURES["gemma2"](),
            2,
            r"needs flat rows, .*'gemma2' model .*padded.* soft-capped \(seen: 2\);",
        ),
        (GptOssConfig(), 2, r"needs flat rows, .*'gpt_oss' model .*padded"),
    ],
)
def test_models_that_do_not_divide_over_sequence_ranks_are_rejected(
    config: PreTrainedConfig, size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_layout(ParallelLayout.of(size, sequence_parallel=size), config)
    check_layout(ParallelLayout.of(size), config)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (heads(3, 1), 2, r"rollout\.tensorParallel: must divide the model's 3 .*heads.* \(seen: 2\);"),
        (heads(6, 3), 2, r"rollout\.tensorParallel: must divide .* 3 key and value heads or .* \(seen: 2\);"),
        (vocabulary_of(151936), 3, r"rollout\.tensorParallel: must divide .*vocabulary of 151936 .* \(seen: 3\);"),
        (heads(12, 3), 4, r"rollout\.tensorParallel: must divide .* 3 key and value heads or .* \(seen: 4\);"),
    ],
)
def test_models_that_do_not_divide_over_tensor_ranks_are_rejected(
    tmp_path: Path, config: PreTrainedConfig, size: int, message: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        check_tensor_parallel(tmp_path, size)
    check_tensor_parallel(tmp_path, 1)


def test_models_that_divide_over_tensor_ranks_are_accepted(tmp_path: Path) -> None:
    for config in (heads(4, 2), tiny_models.ARCHITECTURES["gpt_oss"]()):
        config.save_pretrained(tmp_path)
        check_tensor_parallel(tmp_path, 2)
    heads(8, 2).save_pretrained(tmp_path)
    check_tensor_parallel(tmp_path, 4)


@pytest.mark.parametrize(("num_heads", "num_key_value_heads", "size"), [(8, 8, 4), (8, 2, 4), (12, 3, 6), (8, 1, 8)])
def test_models_that_divide_over_sequence_ranks_are_accepted(
    num_heads: int, num_key_value_heads: int, size: int
) -> None:
    check_layout(ParallelLayout.of(size, sequence_parallel=size), heads(num_heads, num_key_value_heads))


def test_the_role_whose_layout_does_not_fit_is_named(tmp_path: Path) -> None:
    heads(4, 4).save_pretrained(tmp_path)
    actor, critic = ParallelLayout.of(4, sequence_parallel=2), ParallelLayout.of(3, sequence_parallel=3)
    with pytest.raises(ConfigurationError, match=r"^spec\.roles\.critic\.sequenceParallel: must divide .*\(seen: 3\);"):
        check_layouts(tmp_path, {"actor": actor, "critic": critic})
    check_layouts(tmp_path, {"actor": actor})


def test_with_adapters_only_a_separate_reference_needs_a_layout() -> None:
    job = training_runs.small_job(
        num_workers=4,
        model={"lora": {}},
        algorithm={"type": "PPO", "kl": {"coefficient": 0.1}},
    )
    edits = {"spec": {"roles": {"actor": {"shardSize": 2, "sequenceParallel": 2}}}}
    spec = RLJob.from_wire(training_runs.merged(job, edits)).spec
    assert layout_of(spec, "ref") == layout_of(spec, "actor") == ParallelLayout(2, 2, 2)
    assert layout_of(spec, "critic") == ParallelLayout(4)
