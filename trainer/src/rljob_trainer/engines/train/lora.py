"""Low-rank adapters (LoRA, arXiv 2106.09685) in a sharded model: peft's layers around chosen linear layers.

An adapted layer computes x W + s (x A) B, where W is frozen, s is alpha / rank, and B begins as zeros: before the first
update the adapters change nothing. In the model in memory, peft adds `base_layer` to the names of W, and the adapter's
name to the names of A and B. In files and messages, W has the same name as without adapters, and A and B have the names
of peft's files.

Legend: O outputs, I inputs of a linear layer, R rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_trainer.engines.train.model import transformer_layers, window_of
from rljob_trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

BASE = ".base_layer."
"""In memory, a part of the name of a frozen weight W."""
ADAPTER = "default"
"""The name that peft gives to the only adapter of a model."""
FIRST, SECOND = ".lora_A.", ".lora_B."
"""Parts of the names of A and B, in memory and in files."""
FILE_PREFIX = "base_model.model."
"""The prefix of names in peft's files."""
TARGETS_FIELD = "spec.training.model.lora.targets"


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of a model's adapters."""

    lora: Lora
    seed: int
    """From this seed the matrices A are initialized randomly."""

    @property
    def scaling(self) -> float:
        """The factor s: alpha / rank."""
        return self.lora.alpha / self.lora.rank

    @property
    def are_sent_separately(self) -> bool:
        """True if the rollout engine gets only the adapters, False if it gets weights with merged adapters."""
        return self.lora.sync is LoraSync.ADAPTER


@dataclass(frozen=True)
class AdapterPair:
    """The two sharded matrices (A and B) of a weight's adapter, with their names in peft's files."""

    first_name: str
    first: Tensor
    second_name: str
    second: Tensor


def linear_layers(language_model: nn.Module) -> list[str]:
    """The names of all linear layers within the decoder's layers, without the output head and fused experts."""
    blocks = {id(block) for block in transformer_layers(language_model)}
    prefixes = tuple(f"{name}." for name, module in language_model.named_modules() if id(module) in blocks)
    return [
        name
        for name, module in language_model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(prefixes) and _gives_a_product(module)
    ]


def target_layers(language_model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """The names of the linear layers that get adapters. `targets`: endings of their names; None: all linear layers.

    Raises ConfigurationError if a target is not a linear layer, or if the model has no linear layers."""
    names = linear_layers(language_model)
    endings = sorted({name.rpartition(".")[2] for name in names})
    if not names:
        raise ConfigurationError(
            "spec.training.model.lora: the layers of this model have no linear layers that adapters could be added "
            "to; choose another model, or train without lora"
        )
    if targets is None:
        return names
    for target in targets:
        if not any(_is_target(name, target) for name in names):
            raise ConfigurationError(
                f"{TARGETS_FIELD}: no linear layer of the decoder's layers is called {target!r}; name some of "
                f"{', '.join(endings)}, or leave targets out for all of them"
            )
    return [name for name in names if any(_is_target(name, target) for target in targets)]


def target_endings(language_model: nn.Module, targets: Sequence[str] | None) -> tuple[str, ...]:
    """The last parts of the names of `target_layers`, such as `q_proj`."""
    return tuple(sorted({name.rpartition(".")[2] for name in target_layers(language_model, targets)}))


def add_adapters(language_model: nn.Module, lora: Lora) -> None:
    """Adds adapters to the target layers of a model on the meta device, and freezes all other parameters. The adapters
    are on the meta device, too."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    config = LoraConfig(r=lora.rank, lora_dropout=lora.dropout, bias="none")
    # Not peft's `inject_adapter_in_model`: for models with experts (peft 0.21.2) it treats `gate_proj` and others,
    # which dense layers and shared experts also have, as parameters of fused experts.
    with torch.device("meta"):
        for name in target_layers(language_model, lora.targets):
            parent, _, child = name.rpartition(".")
            alpha: int = lora.alpha  # type: ignore[assignment]  # peft only calculates with it
            layer = Linear(language_model.get_submodule(name), ADAPTER, config, r=lora.rank, lora_alpha=alpha)
            setattr(language_model.get_submodule(parent), child, layer)
    for name, parameter in language_model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


@torch.no_grad()
def draw_adapters(named: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Initializes this rank's shards of all adapters. `named`: tensors by their names in memory; those that are not
    part of adapters are ignored.

    Each A is generated whole, from the seed and its name (Kaiming uniform, as in peft), so that it does not depend on
    the number of ranks or the order of layers. B is zero."""
    for name, tensor in named:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if SECOND in name:
            local.zero_()
        elif FIRST in name:
            digest = hashlib.sha256(f"{seed} {file_name(name)}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            whole = torch.empty(tensor.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            local.copy_(whole[window_of(tensor)])


def is_adapter(name: str) -> bool:
    """Whether a tensor of the model in memory is part of an adapter."""
    return FIRST in name or SECOND in name


def base_name(name: str) -> str:
    """Converts the name of a tensor in memory to its name in a model without adapters."""
    return name.replace(BASE, ".")


def file_name(name: str) -> str:
    """Converts the name of an adapter's tensor in memory to its name in peft's files."""
    return FILE_PREFIX + name.replace(f".{ADAPTER}.", ".")


def base_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All tensors that are not part of adapters, under their names without adapters."""
    return ((base_name(name), tensor) for name, tensor in named if not is_adapter(name))


def adapter_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The adapters, under the names of peft's files."""
    return ((file_name(name), tensor) for name, tensor in named if is_adapter(name))


def adapter_pairs(adapters: Iterable[tuple[str, Tensor]]) -> dict[str, AdapterPair]:
    """The pair of each adapted weight, by the weight's name. `adapters` is the result of `adapter_tensors`."""
    tensors = dict(adapters)
    pairs = {}
    for name, first in tensors.items():
        if FIRST in name:
            second = name.replace(FIRST, SECOND)
            weight = name.removeprefix(FILE_PREFIX).replace(FIRST, ".")
            pairs[weight] = AdapterPair(name, first, second, tensors[second])
    return pairs


@dataclass
class MergeError:
    """What rounding to 16 bits loses of adapters when they are merged into weights."""

    lost: Tensor | float = 0.0
    """Sum of the squares of rounding errors over all merged weights."""
    wanted: Tensor | float = 0.0
    """Sum of the squares of s (second @ first)."""

    def add(self, rounded: Tensor, merged: Tensor, base: Tensor) -> None:
        """Adds a weight: after rounding, before it (in float32), and without its adapter."""
        # One float32 copy of the weight at a time.
        self.lost = self.lost + torch.linalg.vector_norm(rounded - merged).square()
        self.wanted = self.wanted + torch.linalg.vector_norm(merged - base).square()

    def fraction(self) -> float:
        """The norm of all rounding errors divided by that of what the adapters add: 0 if nothing is lost, 1 if no
        weight changes. 0 before the first update, when the adapters add nothing."""
        wanted = float(self.wanted)
        return math.sqrt(float(self.lost) / wanted) if wanted > 0 else 0.0


def merged_weight(
    weight_OI: Tensor, first_RI: Tensor, second_OR: Tensor, scaling: float, error: MergeError | None = None
) -> Tensor:
    """W + s (second @ first) as a new tensor in the dtype of the weight, computed in float32. Adds to `error` what
    this dtype loses."""
    merged_OI = torch.addmm(weight_OI.float(), second_OR.float(), first_RI.float(), alpha=scaling)
    rounded_OI = merged_OI.to(weight_OI.dtype)
    if error is not None:
        error.add(rounded_OI, merged_OI, weight_OI)
    return rounded_OI


@contextmanager
def adapters_in_inference(layers: Sequence[LoraLayer], *, with_adapters: bool) -> Iterator[None]:
    """Within this block the adapters of these layers have no dropout. If `with_adapters` is False, they have no effect:
    the layers compute only x W."""
    dropouts = [each for layer in layers for each in layer.lora_dropout.values() if each.training]
    for dropout in dropouts:
        dropout.eval()
    for layer in layers:
        # Not peft's `enable_adapters`: it freezes parameters, which FSDP2 would adopt permanently.
        layer._disable_adapters = not with_adapters
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.train()
        for layer in layers:
            layer._disable_adapters = False


def lora_layers(language_model: PreTrainedModel) -> list[LoraLayer]:
    """The layers that have adapters."""
    from peft.tuners.lora import LoraLayer

    return [module for module in language_model.modules() if isinstance(module, LoraLayer)]


def _gives_a_product(linear: nn.Linear) -> bool:
    """Whether the module returns the product with its weight, as `nn.Linear` does; tried on the meta device. The
    routers of some models are subclasses of `nn.Linear` that return the chosen experts instead."""
    if type(linear).forward is nn.Linear.forward:
        return True
    weight = linear.weight
    try:
        with torch.device("meta"):
            found = linear(torch.empty((2, weight.shape[1]), dtype=weight.dtype))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, Tensor) and found.shape == (2, weight.shape[0])


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
