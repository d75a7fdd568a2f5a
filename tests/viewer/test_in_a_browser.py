"""`skyrl view` and `skyrl report` in Chromium: nothing is complained about, no request leaves, and keys are enough."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.processes.service import listen, server_of
from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.report import report
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import RunFollower, view_app
from tests.browser import END, ENTER, Browser, browser
from tests.viewer.test_report import LINES, STORED
from tests.viewer_run import HOSTILE, TURNS, group, write

pytestmark = [pytest.mark.long, pytest.mark.browser]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two groups; the newest answers and everything around them are hostile, but for one."""
    folder = tmp_path_factory.mktemp("seen") / "run"
    folder.mkdir()
    steps = [[group(step, 0, ["abc~d", "other"]), group(step, 1, ["x", "y"])] for step in (1, 2)]
    last = [group(3, 0, [HOSTILE, "harmless"], source=HOSTILE, prompt=HOSTILE), group(3, 1, [TURNS])]
    write(folder, [*steps, last])
    lines = [*LINES, {"step": 4, f"reward/component/{HOSTILE}": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"config": {HOSTILE: HOSTILE}}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(run: Path, window: Browser) -> Iterator[str]:
    """The service, on a port of its own."""
    index = SampleIndex(run / "trajectories.jsonl", run / "trajectories.index")
    pages = Pages(run, index, TokenFiles(run / "tokens"))
    updater = RunFollower(index, pages.metrics, run)
    with listen("127.0.0.1", 0, None, "") as bound:
        server = server_of(view_app(pages, updater, "key"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        updater.start()
        base = f"http://127.0.0.1:{bound.getsockname()[1]}"
        window.open(f"{base}/?key=key")
        yield base
        server.should_exit = True
        thread.join()
        updater.close()


@pytest.fixture(autouse=True)
def at_peace(window: Browser) -> Iterator[None]:
    """Every test ends without a line on the console, and without a request to another machine."""
    window.complaints(), window.hosts()
    yield
    assert window.complaints() == []
    assert window.hosts() - {"127.0.0.1", "file", "data", "blob"} == set()


def test_keys_alone_lead_from_the_list_to_tokens_a_group_a_prompt_and_back(window: Browser, address: str) -> None:
    window.open(f"{address}/?step=1")
    window.wait_until("document.getElementById('status').textContent.includes('11 samples')")
    window.press("j", "j", "k")
    assert window.value("document.activeElement.getAttribute('href')") == "/sample/1"
    window.press(ENTER)
    window.wait_for(".t.s")
    window.press("4")
    window.wait_for("main pre .t.a4")
    window.press("n")
    window.wait_until("location.pathname == '/sample/2'")
    window.press("g")
    window.wait_for(".beside article.here")
    window.press("t")
    window.wait_until("location.pathname == '/prompt'")
    window.press("u")
    window.wait_for("#filter")
    window.press("/", "other", ENTER)
    window.wait_until("location.search.includes('words=other') && document.querySelectorAll('a.open').length == 2")
    assert window.value("document.querySelector('#search').value") == "other"
    window.press("?")
    window.wait_for("#keys[open]")


@pytest.mark.parametrize("path", ["/", "/sample/9", "/sample/9?colour=probability", "/group/9", "/prompt?id=0:0"])
def test_hostile_samples_are_seen_and_do_nothing(window: Browser, address: str, path: str) -> None:
    window.open(address + path)
    window.wait_until("document.getElementById('status').textContent.includes('samples')")
    assert window.value("document.title") != "taken" and window.value("document.querySelectorAll('img').length") == 0
    assert "onerror=" in window.value("document.body.innerText")


PAGES = ("/", "/?mixed=1&failed=0", "/sample/1", "/sample/9?colour=probability", "/group/1", "/prompt?id=0:0", "/run")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_is_accessible_and_fits_its_window(window: Browser, address: str, width: int, dark: bool) -> None:
    window.emulate(width=width, dark=dark)
    for path in PAGES:
        window.open(address + path)
        window.wait_until("document.getElementById('status').textContent.includes('samples')")
        assert (path, window.violations()) == (path, [])
        assert (path, window.value("document.documentElement.scrollWidth")) == (path, width)
    window.emulate()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_is_accessible_and_fits_its_window(
    window: Browser, run: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    window.emulate(width=width, dark=dark)
    for number, runs in enumerate(([run], [STORED, run])):
        file = tmp_path / f"{number}.html"
        file.write_text(report(runs, samples=10), encoding="utf-8")
        window.open(f"file://{file}")
        window.wait_until("document.documentElement.dataset.drawn > 2")
        assert (window.violations(), window.value("document.documentElement.scrollWidth")) == ([], width)
        ground = window.value("getComputedStyle(document.querySelector('.chart .main-svg')).backgroundColor")
        assert ground in ("rgba(0, 0, 0, 0)", "transparent")
    window.emulate()


def test_the_heading_that_a_link_leads_to_is_not_below_the_header(window: Browser, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report([run], samples=10), encoding="utf-8")
    for width in (390, 1280):
        window.emulate(width=width)
        for section in ("curves", "events", "configuration", "samples"):
            window.open("about:blank")
            window.open(f"file://{file}#{section}")
            window.wait_until("document.documentElement.dataset.drawn > 2")
            window.value(f"document.getElementById('{section}').scrollIntoView()")
            header = "document.querySelector('header').getBoundingClientRect().bottom"
            assert window.value(f"document.getElementById('{section}').getBoundingClientRect().top >= {header}")
    window.emulate()


def test_template_and_special_tokens_are_folded_until_they_are_asked_for(window: Browser, address: str) -> None:
    window.open(f"{address}/sample/11")
    hidden, special = window.wait_for(".markup"), window.wait_for(".fold")
    assert hidden.value_of_css_property("display") == "none"
    assert special.value_of_css_property("font-size") == "0px"
    window.press("m")
    window.wait_until("document.getElementById('markup').checked")
    assert hidden.value_of_css_property("display") == "inline"
    assert special.value_of_css_property("font-size") == "11px"


def test_a_report_draws_its_curves_smooths_them_and_zooms_by_keys(window: Browser, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report([STORED, run], samples=10), encoding="utf-8")
    window.open(f"file://{file}")
    window.wait_until("document.documentElement.dataset.drawn > 8")
    assert window.value("document.querySelectorAll('.chart .main-svg').length") > 8
    assert window.value("document.title") != "taken" and window.value("document.querySelectorAll('img').length") == 0
    reward = "document.querySelector('.chart').data[0].y"
    before = window.value(reward)
    window.value("document.getElementById('smoothing').focus()")
    window.press(END)
    window.wait_until("document.getElementById('weight').textContent == '0.99'")
    after = window.value(reward)
    assert after[0] == before[0] and after[1] == pytest.approx((0.0099 * before[0] + 0.01 * before[1]) / 0.0199)
    for name, step in (("from", "2"), ("to", "3")):
        window.value(f"document.getElementById('{name}').focus()")
        window.press(step)
    window.wait_until("document.querySelector('.chart').layout.xaxis.range.join() == '2,3'")


def test_samples_and_steps_of_a_running_run_appear_on_open_pages(window: Browser, address: str, run: Path) -> None:
    """The list keeps its focus, a page of a sample only tells that there is more, and the curves go on."""
    window.open(f"{address}/?order=oldest&words=late")
    window.wait_until("document.getElementById('status').textContent.includes('samples')")
    write(run, [[group(4, 0, ["late one"])]], first=4)
    window.wait_until("document.querySelectorAll('a.open').length == 1")
    window.press("j")
    write(run, [[group(5, 0, ["late two"])]], first=5)
    window.wait_until("document.querySelectorAll('a.open').length == 2")
    assert window.value("document.activeElement == document.querySelector('a.open')")
    window.open(f"{address}/sample/1")
    window.wait_until("document.getElementById('status').textContent.includes('samples')")
    write(run, [[group(6, 0, ["late three"])]], first=6)
    window.wait_until("document.getElementById('status').textContent.includes('1 new')")
    window.open(f"{address}/run")
    window.wait_until("document.querySelectorAll('figure').length > 1")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": 5, "reward/avg_raw_reward": 0.875, "trainer/tokens_per_second": 7.0}) + "\n")
    window.wait_until("document.querySelector('.ends').textContent.includes('0.875')")
    (run / "progress.json").write_text(json.dumps({"state": "finished", "total_steps": 5}), encoding="utf-8")
    window.wait_until("document.querySelector('.state').textContent == 'finished, step 5 of 5'")
