"""What a run keeps of the steps that are profiled, and of every batch where it is asked to."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from skyrl.cli.main import cli
from skyrl.errors import UserError
from tests.long_cases import long_except
from tests.nano_run import all_metrics, train
from tests.supervised_run import train as supervised

SHORT = {"trainer__max_training_steps": 3, "trainer__policy__record_memory": True}


@pytest.mark.long
def test_the_timeline_of_a_step_agrees_with_its_timings_and_batches_are_dumped(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__profile_steps=[2], trainer__dump_data_batch=True, **SHORT)
    run = tmp_path / "run"
    result = CliRunner().invoke(cli, ["timeline", str(run)], standalone_mode=False)
    assert result.output == f"1 step in {run / 'timeline.json'}: open it in https://ui.perfetto.dev\n"
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"phases", "engine-0", "policy-0"} <= {*tracks.values()}
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"}
    [step] = [record for record in all_metrics(tmp_path) if record["step"] == 2]
    order = [time for name in ("generate", "policy_train", "sync_weights") for time in spans[name]]
    assert [spans["step 2"][0], *order, spans["step 2"][1]] == sorted([*order, *spans["step 2"]]), "one clock"
    assert sorted(str(path.relative_to(run)) for path in run.glob("profile/*/*")) == [
        "profile/step_2/policy-0-update_1-memory.txt",
        "profile/step_2/policy-0-update_1.json.gz",
    ]
    first = (run / "profile" / "step_2" / "policy-0-update_1-memory.txt").read_text().splitlines()[3]
    assert re.search(r"aten::\w+ .* [1-9][\d.]* [KMG]?B ", first), "the operator that allocates most comes first"
    traced = gzip.decompress((run / "profile" / "step_2" / "policy-0-update_1.json.gz").read_bytes()).decode()
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {
        event.get("name") for event in json.loads(traced)["traceEvents"]
    }
    dumped = tmp_path / "exports" / "dumped_data"
    assert sorted(path.name for path in dumped.iterdir()) == [f"global_step_{n}.safetensors" for n in (1, 2, 3)]
    batch = load_file(dumped / "global_step_2.safetensors")
    assert {"input_ids", "loss_mask", "rollout_logprobs", "rewards", "advantages"} <= batch.keys()
    assert batch["rewards"].sum().item() == pytest.approx(step["reward/avg_raw_reward"] * 12)
    with pytest.raises(UserError, match="has no timeline of step 3"):
        CliRunner().invoke(cli, ["timeline", str(run), "--step", "3"], standalone_mode=False, catch_exceptions=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", long_except(["sft", "reward_model", "preference"], "sft"))
def test_supervised_runs_are_profiled_too(nano: Path, tmp_path: Path, kind: str) -> None:
    supervised(nano, tmp_path, kind, profile_steps=[2], record_memory=True, num_steps=3)
    run = tmp_path / "run"
    name = f"{'policy' if kind == 'sft' else 'critic'}-0-update_1"
    assert {str(path.relative_to(run)) for path in run.glob("profile/*/*")} == {
        f"profile/step_2/{name}.json.gz",
        f"profile/step_2/{name}-memory.txt",
    }
    [line] = (run / "timeline.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2 and "update" in {span for span, _, _ in json.loads(line)["spans"]}


@pytest.mark.long
def test_each_rank_on_ray_traces_its_own_updates_and_is_a_track_of_the_timeline(nano: Path, tmp_path: Path) -> None:
    two = {"trainer__placement__policy_num_gpus_per_node": 2, "trainer__placement__executor": "ray"}
    engines = {"generator__inference_engine__num_engines": 2}
    rows = {"trainer__micro_train_batch_size_per_gpu": 6, "trainer__micro_forward_batch_size_per_gpu": 6}
    train(nano, tmp_path, **two, **engines, trainer__profile_steps=[2], trainer__max_training_steps=2, **rows)
    run = tmp_path / "run"
    assert {path.name for path in run.glob("profile/step_2/*")} == {
        "policy-0-update_1.json.gz",
        "policy-1-update_1.json.gz",
    }
    [line] = (run / "timeline.jsonl").read_text().splitlines()
    called = {span.partition(" (")[0] for span, _, _ in json.loads(line)["spans"]}
    assert {"policy-0", "policy-1", "engine-0", "engine-1"} <= called
