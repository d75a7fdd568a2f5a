"""Recorded runs of the nano model: run again, fed into other runs, and compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from skyrl.cli.main import cli, main
from skyrl.config import compose
from skyrl.errors import ConfigError, DataError, UserError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs.run_folder import RunFolder
from skyrl.tools.comparing import bisect
from skyrl.tools.replay import Replay
from tests.nano_run import config, overrides, train

pytestmark = pytest.mark.xdist_group("replay")

RECORDED: dict[str, Any] = {
    "trainer__recording": "jsonl",
    "trainer__deterministic": True,
    "trainer__eval_before_train": False,
    "trainer__eval_interval": -1,
    "trainer__ckpt_interval": 4,
    "trainer__policy_mini_batch_size": 2,
    "trainer__micro_train_batch_size_per_gpu": 3,
    "trainer__algorithm__use_kl_loss": True,
    "trainer__policy__optimizer_config__scheduler": "linear",
}
"""Two updates a step, so that there are old log-probabilities; reference log-probabilities; a rate that falls. What is
sampled repeats itself, so that two runs can be compared."""


@pytest.fixture(scope="module")
def original(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of six recorded steps, with a checkpoint after the fourth and the sixth. Not to be written to."""
    out = tmp_path_factory.mktemp("original")
    train(nano, out, **RECORDED)
    return out


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    return shutil.copytree(original / "run", tmp_path / "copied")


@pytest.mark.long
def test_the_tokens_that_a_run_keeps_for_people_are_those_that_it_recorded(original: Path) -> None:
    folder = RunFolder(original / "run")
    for step in range(1, 7):
        batch = folder.recording().computed(step).tensors
        row = 0
        for number in range(4):
            table = folder.samples.tokens.read(step, number)
            assert table is not None and len(table.columns["sample"]) == 3
            for at, (prompt, answer) in enumerate(
                zip(table.columns["prompt_ids"], table.columns["response_ids"], strict=True)
            ):
                span = slice(len(prompt), len(prompt) + len(answer))
                assert batch["input_ids"][row, span].tolist() == answer
                for name in ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "rewards", "advantages"):
                    assert batch[name][row, span].tolist() == table.columns[name][at]
                row += 1
        assert row == len(batch["input_ids"])


def change(folder: Path, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """By hand, in the third group of a step's recording."""
    file = folder / "recording" / f"step_{step:06}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    group = json.loads(lines[3])
    edit(group)
    file.write_text("\n".join([*lines[:3], json.dumps(group), *lines[4:]]) + "\n", encoding="utf-8")


def more_reward(group: dict[str, Any]) -> None:
    group["trajectories"][1]["rewards"][0]["reward"] += 1.0


def test_every_recorded_step_comes_out_bit_equal(original: Path) -> None:
    samples = (original / "run" / "trajectories.jsonl").read_bytes()
    steps = list(Replay(original / "run").run(range(1, 7)))
    assert (original / "run" / "trajectories.jsonl").read_bytes() == samples
    assert [step.computed.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.differences for step in steps] == [()] * 6
    assert list(steps[0].computed.tensors) == [
        *("input_ids", "loss_mask", "rollout_logprobs"),
        *("old_logprobs", "ref_logprobs", "rewards", "advantages"),
    ]
    assert len(steps[0].computed.updates) == 2


def test_a_step_is_reached_from_the_last_checkpoint_before_it(original: Path) -> None:
    replay = Replay(original / "run")
    assert [replay.start_for(step) for step in (1, 4, 5, 6)] == [0, 0, 4, 4]
    steps = list(replay.run(range(6, 7)))
    assert [(step.computed.step, step.differences) for step in steps] == [(5, ()), (6, ())]


def test_a_reward_changed_by_hand_is_named_with_its_step_and_what_follows_from_it(copied: Path) -> None:
    change(copied, 5, more_reward)
    step = next(iter(Replay(copied).run(range(5, 6))))
    first, *rest = step.differences
    assert (step.computed.step, first.quantity) == (5, "rewards")
    assert first.where.startswith("row 7 (prompt ")  # two groups of three, then the second sample
    assert float(first.other) - float(first.one) == 1.0
    assert [difference.quantity for difference in rest][:2] == ["advantages", "policy loss"]
    assert {"policy grad_norm", "policy weights"} <= {difference.quantity for difference in rest}


def test_a_token_changed_by_hand_is_named(copied: Path) -> None:
    def other_token(group: dict[str, Any]) -> None:
        group["trajectories"][0]["response_ids"][0] ^= 1

    change(copied, 5, other_token)
    first, *_ = next(iter(Replay(copied).run(range(5, 6)))).differences
    assert (first.quantity, first.where.split(" (")[0]) == ("input_ids", "row 6")


@pytest.mark.long
def test_a_run_with_a_critic_is_replayed_too(nano: Path, tmp_path: Path) -> None:
    critic: dict[str, Any] = {
        "trainer__critic__model__path": str(nano / "model"),
        "trainer__critic_mini_batch_size": 4,
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__max_training_steps": 3,
        "trainer__ckpt_interval": 2,
        "trainer__deterministic": False,  # a step that is run again does not need it
    }
    train(nano, tmp_path, **(RECORDED | critic))
    (step,) = Replay(tmp_path / "run").run(range(3, 4))
    assert step.differences == ()
    assert {"values", "returns"} <= step.computed.tensors.keys()
    assert [update.learner for update in step.computed.updates] == ["critic", "policy", "policy"]
    assert step.computed.weights.keys() == {"policy", "critic"}


def test_a_run_without_a_recording_cannot_be_replayed_and_says_what_was_missing(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__max_training_steps=1, trainer__eval_interval=-1)
    with pytest.raises(DataError, match=r"there is no recording in .*trainer\.recording is jsonl"):
        Replay(tmp_path / "run")
    with pytest.raises(UserError, match=r"is not the folder of a run: it contains no config\.json"):
        Replay(tmp_path)


class NoEngines(BasePPOExp):
    def get_inference_client(self) -> Any:
        raise AssertionError("an engine was asked for")

    def get_train_dataset(self) -> Any:
        raise AssertionError("prompts were asked for")


FED = RECORDED | {"trainer__recording": "off", "data__train_data": []}


@pytest.mark.long
def test_a_run_is_fed_from_a_recording_without_engine_or_data(nano: Path, original: Path, tmp_path: Path) -> None:
    experiment = NoEngines(config(nano, tmp_path, **FED, trainer__rollouts_from=str(original / "run")))
    assert experiment.run()
    replayed, recorded = (load_file(out / "run" / "model" / "model.safetensors") for out in (tmp_path, original))
    assert replayed.keys() == recorded.keys()
    assert all(torch.equal(replayed[name], recorded[name]) for name in replayed)


@pytest.mark.long
def test_a_fed_run_that_was_stopped_goes_on_where_it_was(nano: Path, original: Path, tmp_path: Path) -> None:
    fed: dict[str, Any] = {**FED, "trainer__rollouts_from": str(original / "run"), "trainer__recording": "jsonl.gz"}
    fed["trainer__policy__optimizer_config__scheduler"] = "constant_with_warmup"
    train(nano, tmp_path, **fed, trainer__max_training_steps=3)
    train(nano, tmp_path, **fed)
    train(nano, tmp_path / "whole", **fed)
    parting = bisect(tmp_path / "run", tmp_path / "whole" / "run")
    assert (parting.compared, parting.differences, parting.configuration) == ((1, 2, 3, 4, 5, 6), (), {})


def test_a_recording_of_other_batches_is_refused(nano: Path, original: Path, tmp_path: Path) -> None:
    fed = FED | {"trainer__rollouts_from": str(original / "run"), "trainer__train_batch_size": 2}
    with pytest.raises(DataError, match=r"has 4 groups, and trainer\.train_batch_size is 2"):
        train(nano, tmp_path, **fed)


def test_evaluation_without_an_engine_is_refused(nano: Path, original: Path, tmp_path: Path) -> None:
    values = overrides(nano, tmp_path, trainer__rollouts_from=str(original / "run"))
    with pytest.raises(ConfigError, match="on recorded rollouts has no engine, but evaluation is on"):
        compose([], values)


@pytest.mark.long
def test_two_runs_of_one_configuration_do_not_part(nano: Path, original: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, **RECORDED)
    parting = bisect(original / "run", tmp_path / "run")
    assert (parting.configuration, parting.differences, parting.compared) == ({}, (), (1, 2, 3, 4, 5, 6))


@pytest.mark.long
def test_another_seed_parts_in_the_order_of_the_data(nano: Path, original: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, **RECORDED, trainer__seed=7, trainer__max_training_steps=1)
    parting = bisect(original / "run", tmp_path / "run")
    assert parting.configuration == {"trainer.seed": (42, 7)}
    assert (parting.compared, parting.differences[0].quantity) == ((1,), "data order")
    assert parting.only_in_one == (2, 3, 4, 5, 6)


def test_another_learning_rate_parts_in_the_updates_of_the_first_step(
    nano: Path, original: Path, tmp_path: Path
) -> None:
    rate = {"trainer__policy__optimizer_config__lr": 2e-2, "trainer__max_training_steps": 1}
    train(nano, tmp_path, **(RECORDED | rate))
    parting = bisect(original / "run", tmp_path / "run")
    assert list(parting.configuration) == ["trainer.policy.optimizer_config.lr"]
    assert parting.differences[0].quantity == "policy loss"
    assert parting.differences[0].where.startswith("update 1, ")  # the first began with the same weights
    assert parting.differences[-1].quantity == "policy weights"


@pytest.mark.parametrize(
    ("part", "quantity", "where"),
    [
        ("response_ids", "sampled tokens", "token 0"),
        ("rollout_logprobs", "log-probabilities of the engine", "token 0"),
        ("loss_mask", "loss mask", "token 0"),
    ],
)
def test_the_first_token_that_differs_is_named(
    part: str, quantity: str, where: str, original: Path, copied: Path
) -> None:
    def other(group: dict[str, Any]) -> None:
        group["trajectories"][2][part][0] = 1 - group["trajectories"][2][part][0]

    change(copied, 4, other)
    parting = bisect(original / "run", copied)
    assert parting.compared == (1, 2, 3, 4)
    (difference,) = parting.differences
    assert (difference.quantity, difference.where.split(", ")[1:]) == (quantity, ["sample 2", where])
    assert difference.where.startswith("group 2 (prompt ")


@pytest.mark.long
def test_runs_without_recordings_are_compared_by_their_metrics(nano: Path, original: Path, tmp_path: Path) -> None:
    plain = RECORDED | {"trainer__recording": "off", "trainer__max_training_steps": 2}
    train(nano, tmp_path, **plain, trainer__algorithm__kl_loss_coef=0.5)
    parting = bisect(original / "run", tmp_path / "run")
    assert not parting.recorded
    assert parting.compared == (0, 1)
    assert {difference.quantity for difference in parting.differences} == {"metrics"}
    assert "policy/final_loss" in {difference.where for difference in parting.differences}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((name, False) for name in ("memory/process_bytes", "timing/step", "timing/phase_of_mine")),
        *((name, False) for name in ("trainer/tokens_per_second", "generate/trajectory_time_env_run_p90")),
        *((name, False) for name in ("trackers/wandb_steps_behind", "inference/engine_restarts", "alarm/slow")),
        *((name, True) for name in ("reward/avg_raw_reward", "environment/turns", "generate/num_tokens", "mine/kl")),
    ],
)
def test_only_metrics_of_what_is_computed_part_two_runs(name: str, parts: bool, original: Path, tmp_path: Path) -> None:
    folders = [tmp_path / folder_name for folder_name in ("one", "other")]
    for value, folder in enumerate(folders):
        folder.mkdir()
        shutil.copy(original / "run" / "config.json", folder)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "policy/grad_norm": 1.0, name: value}) + "\n")
    assert [difference.where for difference in bisect(*folders).differences] == [name] * parts


@pytest.mark.long
def test_the_commands_say_what_was_found_and_exit_with_it(original: Path, copied: Path) -> None:
    run, command = str(original / "run"), CliRunner()
    same = command.invoke(cli, ["replay", run, "--step", "5-6"])
    assert (same.exit_code, same.output.splitlines()[0]) == (0, "from the checkpoint of step 4")
    assert [line[:20] for line in same.output.splitlines()[1:]] == ["step 5 is bit-equal:", "step 6 is bit-equal:"]
    change(copied, 6, more_reward)
    other = command.invoke(cli, ["replay", str(copied), "--step", "6"])
    assert other.exit_code == 1
    assert "step 6 differs, first in rewards:\n  row 7 (prompt " in other.output
    assert "  then in: advantages, policy loss, " in other.output
    with pytest.raises(SystemExit, match="1"):  # as the shell sees it
        main(["bisect", run, str(copied)])
    parted = command.invoke(cli, ["bisect", run, str(copied)])
    assert parted.exit_code == 1
    assert (
        "recordings are equal in 5 steps, 1 to 5\nstep 6 diverges, first in raw rewards:\n  group 2 " in parted.output
    )
    assert command.invoke(cli, ["bisect", run, run]).output == "recordings are equal in 6 steps, 1 to 6\n"
    assert "'x' is not a step: write 7 or 3-7" in command.invoke(cli, ["replay", run, "--step", "x"]).output


@pytest.mark.long
def test_steps_of_two_ranks_on_ray_come_out_bit_equal(nano: Path, tmp_path: Path) -> None:
    on_ray: dict[str, Any] = {
        "trainer__placement__executor": "ray",
        "trainer__placement__colocate_all": False,
        "trainer__placement__policy_num_gpus_per_node": 2,
        "trainer__placement__ref_num_gpus_per_node": 2,
        "trainer__ckpt_interval": 2,
    }
    train(nano, tmp_path, **(RECORDED | on_ray))
    steps = list(Replay(tmp_path / "run").run(range(3, 6)))
    assert [(step.computed.step, step.differences) for step in steps] == [(3, ()), (4, ()), (5, ())]
