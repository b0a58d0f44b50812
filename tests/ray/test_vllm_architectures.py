"""vLLM generates with the trainer's weights, architecture by architecture, and both report the same log-probabilities
of the generated tokens. Exceptions are listed here. All models run in one process, without Ray."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm]

TOLERANCE = 1e-4
NUM_TOKENS = 48
EQUAL = (
    # First: vLLM makes groups for experts only with the first engine of a process.
    "qwen3_moe",
    "mixtral",
    "qwen2",
    "qwen2 tied",
    "qwen3",
    "qwen3 tied",
    "llama",
    "smollm2",
    "mistral",
    "gemma2",
    "gemma3",
    "granite",
    "cohere",
    "phi3",
    "nemotron",
    # Models that vLLM runs through transformers.
    "olmo2",
    "gpt_neox",
)
DIFFERENT = ("cohere2", "qwen2_moe")
"""They differ on rows longer than their windows: for the first, vLLM uses one token more; of the second, it ignores
the window."""
REJECTED = {
    "qwen2 window": "Sliding window for some but all layers is not supported",
}
"""Parts of vLLM's error message."""
FAILING = "phi"
"""vLLM starts, but cannot generate: it loses the bias of the head. Runs last, because its engine cannot be used
afterwards."""


@dataclass(frozen=True)
class ComparedModel:
    """The result for one model."""

    difference: float = 0.0
    """The largest difference between log-probabilities, in nats."""
    num_tokens: int = 0
    mean_logprob: float = 0.0
    refusal: str = ""
    failure: str = ""
    """The error of its generation."""


def compared_models(root: Path, context: WorkerContext) -> dict[str, ComparedModel]:
    # Deleting the first engine would destroy the process group.
    engines: list[VllmEngine] = []
    return {name: compared(name, root / name, context, engines) for name in (*EQUAL, *DIFFERENT, *REJECTED, FAILING)}


def compared(name: str, folder: Path, context: WorkerContext, engines: list[VllmEngine]) -> ComparedModel:
    from rljob_testing.models import small_vllm
    from rljob_trainer.weights.sync import sync_weights

    tiny_models.save(name, folder)
    tiny_models.copy_tokenizer(folder)
    trained = TrainEngine(TrainEngineSettings(folder, torch.device("cpu"), torch.float32, False, 4096, Optimizer()))
    try:
        with small_vllm.model_inspection_in_process():
            engines.append(small_vllm.start_engine(folder, context.world_size))
    except ConfigurationError as error:
        return ComparedModel(refusal=str(error))
    sync_weights(trained, engines[-1], torch.float32, 0)
    try:
        sequences = small_vllm.generated(engines[-1], 24)
    except AttributeError as error:
        return ComparedModel(failure=str(error))
    lengths = [len(prompt) + len(each.token_ids) for prompt, each in zip(small_vllm.PROMPTS, sequences, strict=True)]
    assert max(lengths) > 4 * tiny_models.WINDOW
    found_N = small_vllm.logprobs_of(sequences)
    return ComparedModel(small_vllm.largest_logprob_difference(trained, sequences), len(found_N), float(found_N.mean()))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ComparedModel]:
    [[found]] = gloo_ranks.run_on_ranks(
        [gloo_ranks.RankedRun(partial(compared_models, tmp_path_factory.mktemp("models")), 1)], gloo_ranks.VLLM
    )
    assert isinstance(found, dict)
    print({name: f"{each.difference:.1e} of {each.num_tokens}" for name, each in found.items()})
    return found


@pytest.mark.parametrize("name", EQUAL)
def test_both_engines_give_the_same_logprobs(models: dict[str, ComparedModel], name: str) -> None:
    found = models[name]
    assert (found.refusal, found.failure) == ("", "")
    assert found.difference < TOLERANCE
    assert NUM_TOKENS / 2 < found.num_tokens <= NUM_TOKENS
    # Tokens are drawn from a nearly uniform distribution; otherwise hardly anything would be compared.
    assert found.mean_logprob < -0.5


@pytest.mark.parametrize("name", DIFFERENT)
def test_known_differences_of_sliding_windows_still_exist(models: dict[str, ComparedModel], name: str) -> None:
    """When this fails, vLLM has been fixed: update docs/models.md."""
    assert models[name].difference > 0.1


@pytest.mark.parametrize("name", REJECTED)
def test_models_that_vllm_rejects_are_configuration_errors(models: dict[str, ComparedModel], name: str) -> None:
    message = models[name].refusal
    assert message.startswith("spec.training.rollout.engine: vLLM cannot run ")
    assert REJECTED[name] in message
    assert message.endswith("; set HuggingFace, or choose another model")


def test_a_head_with_a_bias_still_differs(models: dict[str, ComparedModel]) -> None:
    """When this fails, vLLM has been fixed: update docs/models.md."""
    assert "has no attribute 'bias'" in models[FAILING].failure
