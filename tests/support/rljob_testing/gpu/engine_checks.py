"""Checks of vLLM in the hybrid engine. `engine_program` runs each in processes of its own, on GPUs with vLLM's sleep
mode, on CPUs with `models.vllm_sleep`. `tests/ray` runs the same functions on CPUs.

Legend: R response tokens of all rows.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.gpu.adapter_effect import effect_in_16_bits
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import small_vllm, tiny_models
from rljob_testing.models.vllm_sleep import SleepingMemory, add_sleep_mode
from rljob_testing.training import engine_updates
from rljob_trainer.engines.rollout.base import FinishedSequence
from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
from rljob_trainer.observability.memory import MEMORY
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The precision of jobs by device: vLLM's fastest attention kernels for GPUs have no float32."""
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Largest accepted difference of log-probabilities between trainer and vLLM, in nats."""
STALE = {torch.float32: 1e-2, torch.bfloat16: 0.4}
"""The smallest accepted change of the log-probabilities by an update, as the largest of all tokens. It shows that old
weights in vLLM would be noticed."""
MEMORY_LIMITS = {"cpu": 0.01, "cuda": 256}
"""Largest difference between the change that MEMORY counts and that of the device, in MiB."""
CACHE_AWAKE = "cache awake"
NUM_TOKENS = 12
LORA = Lora(rank=4, alpha=8.0, sync=LoraSync.ADAPTER)


@dataclass
class Received:
    """What the engine got in all weight syncs so far."""

    num_updates: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def watch(self, vllm: VllmEngine) -> None:
        """Counts from now on."""
        update = vllm.update_weights

        def counted(weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
            self.num_updates += 1
            update(map(self._noted, weights), policy_version)

        vllm.update_weights = counted  # type: ignore[method-assign]

    def _noted(self, weight: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        self.names[weight[0]] += 1
        return weight


@dataclass(frozen=True)
class Hybrid:
    """A tiny model in the hybrid engine, and what a check knows about it."""

    worker: HybridWorker
    vllm: VllmEngine
    received: Received
    dtype: torch.dtype
    simulated_sleep: SleepingMemory | None
    """On CPUs, the memory that vLLM would give up asleep; None on GPUs."""

    def sleep_at(self, level: int) -> None:
        """vLLM sleeps at this level from now on."""
        self.vllm.keeps_weights_asleep = level == 1

    def generated(self) -> list[FinishedSequence]:
        """Responses with the actor's weights."""
        self.worker.begin_rollout(True)
        return small_vllm.generated(self.worker.rollout.loop, NUM_TOKENS)

    def difference(self, sequences: Sequence[FinishedSequence]) -> float:
        """The largest difference from the trainer's log-probabilities. Puts vLLM to sleep."""
        return small_vllm.largest_logprob_difference(self.worker.actor.engine, sequences)


def vllm_hybrid(
    case: DeviceContext, model: str, level: int, lora: Lora | None = None, dtype: torch.dtype | None = None
) -> Hybrid:
    """Collective. One of `tiny_models.ARCHITECTURES` in the hybrid engine; all ranks share one copy in vLLM."""
    context, dtype = case.context, dtype or DTYPES[case.device.type]
    folder = case.folder / "model"
    if context.rank == 0:
        tiny_models.copy_tokenizer(tiny_models.save(model, folder))
    torch.distributed.barrier()
    optimizer = Optimizer(learning_rate=1e-2 if lora is None else 4e-2)
    actor = engine_updates.build_actor(folder, context, dtype, optimizer, lora)
    vllm = small_vllm.start_engine(folder, context.world_size, lora=lora, dtype=dtype, device_type=case.device.type)
    simulated_sleep = add_sleep_mode(vllm, keeps_weights=level == 1) if case.device.type == "cpu" else None
    vllm.keeps_weights_asleep = level == 1
    received = Received()
    received.watch(vllm)
    rollout = RolloutWorker(context, lambda: vllm, context.world_size)
    worker = HybridWorker(context, actor, rollout, dtype, 0, others=())
    return Hybrid(worker, vllm, received, dtype, simulated_sleep)


def check_versions(case: DeviceContext, hybrid: Hybrid, levels: Sequence[int]) -> None:
    """vLLM generates with each version of the weights, the initial one first, and once more with the last version
    after it has slept again. It sleeps at `levels[version]` after each version."""
    for version, level in enumerate(levels):
        hybrid.sleep_at(level)
        sequences = hybrid.generated()
        assert {each for row in sequences for each in row.policy_versions} == {version}
        assert case.note(f"version {version}", hybrid.difference(sequences)) < LIMITS[hybrid.dtype]
        if version + 1 < len(levels):
            hybrid.worker.actor.update_policy(engine_updates.random_rollout(tiny_models.VOCABULARY, version), version)
            # vLLM still has the old weights, and the difference shows it.
            stale = case.note(f"version {version}, stale", hybrid.difference(sequences))
            assert stale > STALE[hybrid.dtype]
    before = hybrid.received.num_updates
    assert case.note("again", hybrid.difference(hybrid.generated())) < LIMITS[hybrid.dtype]
    # Kept weights are not sent again.
    assert hybrid.received.num_updates - before == (levels[-1] == 2)


def check_memory(case: DeviceContext, hybrid: Hybrid) -> None:
    """What MEMORY counts changes by as much as the memory in use on the device, when weights and KV cache wake up and
    sleep again."""
    hybrid.difference(hybrid.generated())
    vllm, limit = hybrid.vllm, MEMORY_LIMITS[case.device.type]
    steps: dict[str, Callable[[], None]] = {
        "weights awake": partial(vllm.wake, weights=True, kv_cache=False),
        CACHE_AWAKE: partial(vllm.wake, weights=False, kv_cache=True),
        "asleep": vllm.sleep,
    }
    counted, used = counted_bytes(), used_bytes(case, hybrid)
    for name, step in steps.items():
        step()
        more_counted = case.note(f"{name}, MiB counted", (counted_bytes() - counted) / 2**20)
        more_used = case.note(f"{name}, MiB in use", (used_bytes(case, hybrid) - used) / 2**20)
        assert abs(more_counted - more_used) < limit
        assert (more_used > vllm.num_kv_cache_bytes / 2**20 - limit) is (name == CACHE_AWAKE)


def counted_bytes() -> int:
    """What the memory timeline counts as the memory of this process on the device."""
    return sum(MEMORY.by_owner().values())


def used_bytes(case: DeviceContext, hybrid: Hybrid) -> int:
    """The device's memory in use, without what torch caches; on CPUs what vLLM has in memory."""
    if hybrid.simulated_sleep is not None:
        return hybrid.simulated_sleep.num_bytes(hybrid.vllm.num_weight_bytes)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(case.device)
    return total - free


def check_whole_experts(hybrid: Hybrid) -> None:
    """Each layer's experts arrived as two tensors in every weight sync."""
    assert hybrid.vllm.takes_whole_experts
    experts = {name: count for name, count in hybrid.received.names.items() if ".experts." in name}
    num_layers = tiny_models.COMMON["num_hidden_layers"]
    assert num_layers is not None
    assert len(experts) == 2 * num_layers
    assert set(experts.values()) == {hybrid.received.num_updates}


def weights_discarded(case: DeviceContext) -> None:
    """Level 2, which discards the weights: the engine is built and gets two updates."""
    check_versions(case, vllm_hybrid(case, "qwen3 tied", 2), (2, 2, 2))


def weights_kept(case: DeviceContext) -> None:
    """Level 1, which keeps the weights, as with adapters and with `syncEverySteps`."""
    check_versions(case, vllm_hybrid(case, "qwen3 tied", 1), (1, 1, 1))


def memory_timeline(case: DeviceContext) -> None:
    """Memory, at level 2."""
    check_memory(case, vllm_hybrid(case, "qwen3 tied", 2))


def tensor_parallel(case: DeviceContext) -> None:
    """Two ranks share a copy of the model. Each uses its own GPU only; nothing else may run on the GPUs."""
    check_versions(case, vllm_hybrid(case, "qwen3 tied", 2), (2, 2, 2))
    if case.device.type == "cuda" and shutil.which("nvidia-smi"):
        assert case.note("processes per GPU", max_processes_per_gpu()) <= 1
        # All processes live until every rank has counted.
        torch.distributed.barrier()


def max_processes_per_gpu() -> int:
    """The number of processes on the GPU that has most; 0 in a container that cannot see them."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return max(Counter(listing.stdout.split()).values(), default=0)


def experts(case: DeviceContext) -> None:
    """All experts of a layer arrive at once."""
    hybrid = vllm_hybrid(case, "qwen3_moe", 2)
    check_versions(case, hybrid, (2, 2, 2))
    check_whole_experts(hybrid)


def adapters_beside_kept_weights(case: DeviceContext) -> None:
    """Adapters beside base weights that are kept during sleep."""
    check_versions(case, vllm_hybrid(case, "qwen3", 1, LORA), (1, 1, 1))


def adapters_in_16_bits(case: DeviceContext, model: str = "qwen3") -> None:
    """Separate adapters keep their effect in BFloat16, merged ones lose it."""
    found = effect_in_16_bits(case, model)
    for name, value in asdict(found).items():
        case.note(name, value)
    assert abs(found.with_adapters - found.trained) < 0.2 * found.trained
    assert found.merged < 0.8 * found.trained
    assert found.trained > 0.01
    assert found.merge_error > 0.3
    assert found.error_of_logits < 1e-5
