"""Log-probabilities of tokens straight from hidden states and the output matrix, without a table of tokens x
vocabulary.

A vocabulary of 150,000 makes that table the largest tensor of training: 8,192 tokens are 5 GB, several times over. Here
it exists for a few hundred tokens at a time, in forward and again in backward, which recomputes it; what is kept for
backward is one number per token. Small tables are not worth the second product: `linear_logprobs` takes the plain path.
On a GPU, kernels read the table once in its own 16 bits (`logprob_kernels.py`), and a table that fits is kept. Where
the output matrix does not learn, as beside an adapter, forward computes the slopes of the hidden states from the table
that it has, and backward computes no table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyrl.algorithms.logprobs import (
    change_of_scores,
    compiled,
    entropy,
    logprobs_alone,
    logprobs_and_entropy,
    statistics,
    token_logprobs,
)
from skyrl.algorithms.shapes import expect_same_shape

PLAIN_UP_TO = 2**26
"""Largest number of logits for the plain path: 268 MB in float32, about 440 tokens at a vocabulary of 150,000. The
limit may be higher on a GPU."""

LOGITS_AT_A_TIME = 2**25
"""Largest number of logits of a chunk of tokens, in forward and in backward, on a CPU; lower bound of it on a GPU."""

LOGITS_OF_A_CORE = 2**17
"""Number of logits that a CPU's core works on together: 512 KB in float32, which its cache holds."""

SHARE_OF_A_GPU = 64
"""A chunk's logits in float32 take at most 1 / `SHARE_OF_A_GPU` of a GPU's memory; a few such tables exist at once."""


KEPT_SHARE_OF_A_GPU = 16
"""A table of logits is kept for backward if it takes at most 1 / `KEPT_SHARE_OF_A_GPU` of a GPU's memory."""


def logits_at_a_time(device: torch.device) -> int:
    """Largest number of logits of a chunk, a power of two: 2^28 on a GPU of 80 GB, which is 1,766 tokens at a
    vocabulary of 152,000. Small chunks leave a GPU idle; on a CPU larger ones are no faster.
    """
    if device.type != "cuda":
        return LOGITS_AT_A_TIME
    logits = torch.cuda.get_device_properties(device).total_memory // (4 * SHARE_OF_A_GPU)
    return max(LOGITS_AT_A_TIME, 1 << (logits.bit_length() - 1))


def _fits_plainly(logits: int, device: torch.device) -> bool:
    """Whether the table of all logits is small enough to be kept for backward."""
    return logits <= (max(PLAIN_UP_TO, logits_at_a_time(device)) if device.type == "cuda" else PLAIN_UP_TO)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
    compile_it: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature) at the targets, and, with `with_entropy`, the entropy of each
    distribution, in nats.

    Shapes: `hidden` (N, H) and `weight` (V, H), of one type, `targets` (N,) int64; both results (N,) float32. Softmax
    is computed in float32 whatever the type. The entropy has a gradient only with `entropy_gradient`. `compile_it`
    runs what follows the product through `torch.compile` where there are no kernels for it. Raises ValueError unless
    `targets` has one entry per row of `hidden`.

    The rows of `weight` may be distributed over ranks that have the same other arguments. No rank then has the logits
    of the whole vocabulary, and all ranks get the results (Megatron-LM's vocabulary-parallel cross entropy,
    arXiv:1909.08053).
    """
    expect_same_shape(hidden=hidden[:, 0], targets=targets)
    own, part = VocabularyPart.split(weight)
    if part.group is None and has_kernels(hidden.device):
        fused: Any = _FusedLogprobs.apply
        logprobs, spread = fused(hidden, weight, targets, temperature, entropy_gradient)
    elif part.group is not None or not _fits_plainly(len(hidden) * len(weight), hidden.device):
        apply: Any = _LinearLogprobs.apply
        alone = not (with_entropy and entropy_gradient)
        logprobs, spread = apply(hidden, own, targets, temperature, with_entropy, part, compile_it, alone)
    else:
        return logprobs_of_logits(
            torch.nn.functional.linear(hidden, weight),
            targets,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            compile_it=compile_it,
        )
    if not with_entropy:
        return logprobs, None
    return logprobs, spread if entropy_gradient else spread.detach()


def logprobs_of_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool = False,
    compile_it: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (N,) at the targets, and entropies (N,) with `with_entropy`, from a table of logits (N, V)."""
    if compile_it and not with_entropy and logits.requires_grad:
        return compiled(logprobs_alone)(logits, targets, temperature), None
    if compile_it and with_entropy:
        logprobs, spread = compiled(logprobs_and_entropy)(logits, targets, temperature)
        return logprobs, spread if entropy_gradient else spread.detach()
    logprobs = token_logprobs(logits, targets, temperature=temperature)
    if not with_entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logprobs, entropy(logits, temperature=temperature)


@torch.no_grad()
def collision_entropy(hidden: Tensor, weight: Tensor, *, temperature: float) -> Tensor:
    """-log sum_v p_v^2 of each distribution p = softmax(hidden weight^T / temperature), (N,) float32 in nats, without
    gradient: Renyi's entropy of order 2. Shapes and ranks are those of `linear_logprobs`.
    """
    own, part = VocabularyPart.split(weight)
    entropies = torch.empty(len(hidden), device=hidden.device)
    for rows in token_chunks(hidden, part.largest or len(weight)):
        entropies[rows] = _collision_entropy(scores_of(hidden[rows], own, temperature), part)
    return entropies


@torch.no_grad()
def collision_entropy_of_logits(logits: Tensor, *, temperature: float) -> Tensor:
    """The same from a table of logits (N, V)."""
    return _collision_entropy(logits.float() / temperature, VocabularyPart())


def _collision_entropy(scores: Tensor, part: VocabularyPart) -> Tensor:
    """(C,) from scores (C, tokens of this rank), which are overwritten."""
    weights = scores.sub_(part.reduce(scores.amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)).exp_()
    total, squares = part.reduce(torch.stack([weights.sum(-1), weights.square().sum(-1)]))
    entropies: Tensor = 2 * total.log() - squares.log()
    return entropies


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of `logprob_kernels.py` run on this device: CUDA with Triton, which torch brings along."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class _FusedLogprobs(torch.autograd.Function):
    """Computes what `_LinearLogprobs` computes, by kernels that read logits once and write their gradient over them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        from skyrl.algorithms.logprob_kernels import overwrite_with_gradient, statistics

        needed = ctx.needs_input_grad
        learns, slopes = any(needed[:2]), _slopes(needed, hidden, logprobs_alone=not entropy_gradient)
        fits = len(hidden) * len(weight) * hidden.itemsize <= kept_bytes(hidden.device)
        kept = fits and learns and slopes is None
        logprobs, spread, norms = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        ctx.logits = []
        ctx.chunks = [slice(0, len(hidden))] if kept else token_chunks(hidden, len(weight))
        for rows in ctx.chunks:
            logits = hidden[rows] @ weight.T
            logprobs[rows], spread[rows], norms[rows] = statistics(logits, targets[rows], temperature)
            if kept:
                ctx.logits.append(logits)
            if slopes is not None:
                ones = torch.ones_like(norms[rows])
                overwrite_with_gradient(logits, targets[rows], norms[rows], spread[rows], ones, None, temperature)
                slopes[rows] = logits @ weight
        ctx.has_slopes = slopes is not None
        ctx.save_for_backward(*((hidden, weight, targets, norms, spread) if slopes is None else (slopes,)))
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from skyrl.algorithms.logprob_kernels import overwrite_with_gradient

        if ctx.has_slopes:
            return _along_slopes(ctx.saved_tensors[0], gradients[0]), *[None] * 4
        hidden, weight, targets, norms, spread = (saved.detach() for saved in ctx.saved_tensors)
        of_logprobs, of_entropy = gradients
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight: Tensor | None = None
        for rows in ctx.chunks:
            change = ctx.logits.pop() if ctx.logits else hidden[rows] @ weight.T
            overwrite_with_gradient(
                change,
                targets[rows],
                norms[rows],
                spread[rows],
                None if of_logprobs is None else of_logprobs[rows],
                None if of_entropy is None else of_entropy[rows],
                ctx.temperature,
            )
            if for_hidden is not None:
                for_hidden[rows] = change @ weight
            if ctx.needs_input_grad[1]:
                product = change.T @ hidden[rows]
                if for_weight is None:
                    for_weight = product if len(ctx.chunks) == 1 else product.float()  # chunks are summed in float32
                else:
                    for_weight.add_(product)
            del change
        return for_hidden, None if for_weight is None else for_weight.to(weight.dtype), *[None] * 3


def _slopes(needed: Sequence[bool], hidden: Tensor, *, logprobs_alone: bool) -> Tensor | None:
    """(N, H) for d log p_y / d hidden of each token, if that is all that backward needs: only hidden states learn, from
    log-probabilities alone. None otherwise.
    """
    of_hidden, of_weight = needed[:2]
    return torch.empty_like(hidden) if logprobs_alone and of_hidden and not of_weight else None


def _along_slopes(slopes: Tensor, of_logprobs: Tensor | None) -> Tensor | None:
    """(N, H): gradient of the hidden states, given that of the log-probabilities."""
    return None if of_logprobs is None else (slopes * of_logprobs.unsqueeze(-1)).to(slopes.dtype)


def kept_bytes(device: torch.device) -> int:
    """Largest table of logits, in bytes, that stays in memory until backward, which then need not compute it again."""
    if device.type != "cuda":
        return PLAIN_UP_TO
    return torch.cuda.get_device_properties(device).total_memory // KEPT_SHARE_OF_A_GPU


@frozen(kw_only=True, eq=False)
class VocabularyPart:
    """The tokens whose rows of the output matrix this rank has: all of them, or a part that begins at `first`."""

    first: int = 0

    group: dist.ProcessGroup | None = None
    """The ranks that have the other tokens."""

    largest: int | None = None
    """Tokens of the largest part, from which all ranks compute the same chunk size. None: this part is the only one."""

    @classmethod
    def of(cls, weight: DTensor) -> Self:
        """The part of a matrix (V, H) with rows distributed over a mesh of one dimension, as `torch.chunk` does."""
        group = weight.device_mesh.get_group()
        largest = -(-weight.shape[0] // group.size())
        return cls(first=group.rank() * largest, group=group, largest=largest)

    @classmethod
    def split(cls, weight: Tensor) -> tuple[Tensor, Self]:
        """The rows of a matrix (V, H) that this rank has, and which part they are."""
        return (weight.to_local(), cls.of(weight)) if isinstance(weight, DTensor) else (weight, cls())

    def chosen(self, scores: Tensor, targets: Tensor) -> Tensor:
        """(C,) or (C, K): scores (C, tokens of this rank) at the targets, 0 where another rank has the target."""
        index, is_here = self._local_indices(targets, scores.shape[1])
        target_scores = scores.gather(-1, index if index.dim() == 2 else index.unsqueeze(-1))
        return (target_scores if index.dim() == 2 else target_scores.squeeze(-1)) * is_here

    def add_at(self, scores: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values (C,) or (C, K) to scores at the targets that this rank has."""
        index, is_here = self._local_indices(targets, scores.shape[1])
        added = values * is_here
        scores.scatter_add_(-1, *((index, added) if index.dim() == 2 else (index.unsqueeze(-1), added.unsqueeze(-1))))

    def gather(self, value: Tensor) -> Tensor:
        """(C, K) of each rank -> (C, K x ranks)."""
        if self.group is None:
            return value
        every = [torch.empty_like(value) for _ in range(self.group.size())]
        dist.all_gather(every, value.contiguous(), group=self.group)
        return torch.cat(every, dim=-1)

    def reduce(self, value: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce the value in place over all ranks of the group."""
        if self.group is not None and value.numel():
            dist.all_reduce(value, by, group=self.group)
        return value

    def _local_indices(self, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        index = targets - self.first
        return index.clamp(0, tokens - 1), (index >= 0) & (index < tokens)


class _LinearLogprobs(torch.autograd.Function):
    """With z = h W^T / T and p = softmax(z): log p_y = z_y - lse(z), and H = lse(z) - sum p z."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        part: VocabularyPart,
        compile_it: bool,
        logprobs_alone: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, spread, norms = (torch.zeros(len(hidden), device=hidden.device) for _ in range(3))
        slopes = _slopes(ctx.needs_input_grad, hidden, logprobs_alone=logprobs_alone)
        compile_it = compile_it and part.group is None
        for rows in token_chunks(hidden, part.largest or len(weight)):
            scores = scores_of(hidden[rows], weight, temperature)
            if compile_it and slopes is None:
                logprobs[rows], spread[rows], norms[rows] = compiled(statistics)(scores, targets[rows])
                continue
            highest = part.reduce(scores.amax(-1), dist.ReduceOp.MAX)
            sums = torch.empty(3 if with_entropy else 2, len(scores), device=scores.device)
            for few in cache_blocks(scores):
                relative = scores[few].sub_(highest[few].unsqueeze(-1))
                weights = relative.exp()
                sums[0, few], sums[1, few] = part.chosen(relative, targets[rows][few]), weights.sum(-1)
                if with_entropy:  # `bmm` would be off by 1e-3 at a vocabulary of 152,000
                    sums[2, few] = relative.mul_(weights).sum(-1)
                if slopes is not None:
                    relative.copy_(weights)
            chosen, total, *weighted = part.reduce(sums)
            norms[rows] = highest + total.log()
            logprobs[rows] = chosen - total.log()
            if with_entropy:
                spread[rows] = total.log() - weighted[0] / total
            if slopes is not None:  # (1_y - p) W / T
                change = scores.div_(-total.unsqueeze(-1))
                part.add_at(change, targets[rows], torch.ones_like(total))
                slopes[rows] = part.reduce(change.div_(temperature).to(hidden.dtype) @ weight)
            del scores
        ctx.has_slopes = slopes is not None
        ctx.save_for_backward(*((hidden, weight, targets, norms, spread) if slopes is None else (slopes,)))
        ctx.temperature, ctx.part, ctx.compile_it = temperature, part, compile_it
        ctx.set_materialize_grads(False)
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p_y / dz = 1_y - p and dH / dz = -p (log p + H), summed over chunks into dW."""
        if ctx.has_slopes:
            return _along_slopes(ctx.saved_tensors[0], gradients[0]), *[None] * 7
        hidden, weight, targets, norms, spread = (saved.detach() for saved in ctx.saved_tensors)
        of_logprobs, of_entropy = gradients
        needs_hidden_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        for_hidden = torch.empty_like(hidden) if needs_hidden_grad else None
        for_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight_grad else None
        for rows in token_chunks(hidden, ctx.part.largest or len(weight)):
            factor = torch.zeros_like(norms[rows]) if of_logprobs is None else of_logprobs[rows]
            change = scores_of(hidden[rows], weight, ctx.temperature)
            if ctx.compile_it:
                slope = torch.zeros_like(factor) if of_entropy is None else of_entropy[rows]
                change = compiled(change_of_scores)(change, targets[rows], norms[rows], spread[rows], factor, slope)
                change.div_(ctx.temperature)
            else:
                for few in cache_blocks(change):
                    logs = change[few].sub_(norms[rows][few].unsqueeze(-1))
                    of_few = None if of_entropy is None else of_entropy[rows][few]
                    gradient = _change(logs, spread[rows][few], factor[few], of_few)
                    ctx.part.add_at(gradient, targets[rows][few], factor[few])
                    gradient.div_(ctx.temperature)
            change = change.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[rows] = change @ weight
            if for_weight is not None:
                add_product(for_weight, change, hidden[rows])
        if for_hidden is not None:
            ctx.part.reduce(for_hidden)
        return for_hidden, None if for_weight is None else for_weight.to(weight.dtype), *[None] * 6


def _change(logs: Tensor, spread: Tensor, of_logprobs: Tensor, of_entropy: Tensor | None) -> Tensor:
    """`change_of_scores` without its term at the targets, from log p, which is overwritten."""
    if of_entropy is None:
        return logs.exp_().mul_(-of_logprobs.unsqueeze(-1))
    share = logs.exp()
    logs.add_(spread.unsqueeze(-1)).mul_(of_entropy.unsqueeze(-1))
    return logs.add_(of_logprobs.unsqueeze(-1)).mul_(share).neg_()


def scores_of(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """(C, V) float32 logits divided by the temperature, as a new tensor."""
    scores = (hidden @ weight.T).float()
    return scores if temperature == 1.0 else scores.div_(temperature)


def add_product(total: Tensor, change: Tensor, hidden: Tensor) -> None:
    """total += change^T hidden, in float32."""
    if change.dtype == torch.float32:
        total.addmm_(change.T, hidden)
    else:
        total += change.T @ hidden


def cache_blocks(table: Tensor) -> list[slice]:
    """Rows of a table that are worked on together between two products: on a CPU as many as stay in each core's cache,
    so that several operations read them from memory once.
    """
    size = len(table)
    if table.device.type == "cpu":
        size = torch.get_num_threads() * max(LOGITS_OF_A_CORE // table.shape[1], 1)
    return [slice(start, start + size) for start in range(0, len(table), size)]


def token_chunks(hidden: Tensor, tokens: int) -> list[slice]:
    """Rows of `hidden` that are computed together, for a vocabulary of `tokens`."""
    size = max(logits_at_a_time(hidden.device) // tokens, 1)
    return [slice(start, start + size) for start in range(0, len(hidden), size)]
