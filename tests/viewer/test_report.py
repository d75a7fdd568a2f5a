"""The file of `skyrl report`: what is in it, and that it asks nothing of any network and runs no script of a model."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cattrs
import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import load, resolve
from skyrl.errors import UserError
from skyrl.viewer.curves import charts
from skyrl.viewer.report import report, settings
from skyrl.viewer.run_card import events
from skyrl.viewer.run_metrics import RunMetrics, Series
from tests.viewer_run import HOSTILE, group, write

STORED = Path(__file__).parents[1] / "stored" / "0.1.0" / "run"
LINES = (
    {"step": 0, "eval/all/avg_score": 0.25, "timing/eval": 1.0},
    {"step": 1, "reward/avg_raw_reward": 0.5, "timing/generate": 2.0, "timing/step": 3.0, "inference/engines_lost": 0},
    {"step": 2, "reward/avg_raw_reward": 0.75, "policy/skipped_updates": 0.5, "inference/engines_lost": 1},
    {"step": 3, "trainer/skipped_steps": 1, "rollout/failures": 4, "inference/engines_lost": 1},
)


def series_of(lines: Sequence[Mapping[str, float]]) -> dict[str, Series]:
    """The series of these lines of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        metrics = RunMetrics(Path(folder))
        metrics.look()
    return metrics.series


def run_at(folder: Path, config: dict[str, Any], text: str = "fine") -> Path:
    """A run with these metrics, one sample, and a configuration."""
    folder.mkdir()
    write(folder, [[group(1, 0, [text], prompt=text)]])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"config": config, "derived": ["a.derived"]}), encoding="utf-8")
    return folder


class Page(HTMLParser):
    """Elements of a file with their attributes, and the texts of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of a run that has a script in every text: prompt, answer, field, alarm and metric."""
    folder = run_at(tmp_path_factory.mktemp("hostile") / "one", {"a": {HOSTILE: HOSTILE}}, text=HOSTILE)
    alarm = json.dumps({"step": 1, "name": HOSTILE, "reason": HOSTILE})
    (folder / "alarms.jsonl").write_text(alarm + "\n", encoding="utf-8")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": 4, f"reward/component/{HOSTILE}": 1.0}) + "\n")
    return Page(report([folder], samples=5))


def test_a_report_names_no_file_and_no_address_to_load(hostile: Page) -> None:
    loaded = [
        attributes.get(name) for _, attributes in hostile.elements for name in ("src", "href", "action", "srcset")
    ]
    assert [address for address in loaded if address and not address.startswith(("#", "data:,"))] == []
    assert [tag for tag, _ in hostile.elements if tag in ("iframe", "object", "embed", "base", "form", "img")] == []


def test_the_policy_of_a_report_allows_its_own_two_scripts_and_no_request(hostile: Page) -> None:
    [policy] = [attributes["content"] or "" for _, attributes in hostile.elements if attributes.get("http-equiv")]
    data, *scripts = hostile.scripts
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = re.findall(r"'sha256-(.*?)'", policy)
    assert allowed == digests and len(allowed) == 2 and json.loads(data)
    assert policy.startswith("default-src 'none'; ") and "connect-src" not in policy and "unsafe-eval" not in policy


def test_an_answer_of_the_model_is_text_in_a_report(hostile: Page) -> None:
    assert len(hostile.scripts) == 3 and "img" not in [tag for tag, _ in hostile.elements]
    assert [name for _, attributes in hostile.elements for name in attributes if name.startswith("on")] == []
    assert hostile.text.count('<script>document.title = "taken"</script>') >= 4


def test_a_chart_has_a_curve_for_each_run_and_metric_and_no_empty_chart_is_drawn() -> None:
    runs = {"a": series_of(LINES), "b": series_of(LINES[:2])}
    drawn = {chart.title: chart.figure for chart in charts(runs)}
    assert list(drawn) == ["Reward", "Evaluation: all", "Engines: lost", "Time by phase: a", "Time by phase: b"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in drawn["Reward"]["data"]] == [
        ("a", [1, 2], [0.5, 0.75]),
        ("b", [1], [0.5]),
    ]
    assert (
        drawn["Time by phase: a"]["layout"]["yaxis"]["range"] == drawn["Time by phase: b"]["layout"]["yaxis"]["range"]
    )


def test_the_memory_of_a_run_is_a_curve() -> None:
    lines = [{"step": 1, "memory/process_bytes": 1e9}, {"step": 2, "memory/process_bytes": 2e9}]
    [chart] = charts({"a": series_of(lines)})
    assert (chart.title, chart.figure["data"][0]["y"]) == ("Memory: process", [1e9, 2e9])
    assert chart.figure["layout"]["yaxis"]["tickformat"] == ".3~s"


def test_time_is_stacked_by_phase() -> None:
    *_, chart = charts({"a": series_of(LINES)})
    traces = chart.figure["data"]
    assert [(trace["name"], trace["x"], trace["y"], trace["stackgroup"]) for trace in traces] == [
        ("generate", [0, 1], [0.0, 2.0], "time"),
        ("eval", [0, 1], [1.0, 0.0], "time"),
    ]


def test_the_events_of_a_run_are_told_in_the_order_of_its_steps(tmp_path: Path) -> None:
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "alarms.jsonl").write_text('{"step": 1, "name": "entropy", "reason": "it fell"}\n', encoding="utf-8")
    assert [(event.step, event.kind) for event in events(tmp_path, series_of(LINES))] == [
        (1, "alarm"),
        (2, "checkpoint"),
        (2, "engines"),
        (2, "skipped update"),
        (3, "failures"),
        (3, "skipped step"),
    ]


def test_configurations_are_compared_with_the_origin_of_each_value(tmp_path: Path) -> None:
    one = run_at(tmp_path / "one", {"kind": "rl", "trainer": {"epochs": 7, "seed": 42}, "a": {"derived": 1}})
    two = run_at(tmp_path / "two", {"kind": "rl", "trainer": {"epochs": 1, "seed": 42}})
    by_path = {setting.path: (setting.values, setting.origins) for setting in settings([one, two])}
    assert by_path["trainer.epochs"] == (("7", "1"), ("written", "default"))
    assert by_path["trainer.seed"] == (("42", "42"), ("default", "default"))
    assert by_path["a.derived"] == (("1", ""), ("derived", "derived"))
    assert [setting.path for setting in settings([one, two]) if setting.differs] == ["trainer.epochs", "a.derived"]


def test_values_are_shown_with_the_place_that_they_were_written_at(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "one", {"kind": "rl", "trainer": {"epochs": 1, "seed": 7, "alarms": {"a": {"b": 1}}}})
    stored = json.loads((folder / "config.json").read_text())
    stored["places"] = {
        "trainer.epochs": "run.toml:3",
        "trainer.alarms": "argument 1",
        "trainer.alarms.a": "argument 2",
    }
    (folder / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    assert {setting.path: setting.origins for setting in settings([folder])} == {
        "kind": ("default",),
        "trainer.epochs": ("run.toml:3",),
        "trainer.seed": ("written",),
        "trainer.alarms.a.b": ("argument 2",),
    }


def test_the_samples_of_a_report_are_bounded_and_spread_over_the_run(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "one", {"a": {}})
    write(folder, [[group(step, 0, [f"answer{step}"])] for step in range(2, 42)], first=2)
    text = Page(report([folder], samples=3)).text
    answers = re.findall(r"assistant\s*(fine|answer\d+)", text)
    assert answers == ["fine", "answer21", "answer41"]


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = [run_at(tmp_path / name / "run", {"a": {}}) for name in "ab"]
    text = Page(report(folders, samples=0)).text
    assert str(folders[0]) in text and str(folders[1]) in text


@pytest.mark.long
def test_the_command_writes_a_report_of_a_run_of_an_earlier_release_and_replaces_no_file_unasked(
    tmp_path: Path,
) -> None:
    file = tmp_path / "seen.html"
    first, second, forced = (
        CliRunner().invoke(cli, ["report", str(STORED), "--to", str(file), *more]) for more in ([], [], ["--force"])
    )
    assert (first.exit_code, forced.exit_code) == (0, 0) and "MB" in first.output, first.output
    assert isinstance(second.exception, UserError) or second.exit_code == 2
    assert "exists: choose another --to" in (str(second.exception) + second.output)
    page = Page(file.read_text(encoding="utf-8"))
    assert "0:16" in page.text
    assert {"policy 0", "engine 0", "node 0"} <= set(re.findall(r"[a-z]+ \d", page.text))
    assert [dict(attrs)["width"] for tag, attrs in page.elements if tag == "svg"] == ["960"]


def test_pictures_of_runs_stand_in_the_report_of_those_that_have_one(tmp_path: Path) -> None:
    folders = [run_at(tmp_path / name, {"a": {}}) for name in ("one", "two")]
    page = Page(report(folders, samples=0, layouts={folders[1]: "<svg><text>GPU 0</text></svg>"}))
    assert [tag for tag, _ in page.elements if tag == "svg"] == ["svg"]
    assert "GPU 0" in page.text and "Layout" in page.text
    assert "Layout" not in Page(report(folders, samples=0)).text


def test_the_models_of_a_run_are_found_where_it_was_started(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(nano / "model", tmp_path / "here" / "model")
    values = {"trainer.policy.model.path": "model", "trainer.run_path": "runs/a", "trainer.device": "cpu"}
    values["generator.inference_engine.backend"] = "torch"
    run = tmp_path / "here" / "runs" / "a"
    run.parent.mkdir()
    run_at(run, cattrs.unstructure(resolve(load([], values))))
    for folder, sizes_known in (("here", True), ("elsewhere", True), ("moved", False)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        if folder == "moved":
            run = run.rename(tmp_path / "moved" / "b")
        result = CliRunner().invoke(cli, ["report", str(run), "--to", str(tmp_path / f"{folder}.html")])
        assert result.exit_code == 0, result.output
        page = (tmp_path / f"{folder}.html").read_text(encoding="utf-8")
        assert ("one process on a CPU" in page) and (("sizes of model are unknown" in page) is not sizes_known)


ODD: tuple[dict[str, object], ...] = (
    *[{"derived": odd} for odd in list[object]([None, 5, "x", [[]], {"a": []}])],
    *[{"places": odd} for odd in list[object]([None, 5, ["x"], {"a": []}])],
    *[dict[str, object](config={"kind": odd}) for odd in list[object]([None, [], {}, 10**400, "\ud800"])],
)


@pytest.mark.parametrize("change", ODD, ids=repr)
def test_the_values_of_an_odd_configuration_are_shown(change: dict[str, Any], tmp_path: Path) -> None:
    stored = json.loads((STORED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | change))
    rows = settings([tmp_path])
    assert rows and all("".join((row.path, *row.values, *row.origins)).encode() for row in rows)


@pytest.mark.parametrize("lines", [None, ""])
def test_a_folder_without_metrics_is_refused(tmp_path: Path, lines: str | None) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(UserError, match=r"has nothing to report: metrics\.jsonl"):
        report([tmp_path], samples=1)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"is not the folder of a run: it contains no config\.json"):
        report([tmp_path], samples=1)


def test_each_start_is_an_event_with_the_end_of_the_session_before_and_what_changed(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "one", {})
    lines: tuple[dict[str, Any], ...] = (
        {"step": 0, "time": "10:00", "changes": {}},
        {"step": 1, "time": "10:01", "before": {"state": "stopped", "step": 1}, "changes": {}},
        {
            "step": 1,
            "time": "10:02",
            "before": {"state": "gone", "step": 3},
            "changes": {"trainer.epochs": ["1", "2"], HOSTILE: 3},
        },
    )
    (folder / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    starts = [(event.step, event.words) for event in events(folder, {}) if event.kind == "start"]
    assert starts == [
        (0, "at 10:00"),
        (1, "at 10:01; the session before was stopped at step 1"),
        (
            1,
            "at 10:02; the session before ended without a word at step 3; trainer.epochs: 1 before, 2 now; "
            f"{HOSTILE}: ? before, ? now",
        ),
    ]
    assert "resumed from steps 1, 1" in Page(report([folder], samples=0)).text
