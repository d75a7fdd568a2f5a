"""`skyrl templates show` and `skyrl data`: what is learned, as a reader can check it, and what sources hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import DataError
from tests.chats.corpus import SHIPPED
from tests.nano_run import overrides
from tests.supervised_run import settings, toml_file, write


def test_a_template_is_shown_with_what_is_learned_of_nine_forms(nano: Path) -> None:
    result = CliRunner().invoke(cli, ["templates", "show", str(SHIPPED["command-r7b"])])
    assert result.exit_code == 0, result.output
    assert "⟦<|START_RESPONSE|>Four.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧" in result.output
    assert result.output.count("=====") == 11  # nine forms, two of them twice
    of_a_model = CliRunner().invoke(cli, ["templates", "show", str(nano / "model")])
    assert of_a_model.exit_code == 0 and "Four." in of_a_model.output.partition("⟦")[2]


def test_a_row_of_ones_own_data_is_shown_as_it_is_learned(nano: Path, tmp_path: Path) -> None:
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "sft"))
    result = CliRunner().invoke(cli, ["data", "show", file, "--row", "3"])
    assert result.exit_code == 0, result.output
    learned = result.output.partition("⟦")[2].partition("⟧")[0]
    assert learned[:2].isupper() and f"{len(learned[: learned.index('<')]) + 1} of them learned" in result.output
    missing = CliRunner().invoke(cli, ["data", "show", file, "--row", "32"])
    assert missing.exit_code == 1 and "has no row 32" in str(missing.exception or missing.output)


def test_a_message_with_a_weight_of_its_own_is_shown_with_it(nano: Path, tmp_path: Path) -> None:
    messages = [("user", "a", None), ("assistant", "A", 0.5), ("user", "b", None), ("assistant", "B", 1)]
    chat = [{"role": role, "content": text} | ({"weight": w} if w is not None else {}) for role, text, w in messages]
    rows = write(tmp_path / "rows.jsonl", [{"messages": chat}])
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "sft", train_datasets=(rows,)))
    output = CliRunner().invoke(cli, ["data", "show", file]).output
    assert re.findall(r"⟦(.).*?⟧(\*[0-9.]+)?", output) == [("A", "*0.5"), ("B", "")]


LONG = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "ABC" * 8}]


@pytest.mark.parametrize(
    ("changes", "learned", "message"),
    [
        ({}, 25, "29 tokens, 25 of them learned"),
        ({"max_length": 29}, 25, "29 tokens, 25 of them learned"),
        (
            {"max_length": 14, "too_long": "truncate"},
            10,
            "14 tokens, 10 of them learned\ncut: it has 29 tokens, more than max_length = 14 (too_long = truncate)",
        ),
        (
            {"max_length": 14},
            0,
            "29 tokens, 0 of them learned\nthis row is left out: it has 29 tokens, more than max_length = 14 "
            "(too_long = skip)",
        ),
        (
            {"max_length": 4, "too_long": "truncate"},
            0,
            "29 tokens, 0 of them learned\nthis row is left out: it has 29 tokens, more than max_length = 4 "
            "(cut there, nothing of it is learned)",
        ),
    ],
)
def test_a_row_is_shown_as_the_run_trains_it(
    nano: Path, tmp_path: Path, changes: dict[str, Any], learned: int, message: str
) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"messages": LONG}])
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "sft", train_datasets=(rows,), **changes))
    result = CliRunner().invoke(cli, ["data", "show", file])
    assert result.exit_code == 0, result.output
    marked = result.output.partition("⟦")[2].partition("⟧")[0]
    assert marked.replace("<|end|>", "E").replace("\n", "") == ("ABC" * 8 + "E")[:learned]
    assert result.output.endswith(f"\n\n{message}\n")


def test_pairs_and_prompts_that_are_too_long_are_shown_with_their_fate(nano: Path, tmp_path: Path) -> None:
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "reward_model", max_length=4))
    result = CliRunner().invoke(cli, ["data", "show", file])
    assert "===== chosen" in result.output
    assert re.search(
        r"this row is left out: it has \d+ tokens, more than max_length = 4 \(too_long = skip\)\n$", result.output
    )
    words = [f"{name}={value}" for name, value in overrides(nano, tmp_path, trainer__max_prompt_length=1).items()]
    prompt = CliRunner().invoke(cli, ["data", "show", *words]).output
    assert re.search(r" tokens\nthis row is left out: it has more than trainer.max_prompt_length = 1\n$", prompt)


def test_a_prompt_that_is_bad_says_why(nano: Path, tmp_path: Path) -> None:
    rows = write(
        tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "a"}], "ground_truth": "A"}, {"prompt": 5}]
    )
    values = overrides(nano, tmp_path, data__train_data=[rows], data__bad_rows="skip")
    words = [f"{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in values.items()]
    result = CliRunner().invoke(cli, ["data", "show", *words, "--row", "1"])
    assert "rows.jsonl, row 1" in str(result.exception) and str(result.exception).endswith("(data.bad_rows = skip)")
    before_it = CliRunner().invoke(cli, ["data", "show", *words, "data.bad_rows=stop"])
    assert before_it.exit_code == 0 and " tokens; what is sampled" in before_it.output


def test_a_row_that_cannot_be_learned_says_why(nano: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"text": "?", "images": ["x"]}])
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "sft", train_datasets=(rows,)))
    result = CliRunner().invoke(cli, ["data", "show", file])
    assert "row 0: it has images" in str(result.exception or result.output)


def test_pairs_and_prompts_are_shown_too(nano: Path, tmp_path: Path) -> None:
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "reward_model"))
    result = CliRunner().invoke(cli, ["data", "show", file, "--row", "1"])
    assert "===== chosen" in result.output and "===== rejected" in result.output and "margin 0" in result.output
    words = [f"{name}={value}" for name, value in overrides(nano, tmp_path).items()]
    prompt = CliRunner().invoke(cli, ["data", "show", *words])
    assert "what is sampled after them is learned" in prompt.output, prompt.output


def test_a_file_of_prompts_that_is_missing_is_reported_before_a_model_is_looked_for(tmp_path: Path) -> None:
    words = [f'data.train_data=["{tmp_path / "none.jsonl"}"]', "trainer.policy.model.path=nobody/has-this-model"]
    with pytest.raises(DataError, match="none.jsonl"):
        CliRunner().invoke(cli, ["data", "show", *words], standalone_mode=False, catch_exceptions=False)


def inspected(*words: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["data", "inspect", *words, "--json"])
    assert result.exit_code == exit_code, result.output
    output = json.loads(result.stdout)
    assert output["ok"] is (exit_code == 0)
    report: dict[str, Any] = output["result"]
    return report


def test_the_prompts_of_a_run_are_counted_as_the_run_reads_them(nano: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (nano / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4]]
    long = {**rows[0], "prompt": [{"role": "user", "content": "abcdefghijklmnopqrstuvwxyz"}]}
    bad = {**rows[0], "prompt": [{"role": "wizard"}]}
    train = write(tmp_path / "train.jsonl", [*rows, rows[0], long, bad])
    held_out = write(tmp_path / "held_out.jsonl", [rows[1], long])
    values = overrides(nano, tmp_path, data__train_data=[train, "lost.jsonl"], data__val_data=[held_out])
    file = toml_file(tmp_path / "run.toml", values)
    report = inspected(file, exit_code=2)  # one source is lost
    first, lost, other = report["sources"]
    same = len(rows) - len({json.dumps(row["prompt"]) for row in rows})
    assert (first["used"], first["too_long"], len(first["bad"])) == (5, 1, 1)
    assert first["repeated"] == 1 + same
    assert first["columns"]["prompt"] == "list" and first["tokens"]["longest"] > first["bound"] == 16
    assert lost["refused"].startswith("there is no data file lost.jsonl")
    assert (other["part"], other["used"], report["overlap"]) == ("validation", 1, 1)
    output = CliRunner().invoke(cli, ["data", "inspect", file]).output
    assert "  rows      7, of which 5 are used\n" in output
    assert "1 have more than trainer.max_prompt_length = 16 tokens and are left out" in output
    assert output.endswith("1 validation rows are also trained on\n")


@pytest.mark.parametrize("kind", ["sft", "reward_model", "preference"])
def test_rows_of_supervised_runs_are_inspected_too(kind: str, nano: Path, tmp_path: Path) -> None:
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, kind))
    [source] = inspected(file)["sources"]
    assert (source["used"], source["refused"], source["too_long"]) == (32, "", 0)
    [short] = inspected(file, "max_length=4")["sources"]
    assert (short["used"], short["too_long"]) == (0, 32)


def test_a_split_keeps_rows_of_one_prompt_together_and_loses_none(nano: Path, tmp_path: Path) -> None:
    file = toml_file(tmp_path / "run.toml", overrides(nano, tmp_path))
    words = ["data", "split", file, "--out", str(tmp_path / "halves"), "--share", "0.4"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    halves = [
        [json.loads(line) for line in (tmp_path / "halves" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]
        for part in ("train", "validation")
    ]
    rows = [json.loads(line) for line in (nano / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(map(json.dumps, halves[0] + halves[1])) == sorted(map(json.dumps, rows))
    first, second = ({json.dumps(row["prompt"]) for row in half} for half in halves)
    assert first and second and not first & second
    repeated = CliRunner().invoke(cli, words)
    assert repeated.exit_code == 1 and "is there already; name another folder" in str(
        repeated.exception or repeated.output
    )
    nothing = CliRunner().invoke(cli, [*words[:4], str(tmp_path / "none"), "--share", "0.01"])
    assert "leave none for validation" in str(nothing.exception or nothing.output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gsm8"], "there is no maker of 'gsm8' (did you mean gsm8k?); available: gsm8k"),
        (["gsm8k", "--source", "dev=rows.jsonl"], "write one of train=SOURCE, test=SOURCE"),
    ],
)
def test_what_cannot_be_made_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["data", "make", *words, "--out", str(tmp_path)])
    assert message in str(result.exception or result.output)
