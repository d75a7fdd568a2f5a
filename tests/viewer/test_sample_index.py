"""The index of a run's samples: what is found, while the run writes more, cuts back, and writes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import DataError
from skyrl.viewer.sample_filter import SampleFilter, match_of
from skyrl.viewer.sample_index import SampleIndex
from tests.viewer_run import TURNS, group, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of two groups: six samples of the letters a to f, of which one failed, and two of numbers."""
    write(
        tmp_path,
        [
            [group(1, 0, ["a apple", "b banana"]), group(1, 1, ["one", "two"], source="numbers")],
            [group(2, 0, ["c cherry tree", "failure"]), group(2, 3, ["apple cherry", "f"])],
        ],
    )
    return tmp_path


def indexed(folder: Path) -> SampleIndex:
    index = SampleIndex(folder / "trajectories.jsonl", folder / "trajectories.index")
    while index.update(most=3):
        pass
    return index


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ({}, [5, 6, 7, 8, 1, 2, 3, 4]),
        ({"step": 1}, [1, 2, 3, 4]),
        ({"source": "numbers"}, [3, 4]),
        ({"prompt": "0:0", "order": "oldest"}, [1, 2, 5, 6]),
        ({"failed": True}, [6]),
        ({"mixed": True, "step": 2}, [5, 6, 7, 8]),
        ({"mixed": False}, []),
        ({"failed": False, "step": 2}, [5, 7, 8]),
        ({"stop": "length", "order": "oldest"}, [2, 4, 6, 8]),
        ({"least_reward": 1.0, "order": "oldest"}, [2, 4, 6, 8]),
        ({"most_reward": 0.5, "step": 2}, [5, 7]),
        ({"least_length": 8, "order": "longest"}, [5, 7, 2]),
        ({"most_length": 3, "order": "shortest"}, [8, 3, 4]),
        ({"words": "apple"}, [7, 1]),
        ({"words": "cherry apple"}, [7]),
        ({"words": '"apple cherry"'}, [7]),
        ({"words": '"cherry apple"'}, []),
        ({"words": "cher"}, [5, 7]),
        ({"words": "judge away"}, [6]),
        ({"words": "sort", "step": 1}, [1, 2, 3, 4]),
        ({"words": "apple AND banana"}, []),
        ({"words": '" NEAR( *'}, []),
        ({"words": "'; DROP TABLE samples; --"}, []),
    ],
)
def test_samples_are_found_by(folder: Path, criteria: dict[str, Any], expected: list[int]) -> None:
    index, wanted_samples = indexed(folder), SampleFilter(**criteria)
    assert [row["id"] for row in index.rows(wanted_samples)] == expected
    assert index.count(wanted_samples) == len(expected)


def test_the_words_of_a_person_are_never_operators() -> None:
    assert match_of('a* OR "b c" -d "') == '"a*"* "OR"* "b c" "-d"*'
    assert match_of(' " *** ( ') == ""


def test_samples_that_a_run_writes_meanwhile_are_added(folder: Path) -> None:
    index = indexed(folder)
    write(folder, [[group(3, 9, ["late"])]], first=3)
    assert (index.update(), index.update()) == (1, 0)
    assert [row["step"] for row in index.rows(SampleFilter(words="late"))] == [3]


def test_a_line_that_is_not_whole_is_left_for_later(folder: Path) -> None:
    lines = folder / "trajectories.jsonl"
    content = lines.read_bytes()
    lines.write_bytes(content[:-5])
    index = SampleIndex(lines, folder / "trajectories.index")
    assert index.update() == 7
    lines.write_bytes(content)
    assert index.update() == 1 and index.count(SampleFilter()) == 8


def test_an_index_is_built_anew_where_a_run_has_resumed_and_sampled_something_else(folder: Path) -> None:
    before = indexed(folder)
    run = write(folder, [])
    run.forget_after(1)
    write(folder, [[group(2, 0, ["another", "answer"])]], first=2)
    while before.update():
        pass
    assert [row["excerpt"] for row in before.rows(SampleFilter(step=2))] == ["another", "answer"]
    assert before.count(SampleFilter()) == 6 and before.count(SampleFilter(words="cherry")) == 0


def test_a_second_view_reads_no_line_again(folder: Path) -> None:
    indexed(folder)
    second_index = SampleIndex(folder / "trajectories.jsonl", folder / "trajectories.index")
    assert (second_index.update(), second_index.count(SampleFilter())) == (0, 8)


def test_the_record_of_a_sample_that_was_cut_off_meanwhile_is_gone(folder: Path) -> None:
    index = indexed(folder)
    record = index.record(7)
    assert record is not None and record["response"] == "apple cherry"
    write(folder, []).forget_after(1)
    assert index.record(7) is None and index.record(99) is None


def test_a_damaged_index_is_made_anew(folder: Path) -> None:
    (folder / "trajectories.index").write_bytes(b"no database " * 1000)
    assert indexed(folder).count(SampleFilter()) == 8


def test_an_index_that_cannot_be_written_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/index cannot be created: .*; see --index"):
        SampleIndex(folder / "trajectories.jsonl", folder / "nowhere" / "index")


def test_a_row_of_the_list_has_question_answer_and_expected_answer(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, [TURNS], prompt="which  digit,\nfrom 0 to 9?"), group(1, 1, ["same", "{}same"])]])
    first, *others = indexed(tmp_path).rows(SampleFilter(order="oldest"))
    assert (first["prompt"], first["excerpt"]) == ("which digit, from 0 to 9?", "8 ▸ user: higher ▸ 9")
    assert first["expected"] == "which digit, from 0 to 9? in order"
    assert [row["excerpt"] for row in others] == ["same", "same"]


def test_groups_whose_rewards_differ_are_told_from_others(tmp_path: Path) -> None:
    """The n-th sample of a group has the reward n, so a group of one sample has no contrast."""
    write(tmp_path, [[group(1, 0, ["a", "b"]), group(1, 1, ["c"])], [group(2, 0, ["d"])]])
    index = indexed(tmp_path)
    filters = {mixed: SampleFilter(mixed=mixed, order="oldest") for mixed in (True, False)}
    excerpts = {
        mixed: [row["excerpt"] for row in index.rows(sample_filter)] for mixed, sample_filter in filters.items()
    }
    assert excerpts == {True: ["a", "b"], False: ["c", "d"]}


def test_lines_that_are_no_samples_are_passed_over(tmp_path: Path) -> None:
    lines = tmp_path / "trajectories.jsonl"
    lines.write_text('[1]\nnonsense\n{"step": "x"}\n{"step": 1, "reward": "nan"}\n', encoding="utf-8")
    [row] = indexed(tmp_path).rows(SampleFilter())
    assert (row["step"], row["reward"], row["source"]) == (1, None, "default")
