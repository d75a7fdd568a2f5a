"""Rows of supervised training, tokenized: sequences with a mask, and pairs of chats. `row_forms.py` has their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Generic, TypeVar

import numpy as np
from attrs import evolve, frozen

from skyrl.chats.masks import Ids, Mask
from skyrl.config import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.data.conversations import without_nulls
from skyrl.data.row_forms import PreferenceForms, SupervisedForms
from skyrl.data.sources import BadRow, Row, in_table, iterate_rows
from skyrl.errors import DataError


@frozen(kw_only=True, eq=False)
class SupervisedRow:
    """One sequence, and which of its tokens are learned."""

    id: str
    token_ids: Ids
    loss_mask: Mask

    @property
    def length(self) -> int:
        """Length of the row in tokens."""
        return len(self.token_ids)

    def digest_into(self, digest: Any) -> None:
        """Add everything that is learned from to the digest."""
        digest.update(len(self.token_ids).to_bytes(8, "little"))
        digest.update(self.token_ids.tobytes() + self.loss_mask.tobytes())


@frozen(kw_only=True, eq=False)
class PreferenceRow:
    """Two sequences, the first of which is better."""

    id: str
    chosen: Ids
    rejected: Ids
    margin: float = 0.0
    """Margin by which the better answer should score more; Llama 2, arXiv:2307.09288, eq. 2."""

    @property
    def length(self) -> int:
        """Length of the longer answer, in tokens."""
        return max(len(self.chosen), len(self.rejected))

    def digest_into(self, digest: Any) -> None:
        """Add everything that is learned from to the digest."""
        for ids in (self.chosen, self.rejected):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
        digest.update(np.float64(self.margin).tobytes())


R = TypeVar("R", SupervisedRow, PreferenceRow)


@frozen(kw_only=True)
class Rows(Generic[R]):
    """Rows in the order of their sources, and what became of the others."""

    rows: tuple[R, ...]
    sizes: tuple[int, ...]
    """Rows of each source."""

    too_long: int = 0
    """Rows that were left out because they are longer than allowed."""

    cut: int = 0
    """Rows of which only the beginning is left."""

    bad_rows: tuple[str, ...] = ()
    """Rows that were skipped, each with the reason."""

    turn_end: tuple[str, int | None] | None = None
    """The text that ends the turns of chats, and its token if it is a single one; None without chats."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all rows in order, and of how many each source has."""
        digest = sha256(repr(self.sizes).encode())
        for row in self.rows:
            row.digest_into(digest)
        return digest.hexdigest()


def load_supervised(sources: Sequence[str], tokenizer: Any, run: SFTConfig, max_length: int) -> Rows[SupervisedRow]:
    """Every row of the sources, tokenized and masked. Raises `DataError` as `bad_rows` says, and where none is left."""
    tokens_of = SupervisedForms(tokenizer, run)

    def read(row: Row, row_id: str) -> SupervisedRow:
        ids, mask = tokens_of(row)
        mask = mask.copy()
        mask[:1] = False  # nothing predicts the first token
        if not mask.any():
            raise DataError("no token of it is learned")
        return SupervisedRow(id=row_id, token_ids=ids, loss_mask=mask)

    def cut(row: SupervisedRow) -> SupervisedRow | None:
        short = evolve(row, token_ids=row.token_ids[:max_length], loss_mask=row.loss_mask[:max_length])
        return short if short.loss_mask.any() else None

    return evolve(_load(sources, run, max_length, read, cut), turn_end=tokens_of.turn_end)


def load_preferences(
    sources: Sequence[str], tokenizer: Any, run: RewardModelConfig, max_length: int
) -> Rows[PreferenceRow]:
    """Every pair of the sources, tokenized. Raises `DataError` as `bad_rows` says, and where none is left.

    A longer pair is never cut: its score is read at the end.
    """
    tokens_of = PreferenceForms(tokenizer, run)

    def read(row: Row, row_id: str) -> PreferenceRow:
        chosen, rejected, margin = tokens_of(row)
        return PreferenceRow(id=row_id, chosen=chosen, rejected=rejected, margin=margin)

    return _load(sources, run, max_length, read, lambda row: None)


def _load(
    sources: Sequence[str],
    run: SupervisedConfig,
    max_length: int,
    read: Callable[[Row, str], R],
    cut: Callable[[R], R | None],
) -> Rows[R]:
    rows: list[R] = []
    bad: list[str] = []
    sizes = []
    too_long = cut_rows = 0
    for number, source in enumerate(sources):
        before = len(rows)
        for place, found in enumerate(iterate_rows(source)):
            try:
                row = _row(found, f"{number}:{place}", read, table=in_table(source))
            except DataError as error:
                bad.append(str(error) if isinstance(found, BadRow) else f"{source}, row {place}: {error}")
                if run.bad_rows == "stop":
                    hint = " (bad_rows = skip leaves such rows out, and counts them)"
                    raise DataError(bad[-1] + hint) from error
                continue
            short = row if row.length <= max_length else cut(row) if run.too_long == "truncate" else None
            too_long += short is None
            cut_rows += short is not None and short is not row
            rows += [] if short is None else [short]
        sizes.append(len(rows) - before)
    if not rows:
        raise DataError(
            f"no row of {', '.join(sources)} can be trained on: {too_long} are longer than max_length = {max_length} "
            f"tokens, and {len(bad)} are bad" + (f"; the first: {bad[0]}" if bad else "")
        )
    return Rows(rows=tuple(rows), sizes=tuple(sizes), too_long=too_long, cut=cut_rows, bad_rows=tuple(bad))


def _row(found: Row | BadRow, row_id: str, read: Callable[[Row, str], R], *, table: bool) -> R:
    if isinstance(found, BadRow):
        raise DataError(found.reason)
    return read(without_nulls(found) if table else found, row_id)
