"""A vLLM engine that is small enough for tests, and comparisons of its log-probabilities with the trainer's.

Legend: R response tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from vllm import SamplingParams
from vllm.model_executor.models import registry

from rljob_api.v1alpha1.model import Lora
from rljob_testing.training.whole_rollouts import run_to_empty
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
from rljob_trainer.engines.rollout.vllm_start import VllmSettings
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import target_endings
from rljob_trainer.engines.train.model import build_on_meta
from rljob_trainer.engines.train.output_head import output_head_of
from rljob_trainer.engines.train.token_batch import TokenBatch

PROMPTS = ((4, 9, 5), (12, 7, 30, 8, 44, 61, 19, 5, 9, 71, 33, 15, 90))
"""Prompts for the tiny models, as token ids."""


def start_engine(
    folder: Path,
    num_ranks: int,
    *,
    lora: Lora | None = None,
    dtype: torch.dtype = torch.float32,
    has_float32_head: bool = False,
    device_type: str = "cpu",
) -> VllmEngine:
    """Starts an engine for rows of at most 64 tokens. `lora`: the adapters that it can get. Collective over
    `num_ranks`, which share a copy of the model."""
    return VllmEngine(
        VllmSettings(
            model_folder=folder,
            device_type=device_type,
            compiles=False,
            dtype=dtype,
            tensor_parallel=num_ranks,
            max_model_length=64,
            max_num_sequences=8,
            gpu_memory_utilization=0.3,
            cpu_kv_cache_bytes=16 * 2**20,
            seed=0,
            adapter_rank=None if lora is None else lora.rank,
            adapter_targets=() if lora is None else target_endings(build_on_meta(folder), lora.targets),
            has_float32_head=has_float32_head,
        )
    )


def generated(vllm: VllmEngine | EngineLoop, num_tokens: int) -> list[FinishedSequence]:
    """Samples a response of at most `num_tokens` tokens to each of PROMPTS, each with its own seed."""
    sampling = SamplingSettings(1.0, 1.0, 0, num_tokens, ())
    requests = [GenerationRequest(str(row), prompt, sampling, row) for row, prompt in enumerate(PROMPTS)]
    finished = run_to_empty(vllm, requests) if isinstance(vllm, EngineLoop) else vllm.generate(requests)
    return [finished[str(row)] for row in range(len(PROMPTS))]


def logprobs_of(sequences: Sequence[FinishedSequence]) -> torch.Tensor:
    """The log-probabilities that vLLM reported for all response tokens, [R]."""
    return torch.tensor([logprob for each in sequences for logprob in each.logprobs])


def mean_logprob(vllm: VllmEngine, batch: TokenBatch) -> float:
    """The mean log-probability of the batch's response tokens, each given all tokens before it. The weights may change
    between calls."""
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    rows = [row.tolist() for row in batch.tokens.row_tensors()]
    for index, row in enumerate(rows):
        vllm.engine.add_request(str(index), {"prompt_token_ids": row}, parameters, lora_request=vllm.adapter)
    found: dict[str, list[float]] = {}
    while vllm.engine.has_unfinished_requests():
        for output in vllm.engine.step():
            # The first token has none.
            pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            found[output.request_id] = [math.nan, *(each[token].logprob for token, each in pairs)]
    masks = [mask.tolist() for mask in batch.response_mask.row_tensors()]
    chosen = [
        logprob
        for index, mask in enumerate(masks)
        for logprob, is_response in zip(found[str(index)], mask, strict=True)
        if is_response
    ]
    return sum(chosen) / len(chosen)


def largest_logprob_difference(
    trained: TrainEngine, sequences: Sequence[FinishedSequence], *, with_adapters: bool = True
) -> float:
    """The largest difference, in nats, between the log-probabilities of vLLM and of the trainer for the responses to
    PROMPTS. Collective over the trainer's ranks."""
    rows = [torch.tensor([*prompt, *each.token_ids]) for prompt, each in zip(PROMPTS, sequences, strict=True)]
    masks = [torch.arange(len(row)) >= len(prompt) for prompt, row in zip(PROMPTS, rows, strict=True)]
    batch = TokenBatch(RaggedColumn.from_rows(rows), RaggedColumn.from_rows(masks), {})
    found_N = trained.forward(batch, 1.0, with_adapters=with_adapters).logprobs_N
    return float((found_N - logprobs_of(sequences)).abs().max())


def error_of_logits(vllm: VllmEngine, trained: TrainEngine) -> float:
    """The largest difference between vLLM's logits and products in float32, for the same hidden states in 16 bits and
    the trainer's head in 16 bits. For a model that does not scale logits; the trainer is the only rank."""
    head, _ = output_head_of(trained.model.language_model)
    weight_VD = dict(head.named_parameters())["weight"]
    # After a pass FSDP2 leaves a tied head gathered.
    whole_VD = weight_VD.full_tensor() if isinstance(weight_VD, DTensor) else weight_VD
    half_VD = whole_VD.detach().bfloat16()
    hidden_ND = torch.randn(5, half_VD.shape[1], generator=torch.Generator().manual_seed(0)).to(half_VD)
    [logits_NV] = vllm.engine.apply_model(lambda model: model.compute_logits(hidden_ND))
    return float((logits_NV - hidden_ND.float() @ half_VD.float().T).abs().max())


@contextmanager
def model_inspection_in_process() -> Iterator[None]:
    """Makes vLLM inspect a model class in this process. By default it starts a process that loads vLLM again, which
    takes 10 s per class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        yield
