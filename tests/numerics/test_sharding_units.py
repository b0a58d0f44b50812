"""Embedding and output head are units of FSDP2 of their own, and losses and gradients stay the same, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from rljob_api.v1alpha1.model import Lora
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates, gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train import sharded_model
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution

TIED, UNTIED = "tied", "untied"
NUM_LAYERS = 2
SETTINGS = {
    "plain": lambda settings: settings,
    "recomputed": lambda settings: replace(settings, gradient_checkpointing=True),
    "deferred reduction": lambda settings: replace(settings, defers_reduction=True),
    "sequence ranks": lambda settings: replace(
        settings, layout=ParallelLayout.of(dist.get_world_size(), sequence_parallel=dist.get_world_size())
    ),
    "replicas": lambda settings: replace(settings, layout=ParallelLayout.of(dist.get_world_size(), shard_size=1)),
    "offload": lambda settings: replace(settings, offload=OffloadSettings(True, True, True)),
    "adapters": lambda settings: replace(settings, adapters=AdapterSettings(Lora(rank=4), 0)),
    "bfloat16": lambda settings: replace(settings, compute_dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Found:
    """Results of one engine."""

    units: list[str]
    """The names of the modules that are units, without the layers."""
    num_units: int
    logprobs_N: Tensor
    loss: float
    gradients: Mapping[str, Tensor]
    gathered: int
    """Bytes of parameters that stay gathered after a pass without gradient."""
    num_gathers: int
    """All-gathers of a micro-batch with gradient."""


def save(name: str, folder: Path) -> Path:
    config = Qwen3Config(
        **{**tiny_models.COMMON, "num_hidden_layers": NUM_LAYERS},
        head_dim=tiny_models.HEAD_SIZE,
        tie_word_embeddings=name == TIED,
    )
    tiny_models.make_from(config).save_pretrained(folder / name)
    return folder / name


def found_by(settings: TrainEngineSettings) -> Found:
    """Collective. The results of an engine with these settings."""
    engine = TrainEngine(settings)
    units = [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]
    batch = engine_updates.random_batch([7, 30, 19, 4])
    logprobs_N = engine.forward(batch, 1.0).logprobs_N
    gathered = engine.memory.gathered
    update = engine_updates.update(engine, batch)
    engine.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
    return Found(
        [name.removeprefix("language_model.") for name in units if "layers" not in name],
        len(units),
        logprobs_N,
        update.loss,
        update.gradients,
        gathered,
        num_gathers_of_update(engine),
    )


class Gathers(TorchDispatchMode):
    """Counts all-gathers into one tensor."""

    num: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        del types
        self.num += str(func) == "c10d._allgather_base_.default"
        return func(*args, **(kwargs or {}))


def num_gathers_of_update(engine: TrainEngine) -> int:
    """Collective. The all-gathers of a micro-batch with gradient."""

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        return -distribution.logprobs_N.sum()

    engine.offload_state()
    with Gathers() as gathers:
        engine.forward_backward(engine_updates.random_batch([12]), loss, 1.0)
    return gathers.num


CASES = ((TIED, "plain"), *((UNTIED, name) for name in SETTINGS))


def all_found(folder: Path, context: WorkerContext) -> dict[tuple[str, str], tuple[Found, Found]]:
    """Collective. For each of CASES: the results of the engine, and those with all parameters outside the
    decoder layers as one unit."""
    found = {}
    for model, name in CASES:
        settings = SETTINGS[name](engine_updates.engine_settings(folder / model, context.device, max_tokens=32))
        with pytest.MonkeyPatch.context() as patch:
            now = found_by(settings)
            patch.setattr(sharded_model, "embedding_and_head", lambda _: [])
            found[model, name] = now, found_by(settings)
    return found


@dataclass(frozen=True)
class Seen:
    """The results of the first of these ranks, by case: those of the engine, and those with one unit for all parameters
    outside the decoder layers."""

    num_ranks: int
    found: Mapping[tuple[str, str], tuple[Found, Found]]


@pytest.fixture(scope="module")
def of_all_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    folder, counts = tmp_path_factory.mktemp("models"), (1, 2)
    for name in (TIED, UNTIED):
        save(name, folder)
    runs = [gloo_ranks.RankedRun(partial(all_found, folder), num_ranks) for num_ranks in counts]
    found = {}
    for num_ranks, (first, *_) in zip(counts, gloo_ranks.run_on_ranks(runs), strict=True):
        assert isinstance(first, dict)
        found[num_ranks] = Seen(num_ranks, first)
    return found


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def seen(request: pytest.FixtureRequest, of_all_ranks: Mapping[int, Seen]) -> Seen:
    return of_all_ranks[request.param]


def test_only_weights_that_are_not_shared_are_units(seen: Seen) -> None:
    for (model, _), (now, as_one) in seen.found.items():
        assert now.units == (["", "model.embed_tokens", "lm_head"] if model == UNTIED else [""])
        assert now.num_units == NUM_LAYERS + (3 if model == UNTIED else 1)
        assert as_one.num_units == NUM_LAYERS + 1


@pytest.mark.parametrize(("model", "name"), CASES)
def test_losses_and_gradients_are_the_same_bit_by_bit(model: str, name: str, seen: Seen) -> None:
    now, as_one = seen.found[model, name]
    assert torch.equal(now.logprobs_N, as_one.logprobs_N)
    assert now.loss == as_one.loss
    assert now.gradients.keys() == as_one.gradients.keys()
    for key, gradient in now.gradients.items():
        assert torch.equal(gradient, as_one.gradients[key]), key


def test_less_stays_gathered_and_nothing_is_gathered_more_often(seen: Seen) -> None:
    now, as_one = seen.found[UNTIED, "plain"]
    norm, head = (now.gradients[name].nbytes for name in ("model.norm.weight", "lm_head.weight"))
    assert now.gathered == norm
    assert as_one.gathered == norm + 2 * head
    # Layers are gathered twice, once for each pass. Embedding, head and root are gathered once.
    assert now.num_gathers == (2 * NUM_LAYERS + 3 if seen.num_ranks > 1 else 0)
