"""Whole runs of a nano model, in this process."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import cattrs
import pytest
import torch
from safetensors.torch import load_file

from skyrl.checkpoint.store import CheckpointStore
from skyrl.config import SkyRLTrainConfig
from skyrl.errors import ConfigError, DataError, NonFiniteError, ResumeError, RewardError, TaskError, UserError
from skyrl.experiments import ppo
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs.checkpoint_manager import CheckpointManager
from skyrl.runs.run_lock import RunLock
from skyrl.runs.summary import summary
from skyrl.training.objective import policy_objective
from tests.long_cases import long_except
from tests.nano_run import config, metrics, overrides, train

DETERMINISTIC: dict[str, Any] = {"trainer__deterministic": True}


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "run" / "model" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = final_weights(one), final_weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_tree_that_was_only_resolved_is_checked_before_anything_starts(nano: Path, tmp_path: Path) -> None:
    run = SkyRLTrainConfig.from_cli_overrides(
        overrides(nano, tmp_path, trainer__train_batch_size=7, trainer__policy_mini_batch_size=3)
    )
    with pytest.raises(ConfigError, match="3 prompts do not divide"):
        BasePPOExp(run).run()
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_leaves_its_configuration_metrics_samples_curve_and_model(nano: Path, tmp_path: Path) -> None:
    experiment = BasePPOExp(config(nano, tmp_path))
    experiment.run()
    folder = tmp_path / "run"
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert cattrs.structure(stored["config"], SkyRLTrainConfig) == experiment.cfg
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in metrics(tmp_path) if "eval/all/avg_score" in row] == [0, 3, 6]
    samples = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 6 * 4 * 3
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    for step in steps:
        per_second = step["generate/num_tokens"] / step["timing/step"]
        assert step["trainer/tokens_per_second"] == pytest.approx(per_second)
    assert (folder / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "progress.json").read_text())["name"] == str(folder)  # the title of the live panel
    assert list(summary(experiment.cfg, experiment.folder))[-1].startswith("accuracy before 0.")


@pytest.fixture(scope="module")
def finished(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps. Its tests share one process, and leave it as it is."""
    out = tmp_path_factory.mktemp("finished")
    train(nano, out)
    return out


def test_the_policy_learns_what_is_rewarded(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__epochs=4, generator__n_samples_per_prompt=8, trainer__eval_interval=-1)
    rewards = [row["reward/avg_raw_reward"] for row in metrics(tmp_path) if "reward/avg_raw_reward" in row]
    assert sum(rewards[:4]) / 4 < 0.4
    assert sum(rewards[-4:]) / 4 > 0.8


@pytest.mark.long
@pytest.mark.xdist_group("finished_run")
def test_the_trained_model_loads_in_transformers_and_is_the_last_checkpoint(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / "run" / "model")
    assert AutoTokenizer.from_pretrained(finished / "run" / "model").decode(model.config.eos_token_id) == "<|end|>"
    latest = CheckpointStore(finished / "checkpoints").latest()
    assert latest is not None and latest.step == 6
    for name, weight in model.named_parameters():
        assert torch.equal(latest.models["policy"][f"model.{name}"], weight.detach())


def test_two_deterministic_runs_write_the_same_metrics_and_weights(nano: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(nano, tmp_path / name, **DETERMINISTIC)
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
def test_a_run_that_was_stopped_and_made_longer_ends_like_one_that_was_not(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path / "whole", **DETERMINISTIC)
    train(nano, tmp_path / "stopped", **DETERMINISTIC, trainer__max_training_steps=3)
    train(nano, tmp_path / "stopped", **DETERMINISTIC)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


OTHER_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"trainer__algorithm__use_kl_loss": True, "trainer__use_sample_packing": False},
    {
        "trainer__policy__optimizer_config__scheduler": "cosine",
        "trainer__policy__optimizer_config__num_warmup_steps": 2,
        "trainer__policy_mini_batch_size": 2,
        "trainer__micro_train_batch_size_per_gpu": 3,
        "trainer__update_epochs_per_batch": 2,
    },
)


@pytest.mark.parametrize("settings", long_except(OTHER_SETTINGS, OTHER_SETTINGS[-1]))
@pytest.mark.parametrize("moment", long_except(["_record_samples", "save", "after save", "export"], "_record_samples"))
def test_a_run_that_died_at_any_moment_ends_like_one_that_did_not(
    nano: Path, tmp_path: Path, moment: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**DETERMINISTIC, "trainer__ckpt_interval": 3, **settings}
    method = moment.removeprefix("after ")
    owner: Any = CheckpointManager if method == "save" else BasePPOExp
    original = getattr(owner, method)
    times: list[Any] = []

    def dies_in(call: Callable[..., Any]) -> Callable[..., Any]:
        def dies(self: Any, *arguments: Any) -> None:
            times.append(arguments)
            if len(times) < 4:
                call(self, *arguments)
                return
            raise KeyboardInterrupt

        async def dies_later(self: Any, *arguments: Any) -> None:
            if moment.startswith("after"):
                await call(self, *arguments)
            raise KeyboardInterrupt

        return dies_later if inspect.iscoroutinefunction(call) else dies

    train(nano, tmp_path / "whole", **changes)
    with monkeypatch.context() as dying:
        dying.setattr(owner, method, dies_in(original))
        with pytest.raises(KeyboardInterrupt):
            train(nano, tmp_path / "died", **changes)
    train(nano, tmp_path / "died", **changes)
    assert metrics(tmp_path / "died") == metrics(tmp_path / "whole")
    assert_same_weights(tmp_path / "died", tmp_path / "whole")
    samples = (tmp_path / "died" / "run" / "trajectories.jsonl").read_text(encoding="utf-8")
    assert samples == (tmp_path / "whole" / "run" / "trajectories.jsonl").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_run_that_failed_before_it_kept_anything_leaves_its_folders_free(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken(completion, **others):\n    return None\n", encoding="utf-8")
    with pytest.raises(RewardError):
        train(nano, tmp_path, environment__env_class=f"{file}:broken")
    train(nano, tmp_path, trainer__max_training_steps=1)


@pytest.mark.long
@pytest.mark.xdist_group("finished_run")
def test_a_finished_run_is_not_trained_again(nano: Path, finished: Path) -> None:
    assert BasePPOExp(config(nano, finished)).run() is False
    assert [row["step"] for row in metrics(finished)][-1] == 6


@pytest.mark.xdist_group("finished_run")
def test_a_folder_refuses_another_run_with_the_difference(nano: Path, finished: Path) -> None:
    with pytest.raises(ResumeError, match=r"optimizer_config.lr: 0.01 there, 0.02 here(.|\n)*trainer.run_path"):
        train(nano, finished, trainer__policy__optimizer_config__lr=0.02)


@pytest.mark.xdist_group("finished_run")
def test_checkpoints_of_another_run_are_refused_in_a_new_folder_too(nano: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"trainer.seed: 42 there, 7 here(.|\n)*trainer.ckpt_path"):
        train(nano, finished, trainer__seed=7, trainer__run_path=str(tmp_path / "elsewhere"))


@pytest.mark.long
def test_fields_that_change_no_number_may_differ_on_resume(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__max_training_steps=4)
    assert BasePPOExp(config(nano, tmp_path, trainer__run_name="other", trainer__eval_interval=2)).run() is True


@pytest.mark.xdist_group("finished_run")
def test_without_resuming_nothing_that_is_there_is_overwritten(nano: Path, finished: Path) -> None:
    with pytest.raises(ResumeError, match=r"later steps \(2, 4, 6\), which this run would overwrite"):
        train(nano, finished, trainer__resume_mode="none")


@pytest.mark.long
def test_a_trained_model_without_checkpoints_is_not_replaced(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__ckpt_interval=-1)
    with pytest.raises(ResumeError, match="contains a trained model, but no checkpoint to continue from"):
        train(nano, tmp_path, trainer__ckpt_interval=-1)


@pytest.mark.long
def test_a_run_that_stopped_just_before_its_end_still_leaves_its_model(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path)
    before = final_weights(tmp_path)
    shutil.rmtree(tmp_path / "run" / "model")
    assert BasePPOExp(config(nano, tmp_path)).run() is False
    assert all(torch.equal(weight, before[name]) for name, weight in final_weights(tmp_path).items())


@pytest.mark.long
def test_a_finished_run_can_be_made_longer(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__max_training_steps=4)
    train(nano, tmp_path)
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_an_earlier_checkpoint_is_not_continued_among_later_ones(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path)
    shutil.rmtree(tmp_path / "run")
    named = {"trainer__resume_mode": "from_path", "trainer__resume_path": str(tmp_path / "checkpoints/global_step_2")}
    with pytest.raises(ResumeError, match=r"later steps \(4, 6\)"):
        train(nano, tmp_path, **named)


def test_a_run_that_cannot_save_says_so_before_it_trains(nano: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"trainer\.ckpt_path = .*file.* cannot be written to"):
        train(nano, tmp_path, trainer__ckpt_path=str(tmp_path / "file"))


@pytest.mark.long
def test_data_that_changed_under_a_run_is_noticed(nano: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    lines = (nano / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    data.write_text("".join(lines), encoding="utf-8")
    train(nano, tmp_path, data__train_data=[str(data)], trainer__max_training_steps=2)
    data.write_text("".join(reversed(lines)), encoding="utf-8")
    with pytest.raises(ResumeError, match="the training data is not what it was"):
        train(nano, tmp_path, data__train_data=[str(data)])


def test_a_row_with_an_unknown_task_is_told_before_anything_is_made(nano: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    row = {"prompt": [{"role": "user", "content": "a"}], "env_class": "elsewhere.py:task"}
    data.write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    with pytest.raises(TaskError, match="elsewhere.py:task"):
        train(nano, tmp_path, data__train_data=[str(data)])
    assert not (tmp_path / "run").exists()


def test_an_answer_that_does_not_fit_into_the_model_is_refused(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="max_generate_length = 70 do not fit into the 64 positions"):
        train(nano, tmp_path, generator__sampling_params__max_generate_length=70)


def test_a_model_that_vllm_cannot_compute_is_refused_before_anything_is_made(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention heads have 8 dimensions; vLLM on a CPU computes"):
        train(nano, tmp_path, generator__inference_engine__backend="vllm")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_mini_batch_without_a_finished_answer_is_skipped_and_counted(nano: Path, tmp_path: Path) -> None:
    several = {"trainer__policy_mini_batch_size": 1, "trainer__micro_train_batch_size_per_gpu": 3}
    train(
        nano,
        tmp_path,
        **several,
        generator__apply_overlong_filtering=True,
        generator__sampling_params__max_generate_length=40,
    )
    skipped = [row["policy/mini_batches_without_a_token"] for row in metrics(tmp_path)[1:]]
    assert max(skipped) > 0


@pytest.mark.long
def test_a_named_checkpoint_is_the_one_that_is_resumed(nano: Path, tmp_path: Path) -> None:
    changes = {**DETERMINISTIC}
    train(nano, tmp_path / "one", **changes)
    two = {"trainer__resume_mode": "from_path", "trainer__resume_path": str(tmp_path / "one/checkpoints/global_step_2")}
    train(nano, tmp_path / "two", **changes, **two)
    assert [row["step"] for row in metrics(tmp_path / "two")] == [3, 4, 5, 6]
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
def test_a_second_process_in_the_same_folder_is_told_who_has_it(nano: Path, tmp_path: Path) -> None:
    for folder, field in (
        ("run", "trainer.run_path"),
        ("checkpoints", "trainer.ckpt_path"),
        ("exports", "trainer.export_path"),
    ):
        holder = RunLock(tmp_path / folder, field, config(nano, tmp_path))
        holder.acquire()
        try:
            with pytest.raises(UserError, match=rf"in use by another run(.|\n)*{field}"):
                train(nano, tmp_path)
        finally:
            holder.release()
    train(nano, tmp_path)


def test_a_batch_larger_than_the_data_is_refused_before_anything_is_made(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train_batch_size = 32 prompts, but the training data has 24"):
        train(nano, tmp_path, trainer__train_batch_size=32, trainer__policy_mini_batch_size=32)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_several_updates_on_one_batch_score_it_first_and_clip(nano: Path, tmp_path: Path) -> None:
    several = {"trainer__policy_mini_batch_size": 2, "trainer__update_epochs_per_batch": 2}
    train(nano, tmp_path, **several, trainer__micro_train_batch_size_per_gpu=3, trainer__max_training_steps=2)
    raw = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all("timing/policy_logprobs" in row for row in raw[1:])
    assert any(row["policy/clip_ratio"] > 0 for row in raw[1:])


def test_one_update_on_a_batch_needs_no_scoring_pass(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__max_training_steps=2)
    raw = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all("timing/policy_logprobs" not in row for row in raw)


@pytest.mark.long
def test_a_kl_loss_pulls_towards_the_reference(nano: Path, tmp_path: Path) -> None:
    drift = {}
    for coefficient in (1e-9, 5.0):
        out = tmp_path / str(coefficient)
        kl = {"trainer__algorithm__use_kl_loss": True, "trainer__algorithm__kl_loss_coef": coefficient}
        train(nano, out, **kl, trainer__epochs=4, trainer__eval_interval=-1)
        drift[coefficient] = metrics(out)[-1]["policy/policy_kl"]
    assert 0 < 2 * drift[5.0] < drift[1e-9]


@pytest.mark.xdist_group("finished_run")
def test_the_engine_and_the_learner_agree_on_every_token(finished: Path) -> None:
    gaps = [row["policy/rollout_train_logprobs_abs_diff_max"] for row in metrics(finished) if row["step"]]
    assert max(gaps) < 1e-4


class Poisoned:
    """An objective whose loss is infinite in some of the updates, counted from 1."""

    def __init__(self, original: Any, at: Container[int]) -> None:
        self.original, self.at, self.updates = original, at, 0

    def weigh(self, batch: Any) -> Any:
        self.updates += 1
        return self.original.weigh(batch)

    def measured_only(self, batch: Any) -> Any:
        return self.original.measured_only(batch)

    def __call__(self, logprobs: torch.Tensor, batch: Any, entropy: torch.Tensor | None) -> Any:
        loss, *rest = self.original(logprobs, batch, entropy)
        return (loss * float("inf") if self.updates in self.at else loss), *rest


def poison(monkeypatch: pytest.MonkeyPatch, at: Container[int]) -> None:
    monkeypatch.setattr(ppo, "policy_objective", lambda *args, **rows: Poisoned(policy_objective(*args, **rows), at))


@pytest.mark.long
def test_an_update_whose_gradient_is_not_finite_is_left_out_and_counted(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, at=[2])
    train(nano, tmp_path)
    assert [row["policy/skipped_updates"] for row in metrics(tmp_path) if row["step"]] == [0, 1, 0, 0, 0, 0]


def test_updates_that_are_left_out_too_often_stop_the_run_before_the_step(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, at=range(3, 100))
    changes = {"trainer__policy__optimizer_config__max_skipped_updates": 1, "trainer__ckpt_interval": 5}
    with pytest.raises(NonFiniteError, match="2 times in a row(.|\n)*optimizer step was not taken"):
        train(nano, tmp_path, **changes)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_reward_function_that_fails_ends_the_run_with_its_name(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken(completion, **others):\n    raise RuntimeError('no')\n", encoding="utf-8")
    with pytest.raises(RewardError, match=r"broken.py:broken, judging .* raised RuntimeError: no"):
        train(nano, tmp_path, environment__env_class=f"{file}:broken")


async def test_a_run_trains_under_a_running_event_loop_as_in_a_notebook(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, trainer__max_training_steps=1, trainer__eval_interval=-1)
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1]
    assert not (tmp_path / "run" / ".owner").exists()


def test_a_run_that_fails_before_it_kept_anything_leaves_no_lock_behind(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken(completion, **others):\n    raise RuntimeError('no')\n", encoding="utf-8")
    with pytest.raises(RewardError, match=r"broken.py:2, in broken"):
        train(nano, tmp_path, environment__env_class=f"{file}:broken")
    assert not [*tmp_path.rglob(".lock"), *tmp_path.rglob(".owner")]
