"""The pages of `skyrl view`, from addresses to HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from skyrl.errors import DataError
from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.conversation import (
    answer_messages,
    answer_parts,
    answer_tokens,
    expected_answer,
    other_columns,
    prompt_messages,
    window,
)
from skyrl.viewer.panels import constants, panels, phases
from skyrl.viewer.rendering import environment
from skyrl.viewer.run_card import RunCard, run_card
from skyrl.viewer.run_metrics import RunMetrics, Series
from skyrl.viewer.sample_filter import ORDERS, SampleFilter
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.small_charts import short, small_charts
from skyrl.viewer.token_shades import MODES

ON_A_PAGE = 50
"""Number of samples on a page of the list."""

TOKENS_ON_A_PAGE = 4000


class Pages:
    """The pages of one run."""

    about = "run and curves"
    """Name of the page of the run in the menu."""

    def __init__(self, run: Path, index: SampleIndex, tokens: TokenFiles) -> None:
        self._run, self._index, self._tokens = run, index, tokens
        self.metrics = RunMetrics(run)
        self._templates = environment()

    def samples(self, query: Mapping[str, str]) -> str:
        """The page with the list of samples. Raises `ValueError` for an invalid filter."""
        sample_filter = SampleFilter.of(query)
        page = _page_number(query)
        count = self._index.count(sample_filter)
        return self._rendered(
            "samples.html",
            filter=sample_filter,
            rows=self._index.rows(sample_filter, first=page * ON_A_PAGE, most=ON_A_PAGE),
            count=count,
            page=page,
            pages=-(-count // ON_A_PAGE),
            narrowed=sample_filter.is_narrow,
            orders=list(ORDERS),
            choices=self._index.choices(),
            **self._scale(),
        )

    def run(self) -> str:
        """The page of the run: its card and its curves."""
        with self.metrics.lock:
            return self._run_page(run_card(self._run, self._name, self.metrics), {self._name: self.metrics.series})

    def model(self, name: str) -> str | None:
        """The page of a model of a training service; None for a run, which has none of this name."""
        return None

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
        visible = window(rows, first, TOKENS_ON_A_PAGE)
        before, after = self._index.neighbours(number)
        return self._rendered(
            "sample.html",
            number=number,
            record=record,
            prompt=prompt_messages(record),
            expected=expected_answer(record),
            columns=other_columns(record),
            parts_of_answer=answer_parts(record, visible, mode),
            mode=mode,
            modes=MODES,
            has_tokens=bool(rows),
            has_learner=any(token.learner is not None for row in rows for token in row),
            problem=problem,
            first=first,
            total=total,
            most_tokens=TOKENS_ON_A_PAGE,
            before=before,
            after=after,
            **self._scale(),
        )

    def group(self, number: int) -> str | None:
        """The samples of one group side by side; None if there is no such sample."""
        rows = self._index.group_of(number)
        result = [(row, record) for row in rows if (record := self._index.record(row["id"])) is not None]
        if not result:
            return None
        names = sorted({name for _, record in result for name in record.get("components", {})})
        rewards = [row["reward"] for row, _ in result if row["reward"] is not None]
        return self._rendered(
            "group.html",
            number=number,
            found=[(row, record, answer_messages(record)) for row, record in result],
            components=names,
            prompt=prompt_messages(result[0][1]),
            expected=expected_answer(result[0][1]),
            mean=fmean(rewards) if rewards else None,
            equal=len(set(rewards)) == 1 and len(result) > 1,
            **self._scale(),
        )

    def prompt(self, prompt: str) -> str:
        """The samples of one prompt over the steps."""
        rows = self._index.rows(SampleFilter(prompt=prompt, order="oldest"), most=1000)
        record = self._index.record(rows[-1]["id"]) if rows else None
        return self._rendered(
            "prompt.html",
            prompt_id=prompt,
            steps=_rows_by_step(rows),
            messages=prompt_messages(record or {}),
            expected=expected_answer(record or {}),
            **self._scale(),
        )

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

    def _run_page(self, card: RunCard, runs: Mapping[str, Mapping[str, Series]]) -> str:
        """A card and the curves of its run."""
        [series] = runs.values()
        seconds = {name: phase.mean for name, phase in phases(series).items()}
        return self._rendered(
            "run.html",
            card=card,
            phases=sorted(seconds.items(), key=lambda pair: -pair[1]),
            longest=max(seconds.values(), default=0.0),
            **self._curves(runs),
        )

    def _curves(self, runs: Mapping[str, Mapping[str, Series]]) -> dict[str, Any]:
        """Charts with a line for each run, and metrics that never change."""
        drawn = small_charts(panels(runs))
        return {
            "charts": [(section, list(own)) for section, own in groupby(drawn, lambda chart: chart.panel.section)],
            "constants": [(name, short(value)) for name, value in constants(runs)],
        }

    def _rendered(self, name: str, **values: Any) -> str:
        return self._templates.get_template(name).render({"run": self._name, "here": "", "about": self.about, **values})

    @property
    def _name(self) -> str:
        return self._run.name or str(self._run)

    def _scale(self) -> dict[str, float]:
        least, most = self._index.reward_range()
        return {"least": least, "most": most}


def _rows_by_step(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
