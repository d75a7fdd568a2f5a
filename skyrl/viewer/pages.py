"""The pages of `skyrl view`, from addresses to HTML. Jinja escapes all text, because answers are untrusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from skyrl.errors import DataError
from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.conversation import answer_parts, answer_tokens, prompt_messages, window
from skyrl.viewer.sample_filter import ORDERS, SampleFilter
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.token_shades import MODES

ON_A_PAGE = 50
"""Number of samples on a page of the list."""

TOKENS_ON_A_PAGE = 4000


class Pages:
    """The pages of one run."""

    def __init__(self, run: Path, index: SampleIndex, tokens: TokenFiles) -> None:
        self._run, self._index, self._tokens = run, index, tokens
        self._templates = Environment(
            loader=PackageLoader("skyrl.viewer"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._templates.filters["query"] = lambda values: urlencode(values)

    def samples(self, query: Mapping[str, str]) -> str:
        """The page with the list of samples. Raises `ValueError` for an invalid filter."""
        wanted = SampleFilter.of(query)
        page = _page_number(query)
        count = self._index.count(wanted)
        return self._rendered(
            "samples.html",
            filter=wanted,
            rows=self._index.rows(wanted, first=page * ON_A_PAGE, most=ON_A_PAGE),
            count=count,
            page=page,
            pages=-(-count // ON_A_PAGE),
            orders=list(ORDERS),
            choices=self._index.choices(),
        )

    def sample(self, number: int, query: Mapping[str, str]) -> str | None:
        """One sample as a conversation; None if it does not exist."""
        record = self._index.record(number)
        if record is None:
            return None
        mode = query.get("colour", "mask")
        mode = mode if mode in MODES else "mask"
        rows, problem = self._token_rows(record)
        first = _page_number(query, "from")
        total = sum(map(len, rows))
        shown = window(rows, first, TOKENS_ON_A_PAGE)
        before, after = self._index.neighbours(number)
        return self._rendered(
            "sample.html",
            number=number,
            record=record,
            prompt=prompt_messages(record),
            parts_of_answer=answer_parts(record, shown, mode),
            mode=mode,
            modes=MODES,
            has_tokens=bool(rows),
            has_learner=any(token.learner is not None for row in rows for token in row),
            problem=problem,
            first=first,
            total=total,
            most=TOKENS_ON_A_PAGE,
            before=before,
            after=after,
        )

    def group(self, number: int) -> str | None:
        """The samples of one group side by side; None if there is no such sample."""
        rows = self._index.group_of(number)
        result = [(row, record) for row in rows if (record := self._index.record(row["id"])) is not None]
        if not result:
            return None
        names = sorted({name for _, record in result for name in record.get("components", {})})
        prompt = prompt_messages(result[0][1])
        return self._rendered("group.html", number=number, found=result, components=names, prompt=prompt)

    def prompt(self, prompt: str) -> str:
        """The samples of one prompt over the steps."""
        rows = self._index.rows(SampleFilter(prompt=prompt, order="oldest"), most=1000)
        return self._rendered("prompt.html", prompt_id=prompt, steps=_by_step(rows))

    def mistake(self, text: str) -> str:
        """A page with an error message."""
        return self._rendered("mistake.html", text=text)

    def _token_rows(self, record: Mapping[str, Any]) -> tuple[list[Any], str]:
        """Tokens of each row, and the reason if they cannot be shown."""
        if "group" not in record:
            return [], "The run was made by a version that stored no tokens."
        try:
            rows = answer_tokens(record, self._tokens.read(record["step"], record["group"]))
        except DataError as error:
            return [], str(error)
        return rows, "" if rows else "The step has no tokens yet, or was sampled again since."

    def _rendered(self, name: str, **values: Any) -> str:
        return self._templates.get_template(name).render(run=self._run.name or str(self._run), **values)


def _by_step(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps with their samples and mean rewards."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return [
        {"step": step, "rows": own, "mean": fmean(known) if known else None}
        for step, own in steps.items()
        for known in [[row["reward"] for row in own if row["reward"] is not None]]
    ]


def _page_number(query: Mapping[str, str], name: str = "page") -> int:
    text = query.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
