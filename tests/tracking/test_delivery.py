"""Each step of a run's folder is delivered once, whatever happens between."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl.storage.json_files import GrowingLines
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.services.follow import Delivery
from skyrl.tracking.services.run_files import LONGEST, SampleTables
from skyrl.tracking.services.service import Known, ServiceRun, ServiceTable, closed, opened, resumable
from tests.tracking.made_runs import REWARD, Listed, append, deliver, listed, make_run, sample, service_run

__all__ = ["listed"]


def steps(service: type[Listed]) -> list[int]:
    return [call[0] for call in service.given if isinstance(call[0], int)]


def test_metrics_samples_and_evaluations_are_delivered_in_order(tmp_path: Path, listed: type[Listed]) -> None:
    deliver(service_run(make_run(tmp_path / "run", (1, 2))))
    assert listed.given == [
        ("config", "test_run"),
        (1, 0.1),
        ("samples", 1, 2),
        (2, 0.2),
        ("evaluation/gsm8k", 2, 1),
        ("samples", 2, 2),
        ("close",),
    ]


def test_what_was_delivered_is_left_out_the_next_time(tmp_path: Path, listed: type[Listed]) -> None:
    run = service_run(make_run(tmp_path / "run", (1, 2)))
    deliver(run)
    append(run.folder, (3,))
    listed.given.clear()
    deliver(run)
    assert listed.given == [("config", "test_run"), (3, 0.3), ("samples", 3, 2), ("close",)]
    assert Known.read(run.state_file) == Known(id="one", step=3)


def test_a_step_is_delivered_when_its_line_is_complete(tmp_path: Path, listed: type[Listed]) -> None:
    run = service_run(make_run(tmp_path / "run", (1,)))
    delivery = Delivery(run)
    with (run.folder / "metrics.jsonl").open("a") as lines:
        lines.write(f'{{"step": 2, "{REWARD}"')
        lines.flush()
        delivery.deliver()
        assert steps(listed) == [1]
        lines.write(": 0.2}\n")
    delivery.deliver()
    assert steps(listed) == [1, 2]


def test_a_service_that_cannot_forget_keeps_its_steps_when_a_run_goes_back(
    tmp_path: Path, listed: type[Listed]
) -> None:
    deliver(service_run(make_run(tmp_path / "run", range(1, 8))))
    resumed = resumed_after(tmp_path / "run", 5)
    assert steps(listed) == [*range(1, 8), *range(8, 13)]
    assert ("lost", "6-7") in listed.given  # the service shows which steps have values of the killed session
    assert Known.read(resumed.state_file).lost == ("6-7",)
    assert Known.read(resumed.state_file).step == 12


def test_a_service_that_can_forget_gets_the_steps_of_the_resumed_run(tmp_path: Path, listed: type[Listed]) -> None:
    listed.rewinds = True
    deliver(service_run(make_run(tmp_path / "run", range(1, 8))))
    resumed_after(tmp_path / "run", 5)
    assert steps(listed) == [*range(1, 8), *range(6, 13)]
    assert ("rewind", 5) in listed.given


def cut_after(folder: Path, step: int) -> None:
    """What a run does to its files when it resumes from a checkpoint, or returns to one."""
    for name in ("metrics", "trajectories"):
        JsonLines(folder / f"{name}.jsonl").forget_after(step)


def resumed_after(folder: Path, step: int) -> ServiceRun:
    """A session that goes on to step 12 from a checkpoint."""
    cut_after(folder, step)
    append(folder, range(step + 1, 13))
    run = service_run(folder, first_step=step)
    deliver(run)
    return run


def test_a_run_that_returned_to_a_checkpoint_in_one_session_logs_no_step_twice(
    tmp_path: Path, listed: type[Listed]
) -> None:
    went_back_to_the_first_of_three(make_run(tmp_path / "run", (1, 2, 3)))
    assert steps(listed) == [1, 2, 3, 4]
    assert tables(listed) == [1, 2, 3, 4]


def test_the_same_run_in_a_service_that_can_forget_has_the_later_values(tmp_path: Path, listed: type[Listed]) -> None:
    listed.rewinds = True
    went_back_to_the_first_of_three(make_run(tmp_path / "run", (1, 2, 3)))
    assert [call for call in listed.given if isinstance(call[0], int)] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (2, 5.2), (3, 5.3), (4, 5.4)
    ]  # fmt: skip
    assert [call for call in listed.given if call[0] == "rewind"] == [("rewind", 1)]
    assert tables(listed) == [1, 2, 2, 3, 4]  # that of step 3 was not complete before


def tables(service: type[Listed]) -> list[int]:
    return [call[1] for call in service.given if call[0] == "samples"]


def went_back_to_the_first_of_three(folder: Path) -> None:
    """A session whose third step is followed by a return to the checkpoint of the first."""
    delivery = Delivery(service_run(folder, first_step=0))
    delivery.deliver()
    cut_after(folder, 1)
    delivery.deliver()  # nothing is new yet
    append(folder, (2, 3), bonus=5.0)
    delivery.deliver()
    append(folder, (4,), bonus=5.0)
    delivery.deliver(at_end=True)
    delivery.close()


def test_no_table_is_made_where_none_is_wanted(tmp_path: Path, listed: type[Listed]) -> None:
    deliver(service_run(make_run(tmp_path / "run", (1, 2)), sample_rows=0))
    assert [call[0] for call in listed.given] == ["config", 1, 2, "close"]


def test_a_run_without_samples_or_metrics_is_delivered_as_it_is(tmp_path: Path, listed: type[Listed]) -> None:
    deliver(service_run(make_run(tmp_path / "run", ())))
    assert listed.given == [("config", "test_run"), ("close",)]


def test_a_table_holds_as_many_rows_as_are_wanted_and_long_texts_cut(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    rows = [sample(1, number) | {"response": "x" * 5_000} for number in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [table] = SampleTables(file, 2).before(2)
    assert len(table.rows) == 2
    assert table.rows[0][-1] == "x" * LONGEST + "… (5000 letters)"


def test_a_cell_cannot_break_out_of_its_table() -> None:
    table = ServiceTable(name="samples", step=1, columns=("a", "b"), rows=[["x|y\n<img src=z>", 1.5]])
    assert table.as_markdown() == "| a | b |\n| --- | --- |\n| x\\|y<br>&lt;img src=z> | 1.5 |"


def test_lines_of_a_file_that_is_not_there_are_none(tmp_path: Path) -> None:
    assert list(GrowingLines(tmp_path / "none.jsonl").new()) == []


def test_a_damaged_record_of_what_is_known_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text('{"id": ')
    assert Known.read(tmp_path / "wandb.json") == Known()


# Folders of offline services


def session(known: Known, folder: Path, step: int, *, close: bool = True) -> Known:
    folder.mkdir()
    known = opened(known, str(folder))
    known = Known(id=known.id, step=step, sessions=known.sessions)
    return closed(known) if close else known


def test_a_folder_that_was_closed_and_holds_no_later_step_stays(tmp_path: Path) -> None:
    known = session(Known(id="one"), tmp_path / "a", 5)
    assert resumable(known, 5) == known and (tmp_path / "a").is_dir()


def test_a_folder_that_was_not_closed_is_written_anew(tmp_path: Path) -> None:
    first = session(Known(id="one"), tmp_path / "a", 5)
    known = session(first, tmp_path / "b", 7, close=False)
    assert resumable(known, None) == first
    assert (tmp_path / "a").is_dir() and not (tmp_path / "b").exists()


def test_folders_with_steps_that_come_again_are_written_anew(tmp_path: Path) -> None:
    first = session(Known(id="one"), tmp_path / "a", 5)
    known = session(session(first, tmp_path / "b", 7), tmp_path / "c", 9)
    assert resumable(known, 6) == first
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_was_synced_is_never_deleted(tmp_path: Path) -> None:
    known = session(Known(id="one"), tmp_path / "a", 7)
    (tmp_path / "a" / "run-one.wandb.synced").touch()
    assert resumable(known, 5) == known and (tmp_path / "a").is_dir()
