"""Attention and layout of the rows of a model: packed into one row, with shared prompts, or padded.

A row's numbers must not depend on its neighbours, its place, the layout or the kernel. No model declares that, and most
break it silently. It is therefore tried, on a small copy of the model whose bounds are shrunk (`models/small_copy.py`):
rows shorter and longer than every bound, with short and long neighbours, in each layout, against each row alone by the
model's own definition, which transformers calls `eager`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from skyrl.batch import TrainingBatch
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.errors import ModelError
from skyrl.learners.row_layouts import packed, padded
from skyrl.models.attention.segment_attention import SEGMENTS, register
from skyrl.models.small_copy import (
    LONGEST,
    VOCABULARY,
    NoCopyError,
    is_rounding,
    log_probabilities,
    small_copy,
    tried,
)

_GROUPS = ((22, (5, 26)), (3, (2, 14)), (1, (12,)))
"""Tokens of each prompt, and of each of its answers: below and above all bounds of a small copy, alone and together."""


@attrs.frozen(kw_only=True)
class RowSupport:
    """The attention and the layout of a model's rows."""

    attention: str
    """transformers' name of the attention, or `SEGMENTS`."""

    pack: bool
    share_prompts: bool

    reason: str = ""
    """Why they are not what was asked for; empty if they are."""


@attrs.frozen(kw_only=True)
class RowDifference:
    """What one attention and layout do to the rows of the small copy."""

    rows: RowSupport

    nats: float | None = None
    """Largest difference of a log-probability from the row alone; None if the pass failed."""

    fault: str = ""
    """A clause that says what is wrong; empty if the rows are those alone."""


def rows_of_run(run: RunBasics, config: PretrainedConfig, attention: str) -> RowSupport:
    """Attention and layout of the rows of a model. Raises `ModelError` if its rows depend on each other in each."""
    pack, share = run.use_sample_packing, run.share_group_prompts
    if facts_of(run).own_modules:  # which refuse what they do not compute
        register()
        return RowSupport(attention=SEGMENTS, pack=pack, share_prompts=share)
    if attention.startswith("flash_attention"):  # not on this device, or in 16 bits only
        if getattr(config.get_text_config(), "attention_chunk_size", None):
            field = run.path_of("attention")
            raise ModelError(f"FlashAttention has no chunks, which {config.model_type} has: set {field} = sdpa")
        return RowSupport(attention=attention, pack=pack, share_prompts=share)
    return row_support(config, attention, pack=pack, share_prompts=share)


def row_support(config: PretrainedConfig, attention: str, *, pack: bool, share_prompts: bool) -> RowSupport:
    """The best that a model of this configuration can do of what is asked: a kind of attention (`sdpa` or `eager`),
    rows packed into one, prompts shared.

    Raises `ModelError` if even padded rows depend on each other.
    """
    faults: list[str] = []
    try:
        for difference in differences(config, attention, pack=pack, share_prompts=share_prompts):
            if not difference.fault:
                return attrs.evolve(difference.rows, reason=_reason(config, difference.rows, faults) if faults else "")
            faults.append(difference.fault)
    except NoCopyError as error:
        reason = f"{config.model_type}: rows run unpacked, with attention eager: no small copy can be probed ({error})"
        return RowSupport(attention="eager", pack=False, share_prompts=False, reason=reason)
    raise ModelError(
        f"a row of this {config.model_type} model depends on the rows beside it, whatever the attention and layout: "
        f"{'; '.join(faults)}"
    )


def differences(
    config: PretrainedConfig, attention: str, *, pack: bool, share_prompts: bool
) -> Iterator[RowDifference]:
    """All that may serve what is asked, the best first, with what it does to rows. Computed as far as it is read."""
    case = _RowCase(key=config.to_json_string(use_diff=False), config=config)
    for name, packs, shares in _candidates(attention, pack, share_prompts):
        yield _difference(case, RowSupport(attention=name, pack=packs, share_prompts=shares))


def _reason(config: PretrainedConfig, rows: RowSupport, faults: list[str]) -> str:
    name = "torch's own" if rows.attention == SEGMENTS else rows.attention
    layout = "packed" if rows.pack else "unpacked"
    prompts = " without shared prompts" if rows.pack and not rows.share_prompts else ""
    return f"{config.model_type}: rows run {layout}{prompts}, with attention {name}: {faults[0]}"


def _candidates(attention: str, pack: bool, share_prompts: bool) -> Iterator[tuple[str, bool, bool]]:
    """Attention, packing and sharing, the best first."""
    if attention == "sdpa":
        if pack and share_prompts:
            yield SEGMENTS, True, True
        yield SEGMENTS, pack, False
    for name in dict.fromkeys((attention, "eager")):
        if pack and name == attention:
            yield name, True, False
        yield name, False, False


@attrs.frozen(kw_only=True)
class _RowCase:
    """A configuration that can be hashed."""

    key: str
    config: PretrainedConfig = attrs.field(eq=False)


@cache
@torch.no_grad()
def _copy(case: _RowCase) -> tuple[PreTrainedModel, TrainingBatch, Tensor]:
    """The small copy, rows, and log-probabilities (tokens, V) of the selected tokens of each row alone."""
    batch, model = probe_rows(), small_copy(case.config)
    rows = [ids[:length] for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True)]
    row_logprobs = [
        _score_alone(model, ids)[mask[1 : len(ids)]] for ids, mask in zip(rows, batch.loss_mask, strict=True)
    ]
    longest = int(batch.lengths.argmax())
    earlier = _score_alone(model, rows[longest][: LONGEST // 2])[batch.loss_mask[longest, 1 : LONGEST // 2]]
    expected = row_logprobs[longest][: len(earlier)]
    if not is_rounding(float((expected - earlier).abs().max()), expected):
        raise ModelError(
            f"the output of a {case.config.model_type} model at a token depends on later tokens, as transformers "
            "computes it: it is not a causal language model"
        )
    return model, batch, torch.cat(row_logprobs)


def _score_alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(n,) tokens -> (n - 1, V): log-probabilities after each token but the last."""
    return tried(lambda: log_probabilities(model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]))


@cache
@torch.no_grad()
def _difference(case: _RowCase, rows: RowSupport) -> RowDifference:
    attention = rows.attention
    model, batch, expected = _copy(case)
    register()
    with suppress(ValueError):  # a model that has one attention only; for others transformers only warns
        model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        return RowDifference(rows=rows, fault=f"{type(model).__name__} has no attention but its own")
    if rows.pack:
        layout = packed(batch, segmented=attention == SEGMENTS, share_prompts=rows.share_prompts)
        kind = "packed rows with shared prompts" if rows.share_prompts else "packed rows"
    else:
        layout, kind = padded(batch), f"rows by {'sdpa' if attention == SEGMENTS else attention}"
    try:
        logprobs = tried(lambda: log_probabilities(layout.pick(model(**layout.inputs, use_cache=False).logits)))
    except NoCopyError as error:
        return RowDifference(rows=rows, fault=f"{kind} fail ({error})")
    nats = float((logprobs - expected).abs().max())
    if is_rounding(nats, expected):
        return RowDifference(rows=rows, nats=nats)
    return RowDifference(
        rows=rows, nats=nats, fault=f"{kind} differ from each row alone by {nats:.2g} nats in a small copy"
    )


def probe_rows() -> TrainingBatch:
    """Rows of a small copy's vocabulary, in groups that share their prompt. Every token of an answer is selected."""
    draws = torch.Generator().manual_seed(0)

    def drawn(tokens: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (tokens,), generator=draws)

    rows, prompts, groups = [], [], []
    for group, (prompt, answers) in enumerate(_GROUPS):
        start = drawn(prompt)
        for answer in answers:
            rows.append(torch.cat((start, drawn(answer))))
            prompts.append(prompt)
            groups.append(group)
    ids, lengths = pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    columns, before = torch.arange(ids.shape[1]), torch.tensor(prompts).unsqueeze(1)
    return TrainingBatch(
        input_ids=ids,
        lengths=lengths,
        loss_mask=(columns >= before) & (columns < lengths.unsqueeze(1)),
        rollout_logprobs=torch.zeros(ids.shape),
        rewards=torch.zeros(ids.shape),
        groups=torch.tensor(groups),
        answer_lengths=lengths - before.squeeze(1),
    )
