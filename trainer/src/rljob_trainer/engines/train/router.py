"""How a mixture of experts distributes tokens across experts, and the auxiliary (load-balancing) loss that the model's
configuration may request.

Legend: L layers with experts, E experts of a layer, M tokens that the model reads, K experts of each token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.metrics import EXPERT_LOAD_MAX, EXPERT_LOAD_MEAN, EXPERTS_UNUSED, ROUTER_LOSS

EXPERTS = "experts"
"""The name in transformers of the module that has all experts of a layer."""
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the auxiliary loss's coefficient in configurations."""


@dataclass(frozen=True)
class AuxiliaryLoss:
    """The settings of the auxiliary loss in the model's configuration."""

    num_chosen: int
    """K, the number of experts per token."""
    coefficient: float
    """The factor of the auxiliary loss in the sum with the policy's loss."""


class RouterUse(NamedTuple):
    """How the routers distribute some tokens. All fields are sums, so the values of several parts of a batch can be
    added."""

    counts_LE: Tensor
    """float64: the number of tokens for which each expert is among the K most likely; without gradient."""
    probabilities_E: Tensor
    """The routers' probabilities, summed over layers and tokens, with gradient."""


def auxiliary_loss_settings(model: PreTrainedModel) -> AuxiliaryLoss | None:
    """The settings of the auxiliary loss that transformers would add for this model's configuration; None if it would
    add none. Raises ConfigurationError if the configuration requests the loss without its settings."""
    config = model.config.get_text_config()
    # Read as attributes, because some configurations use other names in their files.
    if not getattr(config, "output_router_logits", False):
        return None
    if "load_balancing_loss_func" not in vars(sys.modules[type(model).__module__]):
        return None
    coefficient = next((getattr(config, name) for name in COEFFICIENTS if hasattr(config, name)), None)
    num_chosen = getattr(config, "num_experts_per_tok", None)
    if coefficient is None or not num_chosen:
        raise ConfigurationError(
            "spec.training.model.source: config.json requests the routers' auxiliary loss (output_router_logits: true) "
            f"without its settings (num_experts_per_tok {num_chosen}, {COEFFICIENTS[0]} {coefficient}); set "
            "output_router_logits to false there"
        )
    return AuxiliaryLoss(int(num_chosen), float(coefficient)) if coefficient else None


def router_use(logits: Sequence[Tensor], tokens: slice | Tensor, num_chosen: int) -> RouterUse:
    """The router use of the tokens with these indices, from the router logits of each layer, [M, E]. All other tokens
    are filler tokens or padding."""
    counts, sums = [], []
    for logits_ME in logits:
        probabilities_ME = logits_ME[tokens].float().softmax(dim=-1)
        counts.append(counted(probabilities_ME.detach().topk(num_chosen, dim=-1).indices, logits_ME.shape[-1]))
        sums.append(probabilities_ME.sum(dim=0))
    return RouterUse(torch.stack(counts), torch.stack(sums).sum(dim=0))


def counted(chosen: Tensor, num_experts: int) -> Tensor:
    """[E] float64: how often each expert was chosen."""
    flat = chosen.flatten()
    # Not `bincount`, which makes the host wait for the device.
    counts_E = torch.zeros(num_experts, dtype=torch.float64, device=flat.device)
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))


def auxiliary_loss(use: RouterUse, whole_counts_LE: Tensor, num_chosen: int) -> Tensor:
    """The contribution of some tokens to the auxiliary loss of their mini-batch, 0-d. `use`: the router use of these
    tokens. `whole_counts_LE`: the counts of the whole mini-batch on all ranks.

    The loss is E sum_e f_e P_e, with f_e the fraction of tokens that expert e gets and P_e its mean probability, both
    over all tokens and layers. Source: Switch Transformers, Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6; for
    several experts per token, transformers' `load_balancing_loss_func`. transformers computes f for one forward pass.
    Here f is computed for the whole mini-batch, so that the loss does not depend on how rows are distributed."""
    # The number of tokens, counted once in each layer.
    num_tokens = (whole_counts_LE.sum() / num_chosen).clamp(min=1.0)
    fractions_E = whole_counts_LE.sum(dim=0) / num_tokens
    return len(fractions_E) * (fractions_E.to(use.probabilities_E.dtype) * use.probabilities_E).sum() / num_tokens


class ExpertLoad:
    """Counts the tokens that each expert of a model gets, from the arguments with which layers call the `experts`
    modules."""

    def __init__(self, model: nn.Module) -> None:
        """Registers hooks on the model's modules with the name `experts`. Registers none if one of them does not have
        its number of experts as `num_experts`."""
        found = [each for name, each in model.named_modules() if name.rpartition(".")[2] == EXPERTS]
        self._num_experts = [
            int(each.num_experts) for each in found if isinstance(getattr(each, "num_experts", None), int)
        ]
        self._chosen: list[Tensor] | None = None
        if len(self._num_experts) == len(found):
            for each in found:
                each.register_forward_pre_hook(self._collect, with_kwargs=True)

    @contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """Within this block, collects the chosen experts of each layer, [M, K] int64. Recomputation in the backward
        pass happens after the block and is not collected."""
        chosen: list[Tensor] = []
        self._chosen = chosen
        try:
            yield chosen
        finally:
            self._chosen = None

    def counts(self, chosen: Sequence[Tensor], tokens: slice | Tensor) -> Tensor | None:
        """[L, E] float64: the counts of the tokens with these indices. `chosen`: the result of `collected`. None if the
        hooks did not see the choice of every layer, or if layers have different numbers of experts."""
        if not chosen or len(chosen) != len(self._num_experts) or len(set(self._num_experts)) > 1:
            return None
        pairs = zip(chosen, self._num_experts, strict=True)
        return torch.stack([counted(each.flatten(0, -2)[tokens], num_experts) for each, num_experts in pairs])

    def _collect(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._chosen is None:
            return
        # The only tensor of integers among the arguments has the chosen experts.
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        self._chosen.extend(each for each in tensors if each.dtype is torch.int64)


class Routing:
    """Collects an engine's expert load in passes with gradient, and the auxiliary loss of its updates."""

    def __init__(self, loss_settings: AuxiliaryLoss | None, sum_over_all: Callable[[Tensor], Tensor]) -> None:
        """`sum_over_all`: collective; returns the sum of a tensor over all ranks."""
        self.loss_settings = loss_settings
        self.sum_over_all = sum_over_all
        self.counts_LE: Tensor | None = None
        """This rank's counts since the last `take`."""
        self.whole_counts_LE: Tensor | None = None
        """The counts of the current update's mini-batch on all ranks."""
        self.loss_sum: Tensor | None = None
        self.num_updates = 0

    def begin(self, passes: Iterable[RouterUse]) -> None:
        """Collective. Call it before an update with auxiliary loss. `passes`: the router use of each of this rank's
        micro-batches."""
        self.whole_counts_LE = self.sum_over_all(torch.stack([use.counts_LE for use in passes]).sum(dim=0))
        self.num_updates += 1

    def count(self, counts_LE: Tensor) -> None:
        """Adds the counts of a micro-batch."""
        self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE

    def loss(self, use: RouterUse) -> Tensor:
        """A micro-batch's part of the auxiliary loss, times the coefficient."""
        assert self.loss_settings is not None, "the model has no auxiliary loss"
        assert self.whole_counts_LE is not None, "call begin first"
        loss = auxiliary_loss(use, self.whole_counts_LE, self.loss_settings.num_chosen)
        value = loss.detach().double()
        self.loss_sum = value if self.loss_sum is None else self.loss_sum + value
        return self.loss_settings.coefficient * loss

    def take(self) -> dict[str, float]:
        """Collective. Metrics of the counts since the last `take`, which include prompt tokens, and the mean auxiliary
        loss of the updates. Either all ranks must have counts, or none."""
        metrics: dict[str, float] = {}
        if self.counts_LE is not None:
            counts_LE = self.sum_over_all(self.counts_LE)
            loads_L = counts_LE.amax(dim=1) / counts_LE.mean(dim=1).clamp(min=1e-9)
            metrics[EXPERT_LOAD_MEAN] = float(loads_L.mean())
            metrics[EXPERT_LOAD_MAX] = float(loads_L.max())
            metrics[EXPERTS_UNUSED] = float((counts_LE == 0).double().mean())
        if self.loss_sum is not None:
            metrics[ROUTER_LOSS] = float(self.sum_over_all(self.loss_sum)) / max(1, self.num_updates)
        self.counts_LE, self.loss_sum, self.num_updates = None, None, 0
        return metrics
