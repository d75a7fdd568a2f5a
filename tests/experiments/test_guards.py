"""Seven kinds of NaN and infinity, under each policy: stopped where they appear, named, and never saved."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from skyrl.errors import NonFiniteError
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.workers.learning_worker import LearningWorker
from skyrl.learners.workers.roles import PolicyWorker
from skyrl.rollout.batches import SynchronousRollouts
from skyrl.runs.session import refuse_untrained
from skyrl.storage.disk import Disk
from skyrl.tools.replay import Replay
from skyrl.training.advantage import advantage_estimator
from skyrl.training.guards import NonFiniteGuard
from skyrl.trajectory import TurnReward
from tests.long_cases import long_except
from tests.nano_run import metrics, train

NAN, INF = float("nan"), float("inf")
Poison = Callable[[pytest.MonkeyPatch], None]


def spoil(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, change: Callable[[Any, Any], Any]) -> None:
    """The result of the `at`-th call of a method is `change(self, result)` instead."""
    original = getattr(owner, name)
    calls = [0]

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = original(self, *args, **kwargs)
        return change(self, result) if calls[0] == at else result

    async def spoilt_later(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = await original(self, *args, **kwargs)
        return change(self, result) if calls[0] == at else result

    patch.setattr(owner, name, spoilt_later if name in ("next_batch", "score") else spoilt)


def first_reward(groups: Any, value: float) -> Any:
    first, *others = groups[0].trajectories
    first = attrs.evolve(first, rewards=(TurnReward(token=len(first.response_ids) - 1, reward=value),))
    return (attrs.evolve(groups[0], trajectories=(first, *others)), *groups[1:])


def first_number(tensor: torch.Tensor, value: float, mask: torch.Tensor | None = None) -> torch.Tensor:
    spoilt = tensor.clone()
    spoilt[0, -1 if mask is None else int(mask[0].nonzero()[0])] = value
    return spoilt


def reward(patch: pytest.MonkeyPatch) -> None:
    spoil(patch, SynchronousRollouts, "next_batch", 3, lambda _, groups: first_reward(groups, NAN))


def logprob(patch: pytest.MonkeyPatch) -> None:
    spoil(patch, PolicyWorker, "score", 4, lambda _, scores: first_number(scores, -INF))  # the first sync scores, too


def advantage(patch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def poisoned(algorithm: Any, answers: int) -> Any:
        estimate = advantage_estimator(algorithm, answers)

        def advantages(batch: Any) -> torch.Tensor:
            calls[0] += 1
            values = estimate(batch)
            return first_number(values, INF, batch.loss_mask) if calls[0] == 3 else values

        return advantages

    patch.setattr("skyrl.training.advantage.advantage_estimator", poisoned)


def loss(patch: pytest.MonkeyPatch) -> None:
    original, calls = Fsdp2.backward, [0]

    def backward(self: Fsdp2, value: torch.Tensor, *, last: bool) -> None:
        calls[0] += 1
        original(self, value * NAN if calls[0] == 9 else value, last=last)  # two mini-batches of two micro-batches

    patch.setattr(Fsdp2, "backward", backward)


def gradient(patch: pytest.MonkeyPatch) -> None:
    def overflow(self: Fsdp2, result: None) -> None:
        parameter = next(candidate for candidate in self.model.parameters() if candidate.grad is not None)
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = INF

    spoil(patch, Fsdp2, "backward", 9, overflow)


def learning_rate(patch: pytest.MonkeyPatch) -> None:
    def diverge(self: Fsdp2, result: None) -> None:
        assert self.optimizer is not None
        self.optimizer.param_groups[0]["lr"] = INF

    spoil(patch, Fsdp2, "backward", 9, diverge)


def weight(patch: pytest.MonkeyPatch) -> None:
    def diverge(self: Fsdp2, norm: float) -> float:
        with torch.no_grad():
            next(self.model.parameters()).view(-1)[7] = NAN
        return norm

    spoil(patch, Fsdp2, "step", 5, diverge)


BEFORE_LEARNING: dict[str, Poison] = {"reward": reward, "logprob": logprob, "advantage": advantage}
OF_AN_UPDATE: dict[str, Poison] = {"loss": loss, "gradient": gradient}
OF_THE_LEARNER: dict[str, Poison] = {"learning rate": learning_rate, "weight": weight}
KINDS = BEFORE_LEARNING | OF_AN_UPDATE | OF_THE_LEARNER

NAMED = {
    "reward": r"reward nan in sample 0 of prompt \S+: no weight was changed",
    "logprob": r"old_logprob -inf in sample 0 of prompt \S+: no weight was changed",
    "advantage": r"advantage inf in sample 0 of prompt \S+: no weight was changed",
    "loss": r"the policy's gradient norm is nan",
    "gradient": r"the policy's gradient norm is (inf|nan)",
    "learning rate": r"the policy's learning rate is inf: the optimizer step was not taken",
    "weight": r"model\.\S+ of the policy holds NaN or infinity after an update",
}

SHORT: dict[str, Any] = {
    "trainer__max_training_steps": 4,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
"""Something happens in the third step, and one more shows that the run goes on."""

SETTINGS = SHORT | {"trainer__policy_mini_batch_size": 2, "trainer__micro_train_batch_size_per_gpu": 3}


def run(nano: Path, out: Path, policy: str) -> None:
    train(nano, out, **SETTINGS, trainer__faults__on_non_finite=policy)


def assert_only_numbers_were_saved(out: Path, steps: set[int]) -> None:
    saved_steps = set()
    for folder in (out / "checkpoints").glob("global_step_*"):
        saved_steps.add(int(folder.name.removeprefix("global_step_")))
        for file in folder.rglob("*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file
    assert saved_steps == steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", long_except(KINDS, "advantage", "learning rate"))
def test_abort_ends_the_run_and_names_the_cause(
    nano: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS[kind](monkeypatch)
    with pytest.raises(NonFiniteError, match=NAMED[kind]):
        run(nano, tmp_path, "abort")
    assert_only_numbers_were_saved(tmp_path, {2})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", long_except(BEFORE_LEARNING | OF_AN_UPDATE, "reward", "loss"))
def test_skip_leaves_out_what_would_have_learnt_from_it(
    nano: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    KINDS[kind](monkeypatch)
    run(nano, tmp_path, "skip")
    assert_only_numbers_were_saved(tmp_path, {2, 4})
    whole_step = kind in BEFORE_LEARNING
    left_out = "trainer/skipped_steps" if whole_step else "policy/skipped_updates"
    assert [row["step"] for row in metrics(tmp_path) if row.get(left_out)] == [3]
    assert ("a step is left out (1 in a row)" in capsys.readouterr().err) == whole_step


@pytest.mark.parametrize("kind", long_except(OF_THE_LEARNER, "weight"))
def test_a_learner_that_is_broken_cannot_be_skipped(
    nano: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS[kind](monkeypatch)
    with pytest.raises(NonFiniteError, match=NAMED[kind]):
        run(nano, tmp_path, "skip")
    assert_only_numbers_were_saved(tmp_path, {2})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", long_except(["logprob", "gradient", "learning rate", "weight"], "logprob", "gradient"))
def test_roll_back_goes_on_from_the_last_checkpoint_with_other_prompts(
    nano: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    KINDS[kind](monkeypatch)
    run(nano, tmp_path, "roll_back")
    assert_only_numbers_were_saved(tmp_path, {2, 4})
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert ("rolling back to step 2" in capsys.readouterr().err) == (kind not in OF_AN_UPDATE)


@pytest.mark.long
def test_going_back_waits_for_the_save_that_is_pending(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, going_back, back = Disk.write, threading.Event(), NonFiniteGuard.roll_back

    def held(self: Disk, name: str, content: Any) -> None:
        assert going_back.wait(120)
        write(self, name, content)

    def goes_back(self: NonFiniteGuard, error: NonFiniteError) -> None:
        assert not list((tmp_path / "checkpoints").glob("global_step_2/*"))
        back(self, error)
        going_back.set()

    monkeypatch.setattr(Disk, "write", held)
    monkeypatch.setattr(NonFiniteGuard, "roll_back", goes_back)
    weight(monkeypatch)
    run(nano, tmp_path, "roll_back")
    assert "rolling back to step 2" in capsys.readouterr().err
    assert_only_numbers_were_saved(tmp_path, {2, 4})


@pytest.mark.long
def test_going_back_restores_the_critic_too(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weight(monkeypatch)  # of the fifth optimizer step: the first of the critic in step 3
    restored: list[str] = []
    load = LearningWorker.load_state

    def noted(self: LearningWorker, *args: Any) -> None:
        load(self, *args)
        restored.append(self._role)

    monkeypatch.setattr(LearningWorker, "load_state", noted)
    critic = {
        "trainer__critic__model__path": str(nano / "model"),
        "trainer__critic_mini_batch_size": 4,
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__faults__on_non_finite": "roll_back",
    }
    train(nano, tmp_path, **SHORT, **critic)
    assert re.search(r"rolling back to step 2 .* of the critic holds NaN", capsys.readouterr().err)
    assert restored == ["policy", "critic"]
    assert_only_numbers_were_saved(tmp_path, {2, 4})


@pytest.mark.long
def test_a_number_that_is_none_is_found_when_it_is_saved_and_the_run_goes_back(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(self: Fsdp2, norm: float) -> float:
        assert self.optimizer is not None
        next(iter(self.optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = INF
        return norm

    spoil(monkeypatch, Fsdp2, "step", 8, diverge)  # the last of step 4
    run(nano, tmp_path, "roll_back")
    assert re.search(r"rolling back to step 2 .*optimizer\.\S+exp_avg_sq of the policy holds", capsys.readouterr().err)
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert_only_numbers_were_saved(tmp_path, {2, 4})


@pytest.mark.long
def test_a_step_that_was_left_out_is_left_out_again_by_a_replay(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        reward(patch)
        train(nano, tmp_path, **SETTINGS, trainer__recording="jsonl")
    steps = list(Replay(tmp_path / "run").run(range(3, 5)))
    assert [(step.computed.step, len(step.computed.updates)) for step in steps] == [(3, 0), (4, 2)]
    assert [step.differences for step in steps] == [(), ()]


def test_steps_are_left_out_only_so_often(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SynchronousRollouts.next_batch

    async def spoilt(self: SynchronousRollouts, version: int) -> Any:
        return first_reward(await original(self, version), NAN)

    monkeypatch.setattr(SynchronousRollouts, "next_batch", spoilt)
    with pytest.raises(NonFiniteError, match=r"in 3 steps in a row; trainer\.faults\.max_skipped_steps = 2"):
        train(nano, tmp_path, **SHORT, trainer__faults__max_skipped_steps=2)
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2]


def test_a_run_that_learned_nothing_fails_however_short_it_is(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SynchronousRollouts.next_batch

    async def spoilt(self: SynchronousRollouts, version: int) -> Any:
        return first_reward(await original(self, version), NAN)

    monkeypatch.setattr(SynchronousRollouts, "next_batch", spoilt)
    settings = SHORT | {"trainer__max_training_steps": 2}
    for _ in range(2):  # the second time, the last step is saved already
        with pytest.raises(NonFiniteError, match=r"nothing was learned: every optimizer step of the run \(2 steps\)"):
            train(nano, tmp_path, **settings)
        assert not (tmp_path / "run" / "model").exists()
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("records", "learned"),
    [
        ([], True),
        ([{"trainer/skipped_steps": 1.0}], False),
        ([{"policy/skipped_updates": 2.0}], False),
        ([{"train/skipped_updates": 1.0, "train/grad_norm": "nan"}], False),
        ([{"policy/skipped_updates": 1.0, "policy/grad_norm": 0.5}], True),  # another update of the step was made
        ([{"policy/skipped_updates": 0.0}], True),
        ([{"trainer/skipped_steps": 1.0}, {"train/skipped_updates": 0.0, "train/grad_norm": 0.5}], True),
    ],
)
def test_what_a_run_learned_is_read_from_its_metrics(records: list[dict[str, Any]], learned: bool) -> None:
    steps = [{"step": 0}, *({"step": step, **record} for step, record in enumerate(records, 1))]
    with nullcontext() if learned else pytest.raises(NonFiniteError, match=r"another run_path$"):
        refuse_untrained(steps, "run_path")


def test_a_run_without_a_checkpoint_cannot_go_back(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward(monkeypatch)
    with pytest.raises(NonFiniteError, match="there is no checkpoint to go back to"):
        train(nano, tmp_path, **SHORT, trainer__faults__on_non_finite="roll_back", trainer__ckpt_interval=5)
