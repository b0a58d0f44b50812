"""Generation with transformers: slow but exact. The numerical reference for other engines.

When a batch starts, the waiting requests (at most `max_num_sequences`) are decoded together, with a KV cache. The next
batch starts when all of them are finished.

Legend: B requests, T positions (prompt and response), V vocabulary, N checked response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rljob_trainer.engines.device_memory import num_storage_bytes
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    RolloutMemory,
    SamplingSettings,
)
from rljob_trainer.engines.rollout.response_text import response_decoder
from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.logprob_parity import is_model_mismatch, sample_rows
from rljob_trainer.engines.train.output_head import float32_logits, output_head_of
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.models.weight_conversion import float32_names

NUM_CHECKED_TOKENS = 4
"""The number of response tokens that are compared in the check of decoding."""
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""The largest accepted difference of two log-probabilities in this check, in nats. In 16 bits, rounding alone causes
differences of about 0.01."""


@dataclass(frozen=True)
class HfSettings:
    """The settings of the engine."""

    model_folder: Path
    device: torch.device
    dtype: torch.dtype
    max_num_sequences: int
    """The largest number of requests in a batch."""
    has_float32_head: bool = False
    """True: logits have 32 bits, also if `dtype` has 16."""


@dataclass
class _Running:
    """A request that is being decoded, and its response so far."""

    request: GenerationRequest
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)


class HfEngine(RolloutEngine):
    """An engine with a whole copy of the model on one device. It does not support tensor parallelism."""

    def __init__(self, settings: HfSettings) -> None:
        config = AutoConfig.from_pretrained(settings.model_folder)
        # Symptom without this: Gemma 2 silently runs without its soft cap, because transformers (5.19.0) uses sdpa if a
        # class supports it, even if the configuration needs eager attention. Without this, the test of a response's
        # log-probabilities fails.
        is_eager = choose_attention(config).implementation == "eager"
        attention = "eager" if is_eager else config._attn_implementation
        model = AutoModelForCausalLM.from_config(config, dtype=settings.dtype, attn_implementation=attention)
        self.model = model.to(settings.device).eval()
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name in float32_names(self.model, tensors):
            tensors[name].data = tensors[name].data.float()
        if settings.has_float32_head:
            head, _ = output_head_of(self.model)
            vars(head)["forward"] = partial(float32_logits, head)
        self.tokenizer = Tokenizer(settings.model_folder)
        self.decoder = response_decoder(self.tokenizer)
        self.settings = settings
        self.end_tokens = frozenset(self.tokenizer.eos_token_ids)
        self.policy_version = -1
        self.waiting: dict[str, GenerationRequest] = {}
        self.running: list[_Running] = []
        self.cache = DynamicCache()
        self.input_BT = torch.empty(0)
        """The tokens of the next forward pass: first whole prompts, then the last token of each response, [B, 1]."""
        self.mask_BT = torch.empty(0)
        """1 for the tokens of prompts and responses so far, 0 for padding before prompts."""

    def add(self, request: GenerationRequest) -> None:
        """See RolloutEngine.add."""
        self.waiting[request.request_id] = request

    def has_unfinished(self) -> bool:
        """See RolloutEngine.has_unfinished."""
        return bool(self.waiting or self.running)

    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        """See RolloutEngine.abort. The other rows of a running batch continue."""
        unwanted = set(request_ids)
        # Requests that are waiting have no tokens and need no random generator.
        waiting = [request_id for request_id in self.waiting if request_id in unwanted]
        dropped = [_Running(self.waiting.pop(request_id), torch.Generator()) for request_id in waiting]
        keep: list[int] = []
        for row, running in enumerate(self.running):
            if running.request.request_id in unwanted:
                dropped.append(running)
            else:
                keep.append(row)
        if len(keep) < len(self.running):
            self._keep_rows(keep)
        return [self._finished(each, FinishReason.ABORTED) for each in dropped]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """See RolloutEngine.update_weights. There is no cache to clear: it exists only while sequences are running."""
        assert not self.running, f"weights must not be replaced while {len(self.running)} sequences are running"
        parameters = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        if self.policy_version < 0:
            # These are the first weights; the model's own were random.
            self._check_decoding()
        self.policy_version = policy_version

    @property
    def takes_hub_names(self) -> bool:
        """See RolloutEngine.takes_hub_names."""
        return False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """See RolloutEngine.wake. This engine never sleeps."""

    @property
    def forgets_weights_asleep(self) -> bool:
        """See RolloutEngine.forgets_weights_asleep."""
        return False

    @property
    def memory(self) -> RolloutMemory:
        """See RolloutEngine.memory."""
        layers = self.cache.layers if self.running else ()
        cached = [each for layer in layers for each in (layer.keys, layer.values) if isinstance(each, torch.Tensor)]
        weights = num_storage_bytes((*self.model.parameters(), *self.model.buffers()))
        return RolloutMemory(weights, num_storage_bytes(cached))

    def clear_cache(self) -> None:
        """See RolloutEngine.clear_cache. This engine keeps nothing between batches."""

    def sleep(self) -> None:
        """See RolloutEngine.sleep. This engine never sleeps."""

    @torch.no_grad()
    def step(self) -> list[FinishedSequence]:
        """See RolloutEngine.step."""
        if not self.running:
            self._start_batch()
        positions_BT = (self.mask_BT.cumsum(dim=1) - 1).clamp(min=0)[:, -self.input_BT.shape[1] :]
        output = self.model(
            input_ids=self.input_BT, attention_mask=self.mask_BT, position_ids=positions_BT, past_key_values=self.cache
        )
        finished: list[FinishedSequence] = []
        keep: list[int] = []
        for row, (running, logits_V) in enumerate(zip(self.running, output.logits[:, -1].float(), strict=True)):
            token, logprob = _sample(logits_V, running.request.sampling, running.generator)
            running.token_ids.append(token)
            running.logprobs.append(logprob)
            running.policy_versions.append(self.policy_version)
            reason = self._finish_reason(running)
            if reason is None:
                keep.append(row)
            else:
                finished.append(self._finished(running, reason))
        last_tokens = torch.tensor([[running.token_ids[-1]] for running in self.running], device=self.settings.device)
        self.input_BT = last_tokens
        self.mask_BT = torch.cat([self.mask_BT, torch.ones_like(last_tokens)], dim=1)
        if finished:
            self._keep_rows(keep)
        return finished

    def _check_decoding(self) -> None:
        """Checks that decoding token by token with the cache gives the same log-probabilities as the model's own
        forward pass on whole rows. Raises ConfigurationError if they differ.

        They differ for models that do not keep their state in the cache that this engine passes. Such a model would
        silently see only the last token."""
        waiting, self.waiting = self.waiting, {}
        sampling = SamplingSettings(0.0, 1.0, 0, NUM_CHECKED_TOKENS, ())
        # The sample rows may have as many tokens as the model has positions, and the response needs some of these.
        prompts = [row[:-NUM_CHECKED_TOKENS] for row in sample_rows(self.model.config)[:2]]
        requests = [GenerationRequest(str(row), tuple(each.tolist()), sampling, 0) for row, each in enumerate(prompts)]
        ends, self.end_tokens = self.end_tokens, frozenset()
        try:
            found = self.generate(requests)
            differences = [self._difference(request, found[request.request_id]) for request in requests]
            seen = f"differences of {', '.join(f'{each:.1e}' for each in differences)}"
            is_wrong = not all(each <= MAX_DIFFERENCE[self.settings.dtype] for each in differences)
        except Exception as error:
            if not is_model_mismatch(error):
                raise
            seen, is_wrong = f"{type(error).__name__}: {error}", True
        finally:
            self.waiting, self.running, self.end_tokens = waiting, [], ends
        if is_wrong:
            raise ConfigurationError(
                f"spec.training.rollout.engine: with a '{self.model.config.model_type}' model, generation with "
                f"HuggingFace differs from the model's own forward pass ({seen}); set VLLM, or choose a model of "
                "another type"
            )

    def _difference(self, request: GenerationRequest, found: FinishedSequence) -> float:
        """The largest difference between the log-probabilities of a response in `found` and by the model's own forward
        pass, in nats."""
        tokens_1T = torch.tensor([[*request.prompt_token_ids, *found.token_ids]], device=self.settings.device)
        logits_NV = self.model(input_ids=tokens_1T, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1]
        expected_NV = logits_NV.float().log_softmax(dim=-1).cpu()
        expected_N = expected_NV.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        return float((expected_N - torch.tensor(found.logprobs)).abs().max())

    def _start_batch(self) -> None:
        """Makes a batch of the oldest waiting requests, at most `max_num_sequences`. Prompts are padded on the left."""
        requests = [self.waiting.pop(key) for key in list(self.waiting)[: self.settings.max_num_sequences]]
        device = self.settings.device
        self.running = [_Running(request, torch.Generator(device).manual_seed(request.seed)) for request in requests]
        width = max(len(request.prompt_token_ids) for request in requests)
        rows = [[0] * (width - len(r.prompt_token_ids)) + list(r.prompt_token_ids) for r in requests]
        masks = [[0] * (width - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in requests]
        self.input_BT = torch.tensor(rows, device=device)
        self.mask_BT = torch.tensor(masks, device=device)
        self.cache = DynamicCache()

    def _keep_rows(self, rows: list[int]) -> None:
        """Removes all other rows from the running batch."""
        self.running = [self.running[row] for row in rows]
        if not rows:
            # The keys and values of the last batch would stay on the device, beside the passes of the trainer.
            self.cache = DynamicCache()
            return
        index = torch.tensor(rows, device=self.settings.device)
        self.input_BT, self.mask_BT = self.input_BT[index], self.mask_BT[index]
        self.cache.batch_select_indices(index)

    def _finish_reason(self, running: _Running) -> FinishReason | None:
        if running.token_ids[-1] in self.end_tokens:
            return FinishReason.STOP
        request = running.request
        if self.decoder.is_stopped(request.prompt_token_ids, running.token_ids, request.sampling.stop):
            return FinishReason.STOP
        if len(running.token_ids) >= request.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _finished(self, running: _Running, reason: FinishReason) -> FinishedSequence:
        request = running.request
        text = self.decoder.response_text(request.prompt_token_ids, running.token_ids, request.sampling.stop)
        return FinishedSequence(
            request_id=request.request_id,
            token_ids=tuple(running.token_ids),
            logprobs=tuple(running.logprobs),
            policy_versions=tuple(running.policy_versions),
            text=text.text,
            plain_text=text.plain,
            finish_reason=reason,
        )


def _sample(logits_V: torch.Tensor, sampling: SamplingSettings, generator: torch.Generator) -> tuple[int, float]:
    """Samples a token. Returns the token, and its log-probability in the distribution that it was sampled from."""
    if sampling.temperature == 0:
        token = int(logits_V.argmax())
        return token, float(torch.log_softmax(logits_V, dim=-1)[token])
    logits_V = logits_V / sampling.temperature
    if sampling.top_k:
        threshold = torch.topk(logits_V, min(sampling.top_k, logits_V.shape[0])).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    if sampling.top_p < 1:
        sorted_V, order_V = torch.sort(logits_V, descending=True)
        probabilities_V = sorted_V.softmax(dim=-1)
        outside_V = probabilities_V.cumsum(dim=-1) - probabilities_V >= sampling.top_p
        logits_V = logits_V.masked_fill(torch.zeros_like(outside_V).scatter(0, order_V, outside_V), float("-inf"))
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])
