"""The pictures of docs/seeing-a-run.md, taken in Chromium of real runs.

    python -m tests.pictures RUN OTHER TURNS

Samples are those of the first run, conversations those of the third, whose answers have several turns; reports are of
the first run, and of the first two. Each picture shows a page four times: on a wide and a narrow screen, light and
dark. `make pictures` trains the runs, the first with more than one optimizer step a batch, so that the learner scores
its samples, and takes them.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from skyrl.processes.service import listen, server_of
from skyrl.tools.plan_picture import pictures_in
from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.report import report
from skyrl.viewer.sample_filter import SampleFilter
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import RunFollower, view_app
from tests.browser import Browser, browser

DOCS = Path(__file__).parents[1] / "docs"
WIDE, NARROW, GAP = 1280, 390, 20
SCALE, COLOURS = 0.75, 128


def main(run: Path, other: Path, turns: Path) -> None:
    """Take every picture."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as window:
        with served(run, Path(folder) / "index") as (address, index):
            window.open(f"{address}/?key=key")
            number = telling(index)
            take(window, f"{address}/?order=newest&mixed=1", "view-list", height=660)
            take(window, f"{address}/sample/{number}?colour=probability", "view-sample", height=560)
            take(window, f"{address}/group/{number}", "view-group", height=620)
            take(window, f"{address}/run", "view-run", height=900)
        with served(turns, Path(folder) / "turns") as (address, index):
            window.open(f"{address}/?key=key")
            take(window, f"{address}/sample/{telling(index, tokens=3)}?colour=probability", "view-turns", height=720)
        for name, runs in (("report", [run]), ("report-two", [run, other])):
            page = Path(folder) / f"{name}.html"
            layouts, gpus = pictures_in(runs)
            page.write_text(report(runs, samples=20, layouts=layouts, gpus=gpus), encoding="utf-8")
            take(window, f"file://{page}", name, height=1100)


def take(window: Browser, address: str, name: str, *, height: int) -> None:
    """One picture of a page: light above dark, wide beside narrow."""
    sheet = Image.new("RGB", (WIDE + GAP + NARROW, 2 * height + GAP), "#888888")
    for dark in (False, True):
        for width, left in ((WIDE, 0), (NARROW, WIDE + GAP)):
            window.emulate(width=width, height=height, dark=dark)
            window.open(address)
            window.wait_until(
                "document.documentElement.dataset.drawn > 5 || "
                "document.getElementById('status')?.textContent.includes('samples')"
            )
            shot = Image.open(io.BytesIO(window.driver.get_screenshot_as_png()))
            sheet.paste(shot, (left, dark * (height + GAP)))
    small = sheet.resize((round(sheet.width * SCALE), round(sheet.height * SCALE)), Image.Resampling.LANCZOS)
    small.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        DOCS / f"{name}.png", optimize=True
    )


@contextmanager
def served(run: Path, file: Path) -> Iterator[tuple[str, SampleIndex]]:
    """The address of the service, and its index, which is complete."""
    index = SampleIndex(run / "trajectories.jsonl", file)
    pages = Pages(run.absolute(), index, TokenFiles(run / "tokens"))
    follower = RunFollower(index, pages.metrics, run)
    while not follower.complete:
        follower.look()
    with listen("127.0.0.1", 0, None, "") as bound:
        server = server_of(view_app(pages, follower, "key"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", index
        finally:
            server.should_exit = True
            thread.join()


def telling(index: SampleIndex, *, tokens: int = 1) -> int:
    """The first rewarded sample of at least so many tokens whose group has rewards of both kinds."""
    rows = index.rows(SampleFilter(least_reward=0.5, least_length=tokens, mixed=True, order="oldest"), most=1)
    if not rows:
        raise SystemExit("no group of this run has different rewards")
    return int(rows[0]["id"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
