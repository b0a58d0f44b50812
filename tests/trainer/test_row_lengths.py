"""Which rows exceed a model's positions, by its configuration and the job's length fields."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, MptConfig, PreTrainedConfig

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.rollout import RolloutEngine
from rljob_api.v1alpha1.training import Training
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.controller.checks.fit import check_row_lengths, position_limit
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.datasets.prompts import PromptRow, evaluation_dataset
from rljob_trainer.errors import ConfigurationError


def scaled(kind: str, **settings: float) -> PreTrainedConfig:
    return LlamaConfig(
        max_position_embeddings=64, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **settings}
    )


LIMITS: dict[str, tuple[PreTrainedConfig, int | None]] = {
    "plain": (LlamaConfig(max_position_embeddings=64), 64),
    "learned positions, under another name": (GPT2Config(n_positions=48), 48),
    "a window": (tiny_models.FLAT["mistral"](), 128),
    "no positions": (MptConfig(), None),
    "linear": (scaled("linear"), 256),
    # As in vLLM and transformers: max_position_embeddings is the extended length.
    "YaRN": (scaled("yarn", original_max_position_embeddings=16), 64),
    "Llama 3": (
        scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
        64,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_of_a_model_is_its_number_of_positions(name: str) -> None:
    config, limit = LIMITS[name]
    assert position_limit(config) == limit


def training(engine: RolloutEngine, new_tokens: int = 20) -> Training:
    evaluation = training_runs.merged(training_runs.held_out(4, 0), {"dataset": {"maxPromptTokens": 99}})
    rollout = {"engine": engine.value, "maxNewTokens": new_tokens}
    return RLJob.from_wire(training_runs.small_job(rollout=rollout, evaluations=[evaluation])).spec.training


def prompts(longest: int, longest_held_out: int = 1) -> Prompts:
    def row(length: int) -> PromptRow:
        return PromptRow(0, "", "", (3,) * length, None, {})

    return Prompts((row(longest), row(1)), {evaluation_dataset(0): (row(longest_held_out),)}, 0)


@pytest.mark.parametrize("engine", [RolloutEngine.VLLM, RolloutEngine.HUGGING_FACE])
def test_a_row_beyond_the_positions_is_rejected_by_the_length_fields(tmp_path: Path, engine: RolloutEngine) -> None:
    """Real rows count, not maxPromptTokens: the longest row of this job's evaluation has 99 tokens."""
    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    check_row_lengths(tmp_path, training(engine), prompts(44, 44))
    message = (
        r"^spec\.training\.dataset\.maxPromptTokens \(8\) and spec\.training\.rollout\.maxNewTokens \(20\): the "
        r"longest prompt \(45 tokens\) .* 65 tokens, .* 64 \("
        r"max_position_embeddings in its config\.json\); reduce maxNewTokens, or maxPromptTokens with overlong"
    )
    with pytest.raises(ConfigurationError, match=message):
        check_row_lengths(tmp_path, training(engine), prompts(45))
    with pytest.raises(
        ConfigurationError, match=r"^spec\.training\.evaluations\[0\]\.dataset\.maxPromptTokens \(99\) .*46"
    ):
        check_row_lengths(tmp_path, training(engine), prompts(45, 46))


def test_too_many_new_tokens_are_rejected_before_the_data_is_loaded(tmp_path: Path) -> None:
    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    check_row_lengths(tmp_path, training(RolloutEngine.VLLM, 63))
    with pytest.raises(ConfigurationError, match=r"maxNewTokens \(64\): a prompt of one token .* 65 tokens, .*64"):
        check_row_lengths(tmp_path, training(RolloutEngine.VLLM, 64))


@pytest.mark.parametrize("engine", [RolloutEngine.VLLM, RolloutEngine.HUGGING_FACE])
def test_rows_that_would_change_the_rotary_frequencies_are_rejected(tmp_path: Path, engine: RolloutEngine) -> None:
    """The training engine cannot follow them, whatever the rollout engine is."""
    scaled("dynamic").save_pretrained(tmp_path)
    check_row_lengths(tmp_path, training(engine), prompts(44))
    with pytest.raises(ConfigurationError, match=r"may have 65 tokens, .* 64 \(.* rotary freq"):
        check_row_lengths(tmp_path, training(engine), prompts(45))
