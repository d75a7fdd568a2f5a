"""Whole runs that sample while they train, in this process: equal to synchronous ones where they must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl.batch import TrainingBatch
from skyrl.errors import ResumeError, RunError
from skyrl.inference.torch.engine import TorchEngine
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.training.describe import Metrics
from tests.experiments.test_guards import SETTINGS, assert_only_numbers_were_saved, logprob, weight
from tests.long_cases import long_except
from tests.nano_run import config, metrics, train

ASYNC: dict[str, Any] = {"trainer__fully_async__enabled": True, "trainer__algorithm__policy_loss_type": "decoupled"}


def sampled(out: Path) -> list[dict[str, Any]]:
    lines = (out / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def every_prompt(nano: Path) -> list[str]:
    """The names of the training prompts, in the order of the file."""
    return [f"0:{row}" for row, _ in enumerate((nano / "train.jsonl").read_text(encoding="utf-8").splitlines())]


def given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "run" / "model" / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("steps", long_except([6, 20], 6))
def test_without_staleness_a_run_is_the_synchronous_one_token_for_token(nano: Path, tmp_path: Path, steps: int) -> None:
    """The same tokens, rewards and weights, bit for bit."""
    same: dict[str, Any] = {
        "trainer__deterministic": True,
        "trainer__epochs": steps,
        "trainer__max_training_steps": steps,
    }
    train(nano, tmp_path / "sync", **same)
    train(nano, tmp_path / "async", trainer__fully_async={"enabled": True, "max_staleness_steps": 0}, **same)
    assert sampled(tmp_path / "sync") == sampled(tmp_path / "async")
    assert len({record["step"] for record in sampled(tmp_path / "async")}) == steps
    one, other = weights(tmp_path / "sync"), weights(tmp_path / "async")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("interrupt", long_except([True, False], True))
def test_samples_get_as_old_as_the_bound_and_no_older(nano: Path, tmp_path: Path, interrupt: bool) -> None:
    settings = {"enabled": True, "max_staleness_steps": 2, "interrupt_generation": interrupt}
    train(nano, tmp_path, trainer__fully_async=settings, trainer__algorithm__policy_loss_type="decoupled")
    steps = metrics(tmp_path)[1:]
    assert len(steps) == 6
    assert max(step["async/staleness_max"] for step in steps) == 2
    assert min(step["async/staleness_min"] for step in steps) >= 0
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    assert len(prompts) == 24
    assert max(map(prompts.count, prompts)) <= 2, "no prompt comes again before the others of its epoch"


@pytest.mark.long
def test_old_probabilities_of_old_samples_may_be_interpolated(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the versions that drew each token; and updates that would go too far are left out and counted."""
    learned: list[TrainingBatch] = []
    forward_backward = LearnerGroup.forward_backward

    async def noted(learner: LearnerGroup[LearningWorker], batch: TrainingBatch, objective: Objective) -> Metrics:
        learned.append(batch)
        return await forward_backward(learner, batch, objective)

    monkeypatch.setattr(LearnerGroup, "forward_backward", noted)
    settings: dict[str, Any] = {"old_logprobs": "interpolated", "max_importance_ratio": 1.0}
    changes = {f"trainer__algorithm__{name}": value for name, value in settings.items()}
    train(nano, tmp_path, **ASYNC, **changes, trainer__fully_async__max_staleness_steps=4, trainer__epochs=2)
    steps = metrics(tmp_path)[1:]
    oldest = int(max(step["async/staleness_max"] for step in steps))
    assert oldest >= 2
    shares = {share for batch in learned for share in given(batch.interpolation)[batch.loss_mask].tolist()}
    known = [0.0, *(1 - 1 / age for age in range(1, oldest + 1))]
    assert all(min(abs(share - known_share) for known_share in known) < 1e-6 for share in shares) and max(shares) > 0
    assert all(torch.equal(given(batch.old_logprobs), given(batch.rollout_logprobs)) for batch in learned)
    left_out = sum(step["policy/mini_batches_moved_too_far"] for step in steps)
    assert len(learned) + left_out == len(steps)


def test_new_weights_may_come_every_other_step_and_evaluation_sees_the_newest(nano: Path, tmp_path: Path) -> None:
    settings = {"enabled": True, "max_staleness_steps": 1, "steps_per_sync": 2}
    train(nano, tmp_path, trainer__fully_async=settings, trainer__algorithm__policy_loss_type="decoupled")
    versions = {record["step"]: record["weight_version"] for record in sampled(tmp_path)}
    assert all(step - 1 - version <= 1 for step, version in versions.items())
    assert set(versions.values()) <= {0, 2, 3, 4, 6}, "3 was sent for the evaluation of step 3"


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", long_except([{}, {"enabled": True, "max_staleness_steps": 2, "steps_per_sync": 2}], {})
)
def test_engines_that_lose_their_weights_while_learners_work_sample_from_whole_ones(
    nano: Path, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does on a GPU that they share: weights come again before the next token, also after a checkpoint."""
    slept = [0]

    async def forget(self: TorchEngine) -> bool:
        slept[0] += 1
        with torch.no_grad():
            for parameter in self._causal_lm.hf_model.parameters():
                parameter.fill_(float("nan"))  # nothing can be sampled from these
        return True

    monkeypatch.setattr(TorchEngine, "sleep", forget)
    same: dict[str, Any] = {"trainer__deterministic": True, "trainer__algorithm__policy_loss_type": "decoupled"}
    train(nano, tmp_path / "shared", trainer__fully_async=settings, **same)
    assert slept[0] >= 6
    if not settings:
        monkeypatch.undo()
        train(nano, tmp_path / "whole", **same)
        assert sampled(tmp_path / "shared") == sampled(tmp_path / "whole")


@pytest.mark.long
def test_groups_that_are_not_accepted_are_replaced(nano: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "def even(group):\n    return int(group.prompt.id.rpartition(':')[2] or 0) % 2 == 0\n", encoding="utf-8"
    )
    settings = {"enabled": True, "max_staleness_steps": 1, "accept": f"{hook}:even"}
    train(nano, tmp_path, trainer__fully_async=settings, trainer__algorithm__policy_loss_type="decoupled")
    assert all(int(record["prompt_id"].rpartition(":")[2]) % 2 == 0 for record in sampled(tmp_path))
    assert sum(step["async/groups_refused"] for step in metrics(tmp_path)[1:]) > 0


def test_a_stall_ends_the_run_and_says_who_was_waited_for(nano: Path, tmp_path: Path) -> None:
    slow, over = tmp_path / "slow.py", tmp_path / "over"
    waits = f"while not os.path.exists({str(over)!r}): time.sleep(0.1)"
    slow.write_text(f"import os, time\n\n\ndef slow(answer, **row):\n    {waits}\n    return 1.0\n", encoding="utf-8")
    settings = {"enabled": True, "stall_timeout_seconds": 0.2}
    with pytest.raises(RunError, match=r"0 of 4 groups are ready, \d+ .* none has finished in the last 0.2 s"):
        train(
            nano,
            tmp_path,
            trainer__fully_async=settings,
            trainer__algorithm__policy_loss_type="decoupled",
            trainer__eval_before_train=False,
            environment__env_class=f"{slow}:slow",
        )
    over.touch()


@pytest.mark.long
def test_a_run_that_goes_on_trains_on_every_prompt_of_its_epoch_once(nano: Path, tmp_path: Path) -> None:
    settings = {"enabled": True, "max_staleness_steps": 2}
    same: dict[str, Any] = {"trainer__fully_async": settings, "trainer__algorithm__policy_loss_type": "decoupled"}
    train(nano, tmp_path, trainer__max_training_steps=2, **same)
    train(nano, tmp_path, **same)
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    assert sorted(prompts) == sorted(every_prompt(nano))


@pytest.mark.long
@pytest.mark.parametrize(
    ("poison", "staleness"),
    [
        pytest.param(weight, 0, marks=pytest.mark.long),
        (logprob, 2),
        pytest.param(weight, 2, marks=pytest.mark.long),
        pytest.param(logprob, 0, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_back_to_its_last_checkpoint_and_on_with_other_prompts(
    nano: Path,
    tmp_path: Path,
    poison: Callable[[pytest.MonkeyPatch], None],
    staleness: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the third of six steps; the epoch has 24 prompts, of which the 4 of the batch that failed are left out."""
    poison(monkeypatch)
    train(
        nano,
        tmp_path,
        **{**SETTINGS, "trainer__max_training_steps": 6},
        trainer__faults__on_non_finite="roll_back",
        trainer__fully_async={"enabled": True, "max_staleness_steps": staleness},
        trainer__algorithm__policy_loss_type="decoupled",
    )
    assert capsys.readouterr().err.count("rolling back to step 2") == 1
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert_only_numbers_were_saved(tmp_path, {2, 4, 6})
    assert {row["async/staleness_max"] for row in metrics(tmp_path)[1:]} == set(range(staleness + 1))
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    assert (len(prompts), len(set(prompts[:20]))) == (24, 20)


@pytest.mark.long
def test_a_run_that_goes_back_over_several_versions_trains_on_nothing_that_they_drew(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 6 to step 3: what versions 4 and 5 began is sampled again by version 3."""
    calls, original = [0], Fsdp2.step

    def step(self: Fsdp2, settings: StepSettings) -> float:
        calls[0] += 1
        norm = original(self, settings)
        if calls[0] == 6:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[7] = float("nan")
        return norm

    monkeypatch.setattr(Fsdp2, "step", step)
    train(
        nano,
        tmp_path,
        trainer__max_training_steps=8,
        trainer__epochs=2,
        trainer__ckpt_interval=3,
        trainer__faults__on_non_finite="roll_back",
        trainer__fully_async={"enabled": True, "max_staleness_steps": 2},
        trainer__algorithm__policy_loss_type="decoupled",
    )
    steps = metrics(tmp_path)[1:]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps[3]["async/groups_resampled"] == 8 and steps[3]["async/staleness_min"] >= 0
    assert all(record["weight_version"] < record["step"] for record in sampled(tmp_path))
    assert max(row["async/staleness_max"] for row in steps) <= 2


@pytest.mark.long
def test_evaluation_and_checkpoints_come_when_their_triggers_say(nano: Path, tmp_path: Path) -> None:
    """An epoch has 6 batches; samples of the second are drawn while the first is trained on, which ends no epoch."""
    settings = {"enabled": True, "max_staleness_steps": 3}
    train(
        nano,
        tmp_path,
        trainer__fully_async=settings,
        trainer__algorithm__policy_loss_type="decoupled",
        trainer__epochs=2,
        trainer__eval_interval=["1 epoch", 4],
        trainer__ckpt_interval="1 epoch",
        trainer__eval_before_train=False,
    )
    evaluated = [row for row in metrics(tmp_path) if "eval/all/avg_score" in row]
    assert [row["step"] for row in evaluated] == [4, 6, 8, 12]
    assert {path.name for path in (tmp_path / "checkpoints").glob("global_step_*")} == {
        "global_step_6",
        "global_step_12",
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", long_except(["filter", "replace"], "filter"))
def test_dynamic_sampling_fills_batches_with_groups_that_teach(nano: Path, tmp_path: Path, kind: str) -> None:
    """A group whose samples all have the same reward is refused as soon as it ends, or its batch is drawn again."""
    hook = tmp_path / "mixed.py"
    hook.write_text(
        "def mixed(completion, ground_truth, **row):\n"
        "    return float(ground_truth in 'abcdef' and len(completion) % 2)\n",
        encoding="utf-8",
    )
    train(
        nano,
        tmp_path,
        trainer__fully_async={"enabled": True, "max_staleness_steps": 2},
        trainer__algorithm__policy_loss_type="decoupled",
        trainer__algorithm__dynamic_sampling__type=kind,
        trainer__max_training_steps=3,
        environment__env_class=f"{hook}:mixed",
    )
    steps = metrics(tmp_path)[1:]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["async/staleness_max"] for row in steps) <= 2
    rewards: dict[tuple[int, str], set[float]] = {}
    for record in sampled(tmp_path):
        rewards.setdefault((record["step"], record["prompt_id"]), set()).add(record["reward"])
    assert all(len(different) == 2 for different in rewards.values())
    dropped = "async/groups_refused" if kind == "filter" else "generate/groups_replaced"
    assert sum(row[dropped] for row in steps) > 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return group.prompt.nothing", "raised AttributeError: .*nothing.* for the group of prompt 0:"),
        ("print(end='')", "returned None for the group of prompt 0:.* has to return True or False"),
    ],
)
def test_a_function_that_accepts_is_named_when_it_fails_or_says_nothing(
    nano: Path, tmp_path: Path, body: str, message: str
) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(f"def wrong(group):\n    {body}\n", encoding="utf-8")
    with pytest.raises(RunError, match=f"the function of trainer.fully_async.accept {message}"):
        train(
            nano,
            tmp_path,
            trainer__fully_async={"enabled": True, "accept": f"{hook}:wrong"},
            trainer__algorithm__policy_loss_type="decoupled",
        )


@pytest.mark.long
def test_a_run_in_turns_goes_on_asynchronously_and_not_back_again(nano: Path, tmp_path: Path) -> None:
    settings = {"enabled": True, "max_staleness_steps": 2}
    ahead: dict[str, Any] = {"trainer__fully_async": settings, "trainer__resume_with_changes": True}
    train(nano, tmp_path, trainer__algorithm__policy_loss_type="decoupled", trainer__max_training_steps=2)
    train(nano, tmp_path, **ahead, trainer__algorithm__policy_loss_type="decoupled", trainer__max_training_steps=4)
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    assert len(set(prompts)) == len(prompts) == 16
    with pytest.raises(ResumeError, match=r"sampled ahead of training.*\.max_staleness_steps = 0"):
        train(nano, tmp_path, trainer__resume_with_changes=True, trainer__algorithm__policy_loss_type="decoupled")
    ahead["trainer__fully_async"] = {"enabled": True, "max_staleness_steps": 0}
    train(nano, tmp_path, **ahead, trainer__algorithm__policy_loss_type="decoupled")
    assert [row["async/staleness_max"] for row in metrics(tmp_path)[-2:]] == [0, 0]
    prompts = [record["prompt_id"] for record in sampled(tmp_path) if record["sample"] == 0]
    assert len(set(prompts)) == len(prompts) == 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"queue_size": 3}, "3 groups cannot fill a batch"),
        ({"steps_per_sync": 6}, "leave samples 5 versions old"),
    ],
)
def test_what_cannot_work_is_refused(nano: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        config(nano, tmp_path, trainer__fully_async={"enabled": True, **settings})
