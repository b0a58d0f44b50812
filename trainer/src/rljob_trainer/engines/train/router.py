"""How a mixture of experts deals out tokens, and the auxiliary loss that its configuration may ask for.

Legend: L layers with experts, E experts of each, N tokens that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rljob_trainer.observability.metrics import EXPERT_LOAD_MAX, EXPERT_LOAD_MEAN, EXPERTS_UNUSED, ROUTER_LOSS


@dataclass(frozen=True)
class RouterPlan:
    """What the configuration says of a model's routers."""

    num_chosen: int
    """Experts that each token is given to."""
    loss_coefficient: float
    """Of the auxiliary loss; 0 for none."""


@dataclass(frozen=True)
class RouterUse:
    """Of some tokens. Sums, so that those of parts add up."""

    counts_LE: Tensor
    """float64: tokens that were given to each expert; no gradient."""
    probabilities_E: Tensor
    """The routers' probabilities, over layers and tokens; they carry the gradient."""

    def __add__(self, other: RouterUse) -> RouterUse:
        return RouterUse(self.counts_LE + other.counts_LE, self.probabilities_E + other.probabilities_E)

    def detached(self) -> RouterUse:
        """Without gradient."""
        return RouterUse(self.counts_LE, self.probabilities_E.detach().double())


def router_plan(config: PreTrainedConfig) -> RouterPlan | None:
    """None for a model without routers, or with such as give no logits (`output_router_logits`)."""
    text = config.get_text_config().to_dict()
    if "output_router_logits" not in text or not text.get("num_experts_per_tok"):
        return None
    coefficient = float(text.get("router_aux_loss_coef") or 0.0)
    return RouterPlan(int(text["num_experts_per_tok"]), coefficient if text["output_router_logits"] else 0.0)


def router_use(logits: Sequence[Tensor], tokens: slice | Tensor, plan: RouterPlan) -> RouterUse:
    """Of the logits of each layer, those of these tokens: the rest is filled up. With a gradient only where the
    auxiliary loss is wanted."""
    counts, sums = [], []
    with torch.set_grad_enabled(torch.is_grad_enabled() and plan.loss_coefficient > 0):
        for logits_NE in logits:
            probabilities_NE = logits_NE[tokens].float().softmax(dim=-1)
            chosen = probabilities_NE.detach().topk(plan.num_chosen, dim=-1).indices
            counts.append(torch.bincount(chosen.flatten(), minlength=logits_NE.shape[-1]))
            sums.append(probabilities_NE.sum(dim=0))
        return RouterUse(torch.stack(counts).double(), torch.stack(sums).sum(dim=0))


def auxiliary_loss(use: RouterUse, whole_counts_LE: Tensor, plan: RouterPlan) -> Tensor:
    """The part of some tokens in the loss of a mini-batch, 0-d; `whole_counts_LE` are those of all of it, on all ranks.

    E sum_e f_e P_e, with f_e the share of a layer's tokens that are given to expert e and P_e its mean probability,
    both over all tokens and layers (Switch Transformers, Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6, for
    several experts per token as transformers' `load_balancing_loss_func` has it). There f is that of a forward pass;
    here of the whole mini-batch, so that the loss does not depend on how rows are dealt out."""
    num_places = (whole_counts_LE.sum() / plan.num_chosen).clamp(min=1.0)
    shares_E = whole_counts_LE.sum(dim=0) / num_places
    return len(shares_E) * (shares_E.to(use.probabilities_E.dtype) * use.probabilities_E).sum() / num_places


class Routing:
    """Of one engine: what its passes with a gradient have dealt out, and the auxiliary loss of an update."""

    def __init__(self, plan: RouterPlan, sum_over_all: Callable[[Tensor], Tensor]) -> None:
        """`sum_over_all` adds up over all ranks; collective."""
        self.plan = plan
        self.sum_over_all = sum_over_all
        self.whole_counts_LE: Tensor | None = None
        self.seen: RouterUse | None = None

    def begin(self, passes: Iterable[RouterUse]) -> None:
        """Collective. Before an update whose auxiliary loss is wanted: one use for each micro-batch."""
        counts = [use.counts_LE for use in passes]
        self.whole_counts_LE = self.sum_over_all(torch.stack(counts).sum(dim=0))

    def loss(self, use: RouterUse) -> Tensor:
        """A micro-batch's part in the auxiliary loss, times its coefficient; 0 where there is none. Counts the use."""
        self.seen = use.detached() if self.seen is None else self.seen + use.detached()
        if not self.plan.loss_coefficient:
            return use.counts_LE.new_zeros(())
        assert self.whole_counts_LE is not None, "begin first"
        return self.plan.loss_coefficient * auxiliary_loss(use, self.whole_counts_LE, self.plan)

    def take(self) -> dict[str, float]:
        """Collective. Metrics of what was counted since the last call, prompts' tokens included; either all ranks have
        counted something or none has."""
        use, self.seen = self.seen, None
        if use is None:
            return {}
        whole = RouterUse(self.sum_over_all(use.counts_LE), self.sum_over_all(use.probabilities_E))
        loads_L = whole.counts_LE.amax(dim=1) / whole.counts_LE.mean(dim=1).clamp(min=1e-9)
        return {
            EXPERT_LOAD_MEAN: float(loads_L.mean()),
            EXPERT_LOAD_MAX: float(loads_L.max()),
            EXPERTS_UNUSED: float((whole.counts_LE == 0).double().mean()),
            ROUTER_LOSS: float(auxiliary_loss(whole, whole.counts_LE, self.plan)),
        }
