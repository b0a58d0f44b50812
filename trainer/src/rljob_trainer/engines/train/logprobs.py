"""Log-probabilities of given tokens, and the policy's entropy, from logits.

Shapes: B sequences, T tokens, V vocabulary; N = B * T; C the tokens of one chunk.

The logits themselves are the largest tensor of a training step. PyTorch's own log_softmax keeps a second one, in 32
bits, for the backward pass. Here the forward pass keeps three numbers per token (largest logit, log of the normalizer,
entropy) and the backward pass works the softmax out again, chunk by chunk, straight into the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_BYTES = 64 * 1024 * 1024
"""Size of one [C, V] work buffer; a handful are alive at the same time."""


def token_logprobs_and_entropy(
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    differentiable_entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `tokens_BT`, and the entropy of that softmax in nats, each [B, T].

    Computed in float32 (float64 for float64 logits) whatever the dtype of the logits; the gradient has the dtype of
    the logits. Entropy is None unless asked for, and carries a gradient only with `differentiable_entropy`.
    A logit of -inf is a forbidden token: probability 0, no part in the entropy, gradient 0.
    """
    num_vocabulary = logits_BTV.shape[-1]
    chunk_tokens = max(1, chunk_bytes // (4 * num_vocabulary))
    logits_NV = logits_BTV.reshape(-1, num_vocabulary)
    needs_entropy = with_entropy or differentiable_entropy
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_NV, tokens_BT.reshape(-1), temperature, needs_entropy, chunk_tokens
    )
    logprobs_BT = logprobs_N.reshape(tokens_BT.shape)
    if not needs_entropy:
        return logprobs_BT, None
    entropy_BT = entropy_N.reshape(tokens_BT.shape)
    return logprobs_BT, entropy_BT if differentiable_entropy else entropy_BT.detach()


class _ChunkedLogprobs(torch.autograd.Function):
    """For p = softmax(z), z = logits / temperature:

    d logprob(y) / dz = onehot(y) - p, and d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_NV: Tensor, tokens_N: Tensor, temperature: float, needs_entropy: bool, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        largest_N = logits_NV.new_empty(len(tokens_N), dtype=dtype)
        log_normalizer_N = torch.empty_like(largest_N)
        logprobs_N = torch.empty_like(log_normalizer_N)
        entropy_N = torch.zeros_like(log_normalizer_N)
        for start in range(0, len(tokens_N), chunk):
            part = slice(start, start + chunk)
            scaled_CV = logits_NV[part].to(dtype) / temperature
            largest_N[part] = scaled_CV.amax(dim=1)
            # Near 0 the small difference of two logits keeps all its digits.
            scaled_CV.sub_(largest_N[part, None])
            log_normalizer_N[part] = scaled_CV.logsumexp(dim=1)
            chosen_C = scaled_CV.gather(1, tokens_N[part, None]).squeeze(1)
            logprobs_N[part] = chosen_C - log_normalizer_N[part]
            if needs_entropy:
                probabilities_CV = scaled_CV.sub_(log_normalizer_N[part, None]).exp_()
                entropy_N[part] = torch.special.entr(probabilities_CV).sum(dim=1)
        ctx.save_for_backward(logits_NV, tokens_N, largest_N, log_normalizer_N, entropy_N)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.chunk = chunk  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, gradient_N: Tensor | None, entropy_gradient_N: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        logits_NV, tokens_N, largest_N, log_normalizer_N, entropy_N = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        chunk: int = ctx.chunk  # type: ignore[attr-defined]
        logits_gradient_NV = torch.empty_like(logits_NV)
        for start in range(0, len(tokens_N), chunk):
            part = slice(start, start + chunk)
            scaled_CV = logits_NV[part].to(log_normalizer_N.dtype) / temperature
            probabilities_CV = scaled_CV.sub_(largest_N[part, None]).sub_(log_normalizer_N[part, None]).exp_()
            result_CV = torch.zeros_like(probabilities_CV)
            if entropy_gradient_N is not None:
                entropy_part_CV = torch.special.entr(probabilities_CV).addcmul_(
                    probabilities_CV, entropy_N[part, None], value=-1.0
                )
                result_CV.addcmul_(entropy_part_CV, entropy_gradient_N[part, None])
            if gradient_N is not None:
                result_CV.addcmul_(probabilities_CV, gradient_N[part, None], value=-1.0)
                result_CV.scatter_add_(1, tokens_N[part, None], gradient_N[part, None])
            logits_gradient_NV[part] = result_CV.div_(temperature)
        return logits_gradient_NV, None, None, None, None
