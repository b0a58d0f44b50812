"""Generation with vLLM in the worker's own process. The worker makes each decoding step, and replaces the weights from
memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.device_allocator import get_mem_allocator_instance
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.output_processor import RequestState

from rljob_api.v1alpha1.model import Lora
from rljob_trainer.engines.device_memory import distinct_storages
from rljob_trainer.engines.rollout.base import (
    AdapterEngine,
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutMemory,
    SamplingSettings,
)
from rljob_trainer.engines.rollout.response_text import response_decoder
from rljob_trainer.engines.rollout.vllm_start import VllmSettings, start_vllm
from rljob_trainer.engines.rollout.vllm_weights import accept_whole_experts, reload_weights
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.models.adapter_files import write_adapter
from rljob_trainer.models.tokenizer import Tokenizer


class VllmEngine(AdapterEngine):
    """One vLLM engine per rank; the ranks of a tensor-parallel group share one copy of the model.

    The rank environment (RANK, WORLD_SIZE, ...) and the default process group must exist, because vLLM creates its own
    groups from them. Weights are random until the first `update_weights`.
    """

    def __init__(self, settings: VllmSettings) -> None:
        """Collective. Raises ConfigurationError for a model that vLLM cannot run, ResourceError if memory is too small
        or the device fails."""
        self.engine = start_vllm(settings)
        [self.takes_whole_experts] = self.engine.apply_model(accept_whole_experts)
        self.on_cpu = settings.device_type == "cpu"
        self.has_sleep_mode = not self.on_cpu
        self.keeps_weights_asleep = self.on_cpu or settings.keeps_weights_asleep
        self.tensor_parallel = settings.tensor_parallel
        [self.kv_cache] = self.engine.collective_rpc(_kv_cache_storages)
        self.num_kv_cache_bytes = sum(storage.nbytes() for storage in self.kv_cache)
        self.num_weight_bytes = 0
        """This rank's part of the weights that the last update sent, in bytes."""
        self.has_weights, self.has_kv_cache = True, True
        """Whether they are in device memory now."""
        self.sleep_allocator = sleep_allocator()
        self.num_unmapped_bytes = 0
        """See RolloutMemory.unmapped."""
        self.has_slept = False
        """Whether `sleep` was called before."""
        self.can_fill_blocks = settings.max_model_length >= self.engine.vllm_config.cache_config.block_size
        """Whether a sequence can fill a block of the KV cache."""
        self._policy_version = -1
        self.adapter: LoRARequest | None = None
        self._adapter_numbers = count(1)
        self.tokenizer = Tokenizer(settings.model_folder)
        self.decoder = response_decoder(self.tokenizer)
        self._stops: dict[str, tuple[str, ...]] = {}
        """The stop texts of the unfinished requests."""
        self._version_spans: dict[str, list[tuple[int, int]]] = {}
        """For unfinished requests that have tokens of earlier policy versions: the number of tokens of each version,
        and the version."""

    def add(self, request: GenerationRequest) -> None:
        """See RolloutEngine.add."""
        parameters = sampling_parameters(request.sampling, request.seed)
        self._stops[request.request_id] = request.sampling.stop
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        self.engine.add_request(request.request_id, prompt, parameters, lora_request=self.adapter)

    def step(self) -> list[FinishedSequence]:
        """See RolloutEngine.step."""
        return [self._finished(output) for output in self.engine.step() if output.finished]

    def has_unfinished(self) -> bool:
        """See RolloutEngine.has_unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        """See RolloutEngine.abort."""
        dropped = [request_id for request_id in request_ids if request_id in self._stops]
        # vLLM itself returns nothing for a request that is aborted.
        outputs = [
            self._state(request_id).make_request_output([], None, VllmFinishReason.ABORT, None)
            for request_id in dropped
        ]
        self.engine.abort_request(dropped)
        return [self._finished(output) for output in outputs]

    @property
    def policy_version(self) -> int:
        """See RolloutEngine.policy_version."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Tokens that unfinished requests have already keep their version."""
        if version != self._policy_version:
            for request_id in self._stops:
                spans = self._version_spans.setdefault(request_id, [])
                num_tokens = len(self._state(request_id).detokenizer.output_token_ids)
                spans.append((num_tokens - sum(length for length, _ in spans), self._policy_version))
        self._policy_version = version

    def _state(self, request_id: str) -> RequestState:
        """vLLM's record of an unfinished request, with its tokens so far. vLLM gives each request a number of its own,
        and stores its records by these numbers."""
        processor = self.engine.output_processor
        [number] = processor.external_req_ids[request_id]
        return processor.request_states[number]

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """See RolloutEngine.update_weights."""
        # vLLM drops its adapters when weights are reloaded.
        self.adapter = None
        self.num_weight_bytes = reload_weights(
            self.engine, weights, tensor_parallel=self.tensor_parallel, on_cpu=self.on_cpu
        )
        self.clear_cache()
        self.policy_version = policy_version

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], lora: Lora, policy_version: int) -> None:
        """See AdapterEngine.update_adapter."""
        # Each version needs its own name, number and folder: vLLM identifies adapters by name, stores them by number,
        # and caches prefixes by all three. With an old number, vLLM would silently keep the old adapter.
        number = next(self._adapter_numbers)
        with tempfile.TemporaryDirectory(prefix="rljob-adapter-") as folder:
            write_adapter(Path(folder), tensors, lora, base_model=None)
            adapter = LoRARequest(f"policy-{number}", number, folder)
            try:
                is_loaded = self.engine.add_lora(adapter)
            except ValueError as error:
                raise ConfigurationError(
                    f"spec.training.model.lora.sync: vLLM rejected these adapters ({error}); set Merged"
                ) from error
        assert is_loaded, "vLLM has not loaded the adapter"
        self.adapter = adapter
        self.clear_cache()
        self.policy_version = policy_version

    @property
    def takes_hub_names(self) -> bool:
        """See RolloutEngine.takes_hub_names."""
        return True

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """See RolloutEngine.wake."""
        self.has_weights = self.has_weights or weights
        self.has_kv_cache = self.has_kv_cache or kv_cache
        if self.has_sleep_mode and self.engine.is_sleeping():
            self.engine.wake_up([tag for tag, wanted in (("weights", weights), ("kv_cache", kv_cache)) if wanted])
            self.num_unmapped_bytes = asleep_bytes(self.sleep_allocator)

    @property
    def forgets_weights_asleep(self) -> bool:
        """See RolloutEngine.forgets_weights_asleep."""
        return not self.keeps_weights_asleep

    def clear_cache(self) -> None:
        """See RolloutEngine.clear_cache."""
        is_clear = self.engine.reset_prefix_cache()
        # vLLM does not clear the cache while responses are being decoded. Their next tokens would be computed from keys
        # and values of the old weights.
        assert is_clear, "the cache must not be cleared while sequences are running"

    def sleep(self) -> None:
        """See RolloutEngine.sleep. vLLM's CPU backend has no sleep mode. So on CPUs the weights stay, and this method
        returns the memory of the KV cache to the system: the first time the whole cache, because vLLM writes to all of
        it when it allocates it; later the pages that the rollout has written.

        Later sleeps only mark these pages as reclaimable, if the next rollout will write to the same pages. The system
        then takes them only when it needs memory. (To get new pages took a fifth of the time of a rollout of SmolLM2.)
        Rollouts write to the same pages if no sequence can fill a block of the cache. vLLM moves a full block to the
        end of its free list, to keep the block's prefix, and so uses more and more of the cache."""
        if self.has_sleep_mode:
            self.engine.sleep(level=1 if self.keeps_weights_asleep else 2)
            self.has_weights = False
            self.num_unmapped_bytes = asleep_bytes(self.sleep_allocator)
        else:
            # The contents of the pages are lost, so cached prefixes are invalid. vLLM's own sleep does the same.
            self.engine.reset_prefix_cache()
            if self.has_slept and not self.can_fill_blocks:
                HOST_MEMORY.make_reclaimable(self.kv_cache)
            else:
                HOST_MEMORY.release_pages(self.kv_cache)
        self.has_kv_cache = False
        self.has_slept = True

    @property
    def memory(self) -> RolloutMemory:
        """See RolloutEngine.memory. Weights are counted when they are sent, because on CPUs vLLM keeps them in a packed
        form that cannot be measured."""
        return RolloutMemory(
            self.num_weight_bytes if self.has_weights else 0,
            self.num_kv_cache_bytes if self.has_kv_cache else 0,
            self.num_unmapped_bytes,
        )

    @property
    def kept_buffers(self) -> list[int]:
        """See RolloutEngine.kept_buffers."""
        return kept_segments(self.sleep_allocator, keeps_weights=self.keeps_weights_asleep)

    def _finished(self, output) -> FinishedSequence:  # type: ignore[no-untyped-def]
        completion = output.outputs[0]
        token_ids = tuple(int(token) for token in completion.token_ids)
        # One entry per position: the sampled token.
        assert tuple(completion.logprobs.token_ids) == token_ids, "vLLM's log-probabilities belong to other tokens"
        earlier = [version for length, version in self._version_spans.pop(output.request_id, ()) for _ in range(length)]
        # Not vLLM's own text, which exists only if there are stop texts.
        text = self.decoder.response_text(output.prompt_token_ids, token_ids, self._stops.pop(output.request_id))
        return FinishedSequence(
            request_id=output.request_id,
            token_ids=token_ids,
            logprobs=tuple(completion.logprobs.logprobs),
            policy_versions=(*earlier, *(self.policy_version,) * (len(token_ids) - len(earlier))),
            text=text.text,
            plain_text=text.plain,
            finish_reason=finish_reason_of(completion.finish_reason),
        )


def finish_reason_of(reason: str | None) -> FinishReason:
    """Why a response ended, from vLLM's finish reason. Raises ResourceError for reasons that this program does not
    cause, such as `repetition`: training on such a response would teach the policy to stop there."""
    if reason not in list(FinishReason):
        raise ResourceError(
            f"spec.training.rollout.engine: vLLM ended a response for an unexpected reason (finish reason: {reason}); "
            "see the worker's log"
        )
    return FinishReason(reason)


def sampling_parameters(sampling: SamplingSettings, seed: int) -> SamplingParams:
    """vLLM's sampling parameters. vLLM returns each response once, when it is complete, with the log-probability of
    each sampled token. Only if there are stop texts, vLLM decodes the text after every token, with special tokens."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop),
        seed=seed if sampling.temperature > 0 else None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _kv_cache_storages(worker) -> list[torch.UntypedStorage]:  # type: ignore[no-untyped-def]
    return distinct_storages(worker.model_runner.kv_caches)


def sleep_allocator() -> Any:
    """vLLM's allocator for everything that sleeps; None on a platform without sleep mode."""
    return get_mem_allocator_instance() if current_platform.is_cuda_alike() else None


def asleep_bytes(allocator: Any) -> int:
    """The bytes of tensors that sleep, by vLLM's allocator; 0 for None. vLLM's allocator unmaps whole segments, which
    may have room for more tensors."""
    if allocator is None:
        return 0
    asleep = {pointer for pointer, data in allocator.pointer_to_data.items() if data.is_asleep}
    pools = (pool for each in allocator.allocator_and_pools.values() for pool, _ in each)
    segments = (segment for pool in pools for segment in pool.snapshot())
    return sum(segment["allocated_size"] for segment in segments if segment["address"] in asleep)


def kept_segments(allocator: Any, *, keeps_weights: bool) -> list[int]:
    """The sizes in bytes of the segments that do not lose their contents asleep, by vLLM's allocator; empty for None.
    Each has a buffer of its own in pinned host memory then. vLLM keeps weights at level 1; CUDA graphs and other state
    of the runtime at both levels."""
    found = [] if allocator is None else allocator.pointer_to_data.values()
    lost = {"kv_cache"} if keeps_weights else {"kv_cache", "weights"}
    return [data.handle[1] for data in found if data.tag not in lost]
