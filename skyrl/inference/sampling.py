"""Turns logits into a token and its log-probability, for rows that may each have their own settings.

    logits --penalised--> --tempered--> scores --cut--> --draw--> token;   log-probability = log softmax(scores)[token]

The log-probability is that of `scores`, before top-k, top-p and min-p cut them, and rows without a token are left out
(`Drawable`): a learner that knows the temperature can compute it again. (`scores` also contain penalties and
`min_new_tokens`, which a learner cannot know.) The draw inverts the cumulative distribution at a number that belongs to
the sample (see `draws.py`). Each row has its own running sum in float64, so that its token depends only on its logits
and its number.

Shapes: R rows, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from skyrl.algorithms.logprobs import token_logprobs
from skyrl.config import SamplingParams
from skyrl.inference.engine import temperature_of


class HasVocabulary(Protocol):
    """The part of a tokenizer that is read here."""

    def get_vocab(self) -> Mapping[str, int]:
        """Id of each token, added ones included."""


@frozen
class Drawable:
    """The columns of logits that stand for tokens, which alone may be drawn.

    Many models have more rows in their output matrix than tokens, padded to a multiple that hardware likes. Like a cut
    by top-k, leaving them out changes what is drawn and not the log-probabilities, which are those of the softmax over
    all rows, on the learner's side too.
    """

    count: int
    """Number of columns up to the last token."""

    holes: tuple[int, ...] = ()
    """Columns below `count` that stand for no token."""

    @classmethod
    def of(cls, tokenizer: HasVocabulary) -> Drawable:
        """The tokens of a tokenizer."""
        known = {*tokenizer.get_vocab().values()}
        count = max(known, default=-1) + 1
        return cls(count, tuple(item for item in range(count) if item not in known) if len(known) < count else ())

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores (R, V) of the columns that may be drawn, (R, min(V, count)): a view unless there are holes."""
        kept = scores[:, : self.count]
        return kept.index_fill(1, self._holes(kept), -torch.inf) if self.holes else kept

    def leave(self, logits: Tensor) -> None:
        """Overwrite with -infinity the columns of logits (R, V) that are not drawn."""
        logits[:, self.count :] = -torch.inf
        if self.holes:
            logits.index_fill_(1, self._holes(logits), -torch.inf)

    def _holes(self, scores: Tensor) -> Tensor:
        return torch.tensor([hole for hole in self.holes if hole < scores.shape[1]], device=scores.device)


@frozen(kw_only=True, eq=False)
class RowSettings:
    """The sampling settings of R rows as tensors of shape (R,), and flags for settings that have an effect."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    any_tempered: bool
    any_greedy: bool
    any_cut: bool
    any_penalised: bool
    """Whether either penalty changes any row."""

    @property
    def divisor(self) -> Tensor:
        """(R, 1): what logits are divided by; 1 for greedy rows."""
        return torch.where(self.temperature == 0.0, 1.0, self.temperature).unsqueeze(1)

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device | str) -> RowSettings:
        """Builds the tensors. Greedy rows have temperature 0; their log-probabilities are reported at temperature 1."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        temperatures = [temperature_of(row) for row in rows]
        return cls(
            temperature=column(temperatures),
            top_k=torch.tensor([row.top_k for row in rows], device=device),
            top_p=column([row.top_p for row in rows]),
            min_p=column([row.min_p for row in rows]),
            repetition_penalty=column([row.repetition_penalty for row in rows]),
            frequency_penalty=column([row.frequency_penalty for row in rows]),
            any_tempered=any(temperature not in (0.0, 1.0) for temperature in temperatures),
            any_greedy=0.0 in temperatures,
            any_cut=any(row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0 for row in rows),
            any_penalised=any(row.repetition_penalty != 1.0 or row.frequency_penalty for row in rows),
        )


def choose(
    logits: Tensor, settings: RowSettings, uniform: Tensor, drawable: Drawable | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row and its natural-log probability. Shapes: (R, V), (R,) -> (R,) int64, (R,) float32.

    `logits` are already penalised. `drawable` are the tokens that may be drawn; None: all. A row whose logits hold NaN
    or +infinity gets an arbitrary token and a non-finite log-probability, which is all that the caller has to check.
    """
    scores = tempered(logits, settings)
    drawn_from = scores if drawable is None else drawable(scores)
    tokens = draw(cut(drawn_from, settings) if settings.any_cut else drawn_from, uniform)
    if settings.any_greedy:
        tokens = torch.where(settings.temperature == 0.0, drawn_from.argmax(-1), tokens)
    return tokens, token_logprobs(logits, tokens, temperature=settings.divisor if settings.any_tempered else 1.0)


def scored(logits: Tensor, tokens: Tensor, top: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` in nats, the `top` likeliest tokens, the likeliest first, and theirs: (T, V), (T,)
    -> (T,), (T, top), (T, top).
    """
    if top > 1:
        return token_logprobs(logits, tokens, temperature=1.0), *likeliest(logits.float(), top)
    first = logits.argmax(-1)
    first_logprobs = token_logprobs(logits, first, temperature=1.0)
    return token_logprobs(logits, tokens, temperature=1.0), first.unsqueeze(1), first_logprobs.unsqueeze(1)


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, the likeliest first, and their log softmax in nats: (R, V) float32 -> both (R, top)."""
    values, tokens = scores.topk(top, dim=-1)
    highest = values[:, :1]  # subtracted first, so that the size of the scores costs no precision
    return tokens, values - highest - (scores - highest).exp().sum(-1, keepdim=True).log()


def penalised(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits of tokens that occurred are divided by the penalty where positive, multiplied by it where negative.

    CTRL, arXiv:1909.05858, section 4.1, with the sign rule of Hugging Face and vLLM. Shapes: (R, V), `seen` (R, S)
    token ids of prompt and completion in any order, repeats allowed, `penalty` (R,).
    """
    scores = logits.gather(1, seen)
    factor = penalty.unsqueeze(1)
    return logits.scatter(1, seen, torch.where(scores < 0, scores * factor, scores / factor))


def less_frequent(logits: Tensor, drawn: Tensor, counted: Tensor, penalty: Tensor) -> Tensor:
    """Logits minus the penalty for each time that their token was drawn, as in OpenAI's API and vLLM.

    Shapes: (R, V), `drawn` (R, S) token ids, `counted` (R, S) bool, True in the completion, `penalty` (R,).
    """
    return logits.scatter_add(1, drawn, -penalty.unsqueeze(1) * counted.float())


def mask_early_ends(logits: Tensor, ends: Tensor, early: Tensor) -> Tensor:
    """Logits with -infinity for the tokens that end a completion, in rows where it is too `early` to end.

    Shapes: (R, V), `ends` (R, K) token ids, or -1 for a row that has none; `early` (R,) bool.
    """
    columns = ends.clamp(min=0)
    forbidden = early.unsqueeze(1) & (ends >= 0)
    return logits.scatter(1, columns, logits.gather(1, columns).masked_fill(forbidden, -torch.inf))


def tempered(logits: Tensor, settings: RowSettings) -> Tensor:
    """Logits over temperature in float32, (R, V); greedy rows keep temperature 1."""
    return logits.float() / settings.divisor if settings.any_tempered else logits.float()


def cut(scores: Tensor, settings: RowSettings) -> Tensor:
    """Scores with -infinity outside the top-k tokens, then the top-p nucleus of those, then above min-p. (R, V).

    The order and the ties (all tokens as likely as the k-th stay) are those of Hugging Face's logits processors.
    Nucleus: arXiv:1904.09751; min-p: arXiv:2407.01082. The most likely token always stays.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    vocabulary = scores.shape[-1]
    k = torch.where(settings.top_k > 0, settings.top_k, vocabulary).clamp(max=vocabulary).unsqueeze(1)
    keep = ordered >= ordered.gather(1, k - 1)
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    top_p, min_p = settings.top_p.unsqueeze(1), settings.min_p.unsqueeze(1)
    keep &= (before < top_p) | (top_p >= 1.0)  # at 1 nothing is cut, whatever the rounding of the sum
    keep &= probabilities >= min_p * probabilities[:, :1]
    return scores.masked_fill(~torch.empty_like(keep).scatter_(1, order, keep), -torch.inf)


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `uniform`: (R, V), (R,) in [0, 1) -> (R,) int64.

    A token of probability zero adds nothing to the sum and is therefore never drawn. In a large vocabulary the block of
    tokens is found first and the token inside it second: with one running sum over the whole vocabulary, a draw among
    152 thousand tokens takes 1.5 times as long on an H200.
    """
    probabilities, vocabulary = scores.softmax(-1), scores.shape[-1]
    if vocabulary <= _LARGE:
        return _first_exceeding(*_running(probabilities, uniform)).squeeze(1)
    aligned_size = vocabulary // _BLOCK * _BLOCK
    sums = probabilities[:, :aligned_size].unflatten(1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)
    rest = probabilities[:, aligned_size:].sum(-1, keepdim=True, dtype=torch.float64)
    blocks = torch.cat((sums, rest), 1)
    cumulative, target = _running(blocks, uniform)
    block = _first_exceeding(cumulative, target)
    before = cumulative.gather(1, block) - blocks.gather(1, block)
    share = ((target - before) / blocks.gather(1, block)).clamp(0.0, _LARGEST_SHARE).squeeze(1)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    inside = probabilities.gather(1, columns.clamp(max=vocabulary - 1)).masked_fill(columns >= vocabulary, 0.0)
    tokens = block * _BLOCK + _first_exceeding(*_running(inside, share))
    return tokens.clamp(max=vocabulary - 1).squeeze(1)  # only rows with NaN reach past the end


_BLOCK = 512
"""Number of tokens in a block of a large vocabulary."""

_LARGE = 16 * _BLOCK
"""Number of tokens in the largest vocabulary that is summed as one."""

_LARGEST_SHARE = 1.0 - 2.0**-52
"""Largest share of a block's sum at which a token is searched: the product stays below the sum despite rounding."""


def _running(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums, and the target value in them for `uniform`: (R, N), (R,) -> (R, N) and (R, 1), float64."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return cumulative, uniform.unsqueeze(1) * cumulative[:, -1:]


def _first_exceeding(cumulative: Tensor, target: Tensor) -> Tensor:
    """(R, 1) int64: the first entry whose running sum exceeds the target; the last one in rows with NaN."""
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[-1] - 1)
