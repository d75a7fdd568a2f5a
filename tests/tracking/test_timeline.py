"""Timelines as Chrome traces: tracks, lanes and times."""

from __future__ import annotations

from typing import Any

from skyrl.tracking.timeline import chrome_trace


def events(*records: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Track, lane, name, begin and length in seconds of each span."""
    trace = chrome_trace(records)["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    return [
        (tracks[event["pid"]], event["tid"], event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in trace
        if event["ph"] == "X"
    ]


def test_phases_nest_on_one_track_and_each_process_has_its_own() -> None:
    spans = [["generate", 0.0, 2.0], ["engine-0 in E.generate", 0.5, 1.5], ["step", 0.0, 3.0], ["train", 2.0, 3.0]]
    assert events({"step": 7, "spans": spans}) == [
        ("phases", 0, "step 7", 0.0, 3.0),
        ("phases", 0, "generate", 0.0, 2.0),
        ("engine-0", 0, "E.generate", 0.5, 1.0),
        ("phases", 0, "train", 2.0, 1.0),
    ]


def test_calls_of_one_process_that_overlap_lie_on_several_lanes() -> None:
    spans = [["e in a", 0.0, 2.0], ["e in b", 1.0, 3.0], ["e in c", 2.0, 4.0]]
    assert [(name, lane) for _, lane, name, _, _ in events({"step": 1, "spans": spans})] == [
        ("a", 0),
        ("b", 1),
        ("c", 0),
    ]


def test_a_step_begins_where_the_one_before_it_ends() -> None:
    two = [{"step": step, "spans": [["step", 0.0, 2.0]]} for step in (3, 9)]
    assert [(name, begin) for _, _, name, begin, _ in events(*two)] == [("step 3", 0.0), ("step 9", 2.0)]
