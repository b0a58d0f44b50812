"""Starts vLLM in the worker's own process: settings, arguments, workarounds, and the errors of a start that failed."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig
from vllm import EngineArgs, LLMEngine
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.transformers.base import Base as TransformersModel
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rljob_trainer.engines.rollout.select import check_build
from rljob_trainer.engines.rollout.vllm_adapters import adapters_of_the_trainer, names_in_vllm
from rljob_trainer.errors import ConfigurationError, DeviceMemoryError, HostMemoryError, ResourceError, WorkerError

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
    adapter_targets: tuple[str, ...] = ()
    """The last parts of the names of the layers that have adapters."""
    has_float32_head: bool = False
    """True: logits are in float32, also if `dtype` has 16 bits."""


def start_vllm(settings: VllmSettings) -> LLMEngine:
    """Collective. Builds the engine, with random weights. Raises ConfigurationError for a model that vLLM cannot run,
    and if the ranks that share a model cannot see each other's GPUs; ResourceError if memory is too small, or the
    device, a disk or the network fails; WorkerError for every other error, such as a TypeError in vLLM."""
    check_build(current_platform.device_type, settings.device_type)
    check_devices(settings)
    try:
        with nullcontext() if settings.adapter_rank is None else adapters_of_the_trainer():
            return _built_engine(engine_arguments(settings))
    except Exception as error:
        raise _start_error(error, settings) from error


def check_devices(settings: VllmSettings) -> None:
    """Raises ConfigurationError if the process sees fewer NVIDIA GPUs than `tensor_parallel`. vLLM 0.32.0 looks up the
    GPUs of all these ranks, which would end in an IndexError."""
    if settings.device_type != "cuda" or torch.version.hip is not None:
        return
    num_visible = torch.cuda.device_count()
    if num_visible < settings.tensor_parallel:
        raise ConfigurationError(
            "spec.roles.rollout.tensorParallel: workers that share a model must see each other's GPUs (seen: "
            f"{settings.tensor_parallel}), but this worker sees only {num_visible}: it uses a MIG device, "
            "CUDA_VISIBLE_DEVICES names fewer GPUs, or this version of Ray does not name the node's GPUs; set "
            "tensorParallel to 1, or use a pool with whole GPUs, or another version of Ray"
        )


def engine_arguments(settings: VllmSettings) -> EngineArgs:
    """vLLM's arguments."""
    on_cpu = settings.device_type == "cpu"
    return EngineArgs(
        model=str(settings.model_folder),
        tokenizer=str(settings.model_folder),
        # The same tokenizer as the controller's, even if the folder has files of another one.
        tokenizer_mode="hf",
        hf_overrides=with_float32_head if settings.has_float32_head else {},
        dtype=str(settings.dtype).removeprefix("torch."),
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend="external_launcher",
        enforce_eager=not settings.compiles,
        load_format="dummy",
        max_model_len=settings.max_model_length,
        max_num_seqs=settings.max_num_sequences,
        max_num_batched_tokens=max(8192, settings.max_model_length),
        # Symptom without this, if the prompts of a step have more tokens: `CPU Generator does not use offset`, because
        # vLLM 0.32.0 samples a token after a part of a prompt, and then cannot set a request's generator back.
        enable_chunked_prefill=False if on_cpu else None,
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
        lora_target_modules=names_in_vllm(settings.adapter_targets) or None,
    )


def with_float32_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """Sets vLLM's option for logits in float32, also for the text part of a multimodal model: vLLM 0.32.0 builds this
    part with the part's own configuration."""
    for part in (config, config.get_text_config()):
        part.head_dtype = "float32"
    return config


def _built_engine(arguments: EngineArgs) -> LLMEngine:
    """Collective. Builds the engine with two workarounds for vLLM 0.32.0.

    1. The shared memory of tensor-parallel ranks gets a unique name. Symptom without this: `create shm in SHMManager
    failed` on CPUs, because vLLM names the memory after the last part of the process group's address. With an external
    launcher this part is the same for all engines. When all ranks have opened the memory, its name is removed, so that
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


def _start_error(error: Exception, settings: VllmSettings) -> Exception:
    """Returns the error for a job whose vLLM did not start: HostMemoryError or DeviceMemoryError if memory was too
    small, ConfigurationError for a model that vLLM cannot run, ResourceError if the machine may be the cause, else
    WorkerError."""
    text = str(error) or type(error).__name__
    # vLLM 0.32.0 has no error class for a lack of memory. `test_memory_shortage.py` fails if vLLM's messages change.
    is_unsupported = isinstance(error, AssertionError | ValueError | NotImplementedError)
    can_lack_memory = isinstance(error, RuntimeError | ValueError | AssertionError)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (can_lack_memory and "memory" in text.lower()):
        if settings.device_type == "cpu":
            kind: type[ResourceError] = HostMemoryError
            setting = f"cpuKvCache (now {settings.cpu_kv_cache_bytes} bytes)"
        else:
            kind = DeviceMemoryError
            setting = f"gpuMemoryUtilization (now {settings.gpu_memory_utilization})"
        # "change": it may be too small for the longest sequence, or too large for the memory.
        return kind(
            f"spec.training.rollout: vLLM does not have enough memory ({text}); change {setting}, or reduce "
            "maxNumSequences"
        )
    if is_unsupported:
        # Assertions mostly fail because sizes are not divisible by the tensor-parallel size.
        advice = "; set HuggingFace, or choose another model"
        advice += "" if settings.tensor_parallel == 1 else "; or set roles.rollout.tensorParallel to 1"
        advice += (
            "" if settings.adapter_rank is None else "; if the adapters are the cause, set model.lora.sync: Merged"
        )
        return ConfigurationError(
            f"spec.training.rollout.engine: vLLM cannot run {settings.model_folder} ({text}){advice}"
        )
    named = ": ".join(filter(None, (type(error).__name__, str(error))))
    is_of_machine = isinstance(error, RuntimeError | OSError) and not isinstance(error, RecursionError)
    return (ResourceError if is_of_machine else WorkerError)(
        f"spec.training.rollout.engine: vLLM did not start ({named})"
    )
