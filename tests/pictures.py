"""The pictures of docs/seeing-a-run.md, taken in Chromium of real runs.

    python -m tests.pictures RUN [RUN...]

Samples are those of the first run; the report is of all. `make pictures` trains the quick start twice, with more than
one optimizer step a batch, so that the learner scores its samples, and takes them.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skyrl.processes.service import listen, server_of
from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.report import report
from skyrl.viewer.sample_filter import SampleFilter
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import RunFollower, view_app
from tests.browser import Browser, browser

DOCS = Path(__file__).parents[1] / "docs"


def main(runs: Sequence[Path]) -> None:
    """Take every picture."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile", height=640) as window:
        take_view(window, runs[0], Path(folder) / "index")
        page = Path(folder) / "report.html"
        page.write_text(report(runs, samples=20), encoding="utf-8")
        window.open(f"file://{page}")
        window.wait_until("document.documentElement.dataset.drawn > 5")
        window.save(DOCS / "report.png", height=1000)


def take_view(window: Browser, run: Path, file: Path) -> None:
    """Pictures of the pages of `skyrl view`."""
    index = SampleIndex(run / "trajectories.jsonl", file)
    while index.update():
        pass
    with served(run, index) as address:
        window.open(f"{address}/?order=highest+reward&key=key")
        window.wait_until("document.getElementById('status').textContent.includes('samples')")
        window.save(DOCS / "view-list.png", height=640)
        number = telling(index)
        window.open(f"{address}/sample/{number}?colour=probability")
        window.save(DOCS / "view-sample.png", height=470)
        window.open(f"{address}/group/{number}")
        window.save(DOCS / "view-group.png", height=720)


@contextmanager
def served(run: Path, index: SampleIndex) -> Iterator[str]:
    """The service, whose index is complete."""
    pages = Pages(run.absolute(), index, TokenFiles(run / "tokens"))
    follower = RunFollower(index, pages.metrics, run)
    while not follower.complete:
        follower.look()
    with listen("127.0.0.1", 0, None, "") as bound:
        server = server_of(view_app(pages, follower, "key"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def telling(index: SampleIndex) -> int:
    """A rewarded sample of the first group that has rewards of both kinds."""
    for row in index.rows(SampleFilter(least_reward=0.5, order="oldest"), most=1000):
        if len({each["reward"] for each in index.group_of(row["id"])}) > 1:
            return int(row["id"])
    raise SystemExit("no group of this run has different rewards")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
