"""The loss of a causal language model without all of its logits at once: in chunks, or with the head's gradient summed
in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def chunked_loss(model: Any, tokens: torch.Tensor, chunks: int = 8) -> torch.Tensor:
    """Mean next-token cross-entropy of `tokens` ``(batch, seq)`` without ever holding all logits.

    The shifted hidden states ``(batch * (seq - 1), width)`` are cut into `chunks`; each goes through
    head -> float32 -> cross-entropy inside its own checkpoint, so that one chunk of logits is alive at a time.
    """
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    head = model.get_output_embeddings()

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(h).float(), y, reduction="sum")

    h, y = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    parts = [
        checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False)
        for pair in zip(h.chunk(chunks), y.chunk(chunks), strict=True)
    ]
    return torch.stack(parts).sum() / y.numel()


class _Head(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.T``: both gradients are made in the forward pass, chunk by chunk, and the
    weight's is one tensor that every chunk adds to. (The idea is that of Liger-Kernel's fused linear cross-entropy.)"""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int, scale: float
    ) -> torch.Tensor:
        count, total = targets.numel(), torch.zeros((), dtype=torch.float32, device=hidden.device)
        for_hidden, for_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        most, rest, room = _aligned(weight)
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), for_hidden.chunk(chunks), strict=True)
        for h, y, out in parts:
            logits = h.new_empty(len(h), room)[:, : len(weight)]
            torch.mm(h, weight[most].T, out=logits[:, most])
            logits[:, rest] = h @ weight[rest].T
            scores = torch.log_softmax(logits.float(), dim=1)
            place = y.unsqueeze(1)
            total -= scores.gather(1, place).sum()
            scores.exp_()  # softmax: less 1 at the target it is the gradient of the logits
            scores.scatter_add_(1, place, torch.full_like(place, -1, dtype=scores.dtype))
            slope = logits.copy_(scores.mul_(scale / count))
            del scores, logits
            torch.mm(slope[:, rest], weight[rest], out=out)
            out.addmm_(slope[:, most], weight[most])
            for_weight[most].addmm_(slope[:, most].T, h)
            for_weight[rest].addmm_(slope[:, rest].T, h)
            del slope  # else it would live through the next chunk
        ctx.for_hidden, ctx.for_weight, ctx.scale = for_hidden, for_weight, scale
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:  # type: ignore[override]
        for_hidden, for_weight, factor = ctx.for_hidden, ctx.for_weight, grad / ctx.scale
        del ctx.for_hidden, ctx.for_weight
        return for_hidden.mul_(factor), for_weight.mul_(factor), None, None, None


def _aligned(weight: torch.Tensor) -> tuple[slice, slice, int]:
    """The rows of a head's weight in two parts, the first a multiple of 8 long, and the length that rows of logits get
    in memory. GPT-2 has 50257 tokens: where a row of logits does not begin on a multiple of 16 bytes, cuBLAS takes
    kernels that are two to three times slower."""
    tokens = len(weight)
    return slice(0, tokens // 8 * 8), slice(tokens // 8 * 8, tokens), -(-tokens // 8) * 8


def loss_in_place(model: Any, tokens: torch.Tensor, chunks: int = 16, scale: float = 1.0) -> torch.Tensor:
    """What `chunked_loss` computes, with the head's gradient summed in place: autograd's own sum over chunks holds
    three tensors of its size at a time. Nothing is computed twice. Not under autocast, and not twice through a graph.

    `scale` is the factor that the loss is multiplied by before backward, where the weights have fp16: gradients are
    made here, before it comes, and those of single logits are too small for fp16 without it.
    """
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    head = model.get_output_embeddings()
    found: torch.Tensor = _Head.apply(hidden[:, :-1].flatten(0, 1), head.weight, tokens[:, 1:].flatten(), chunks, scale)
    return found
