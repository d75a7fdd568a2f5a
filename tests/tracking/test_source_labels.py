"""Any text names a data source: each has a label of its own in metrics and in names of files."""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

import pytest

from skyrl.data.prompts import PromptDataset, data_source_of
from skyrl.processes.naming.names import Entry
from skyrl.processes.naming.names_on_disk import NamesOnDisk
from skyrl.runs.inputs import _tell_the_sources
from skyrl.tools.evaluating import table
from skyrl.tracking.services.mlflow_run import _name as mlflow_name
from skyrl.tracking.source_labels import TAKEN, file_name, source_labels
from skyrl.training.evaluation import with_all
from skyrl.trajectory import Prompt, TrajectoryGroup

USUAL = ("math", "openai/gsm8k", "AIME 2024 (hard)", "数学", "a.b_c-d", "résumé", "x=1,y=2", "default", "a" * 200)
ODD = (
    *("a" * 300, "一" * 29, "é" * 43, "..", "../../etc", "/abs/x", "a//b", "a/../b", "a/.", "a\nb", "\x00", "\x1b[31m"),
    *("\u2028", "", " ", " a ", "https://x.y/z?q=1", 'say "what"', "*", "a\\b", "a|b", "\ud800", *TAKEN, "ALL", "All"),
)


def is_a_path_inside(label: str) -> bool:
    return not any(part.strip(".") == "" for part in label.split("/"))


def test_a_usual_name_is_its_own_label() -> None:
    assert source_labels(USUAL) == {name: name for name in USUAL}


@pytest.mark.parametrize("source", ODD, ids=map(ascii, ODD))
def test_an_odd_name_gets_a_label_that_files_and_metrics_take(tmp_path: Path, source: str) -> None:
    label = source_labels([source])[source]
    assert label != source and label.isprintable() and label.casefold() not in TAKEN and is_a_path_inside(label)
    file = tmp_path / file_name(label, ".jsonl")
    file.write_text("x", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert unquote(file.stem) == label


def test_labels_are_distinct_even_without_case() -> None:
    rng = random.Random(0)
    letters = "aAbB/. _é一\n"
    for _ in range(300):
        sources = {"".join(rng.choices(letters, k=rng.randint(0, 4))) for _ in range(6)} | set(rng.sample(ODD, 3))
        labels = source_labels(sources)
        assert len({label.casefold() for label in labels.values()}) == len(sources)
        assert all(is_a_path_inside(label) for label in labels.values())


def test_labels_do_not_depend_on_the_order() -> None:
    assert source_labels(["Math", "math", "x"]) == source_labels(["x", "math", "Math"])
    assert source_labels(["Math", "math"])["math"].startswith("math-")


@pytest.mark.parametrize("row", [{}, {"data_source": None}, {"data_source": ""}, {"data_source": float("nan")}])
def test_a_row_without_a_source_is_of_the_default_one(row: dict[str, object]) -> None:
    assert data_source_of(row) == "default"


def prompt(number: int, source: str = "default") -> Prompt:
    return Prompt(id=f"{number}:0", messages=(), token_ids=(1,), env_class="x", data_source=source)


def test_a_source_called_all_is_not_mistaken_for_all_sources() -> None:
    groups = [TrajectoryGroup(prompt=prompt(0, name), trajectories=()) for name in ("all", "math")]
    by_source = with_all(groups)
    assert len(by_source) == 3 and len(by_source["all"]) == 2


def test_odd_and_pooled_sources_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["a.jsonl", "b.jsonl", "c.jsonl"]
    _tell_the_sources(files, PromptDataset(prompts=(prompt(0), prompt(1), prompt(2, "x\ny"))))
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"the data_source 'x\\ny' is reported as eval/x_y-[0-9a-f]{8}", lines[0])
    assert lines[1] == "rows of a.jsonl, b.jsonl name no data_source, and are reported together as eval/default"
    _tell_the_sources(files, PromptDataset(prompts=(prompt(0), prompt(0), prompt(2, "x"))))
    assert capsys.readouterr().err == ""


def test_the_table_of_an_evaluation_has_sources_with_a_slash() -> None:
    results = {
        "prompts": {"openai/gsm8k": 2, "all": 2},
        "metrics": {"eval/openai/gsm8k/avg_score": 0.5, "eval/all/avg_score": 0.5, "eval/failures": 1.0},
        "intervals": {},
    }
    assert [line.split() for line in islice(table(results), 1, None)] == [
        ["openai/gsm8k", "avg_score", "0.5000"],
        ["all", "avg_score", "0.5000"],
    ]


def test_names_of_mlflow_remain_distinct() -> None:
    names = ["eval/all/loss", "eval/一二/loss", "eval/三四/loss", "eval/__/loss", "eval/a=b/loss", "eval/a%b/loss"]
    mlflow_names = [mlflow_name(name) for name in names]
    assert len({*mlflow_names}) == len(names)
    assert (mlflow_names[0], mlflow_names[3]) == (names[0], names[3])
    assert all(re.fullmatch(r"[\w\-.: /]+", name, re.ASCII) for name in mlflow_names)


@pytest.mark.parametrize("name", ["a" * 300, "一" * 29, "é" * 43, "x/" * 100, "judge"])
def test_a_name_of_any_length_is_published_on_a_disk(tmp_path: Path, name: str) -> None:
    store = NamesOnDisk(tmp_path / "names")
    assert store.add(name, Entry("http://a:1", "me"), 10)
    assert store.add(name + "2", Entry("http://b:1", "me"), 10)
    assert store.find(name) == {name: "http://a:1", name + "2": "http://b:1"}
    store.remove(name, "me")
    assert store.get(name) is None and store.get(name + "2") == "http://b:1"
