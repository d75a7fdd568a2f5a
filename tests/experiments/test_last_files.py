"""What a run leaves beside its checkpoints: made again where it is missing, durable where a checkpoint relies on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl.runs.session import RunSession
from tests.long_cases import long_except
from tests.nano_run import train

LORA: dict[str, Any] = {
    "trainer__policy__model__lora__rank": 2,
    "trainer__max_training_steps": 2,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("missing", long_except(["model", "adapter", "reward_curve.png"], "adapter"))
def test_each_product_of_a_finished_run_is_made_again(nano: Path, tmp_path: Path, missing: str) -> None:
    experiment = train(nano, tmp_path, **LORA)
    assert [product.name for product in experiment.products] == ["model", "adapter", "reward_curve.png"]
    run = tmp_path / "run"
    before = {product.name: content(product) for product in experiment.products if product.is_dir()}
    lost = run / missing
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    train(nano, tmp_path, **LORA)
    assert lost.exists(), f"{missing} was never made"
    assert {name: content(run / name) for name in before} == before


@pytest.mark.long
def test_a_run_that_is_extended_keeps_no_product_of_its_earlier_end(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = train(nano, tmp_path, **LORA)
    left = list[bool]()
    make = RunSession._make_loop

    async def made(self: RunSession, *arguments: Any) -> Any:
        loop = await make(self, *arguments)
        left.extend(product.exists() for product in experiment.products)
        return loop

    monkeypatch.setattr(RunSession, "_make_loop", made)
    train(nano, tmp_path, **LORA | {"trainer__max_training_steps": 4})
    assert left == [False, False, False]
    assert all(product.exists() for product in experiment.products)


def test_what_a_run_has_written_is_durable_before_its_checkpoint(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, flushed = os.fsync, list[str]()

    def noted(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    train(nano, tmp_path, trainer__max_training_steps=4, trainer__recording="jsonl", trainer__async_ckpt_save=False)
    manifests = [number for number, path in enumerate(flushed) if path.endswith("manifest.json")]
    assert len(manifests) == 2
    run = tmp_path / "run"
    for begin, end, steps in ((0, manifests[0], (1, 2)), (manifests[0], manifests[1], (3, 4))):
        synced = set(flushed[begin:end])
        lines = {str(run / name) for name in ("metrics.jsonl", "trajectories.jsonl")}
        assert lines <= synced
        assert {str(run / "tokens" / f"step_{step:06}.arrow") for step in steps} <= synced
        recorded = {str(file) for step in steps for file in (run / "recording").glob(f"step_{step:06}*")}
        assert recorded, "the run was to record its steps"
        assert recorded <= synced
        assert str(run) in synced  # the names themselves
    assert str(run / "config.json") in flushed[: manifests[0]]
    assert str(run) in flushed[manifests[-1] + 1 :], "the names of what it made at its end are durable"


@pytest.mark.long
def test_steps_that_metrics_and_samples_have_lost_are_counted_when_the_run_goes_on(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"trainer__eval_interval": -1, "trainer__eval_before_train": False}
    train(nano, tmp_path, **settings, trainer__max_training_steps=4)
    metrics, samples = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "trajectories.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + b"\0" * len(lines[1]) + b"\n" + lines[2])
    content = samples.read_bytes()
    rest = content.index(b'{"step": 3')
    second = content.index(b'{"step": 2')  # of its samples, the first is damaged
    damaged = content[:second] + b"\0" + content[second + 1 : rest]
    samples.write_bytes(damaged + b"\0" * (len(content) - rest))
    capsys.readouterr()
    train(nano, tmp_path, **settings, trainer__max_training_steps=6)
    stderr = capsys.readouterr().err
    assert f"{metrics} lacks 3 steps (the first is 1): lost or damaged" in stderr
    assert f"{samples} lacks samples of 3 steps (the first is 2): lost or damaged" in stderr


@pytest.mark.long
def test_nothing_is_missing_in_a_run_that_goes_on_from_another_ones_checkpoint(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(nano, first, trainer__max_training_steps=2)
    from_first: dict[str, Any] = {
        "trainer__resume_mode": "from_path",
        "trainer__resume_path": str(first / "checkpoints" / "global_step_2"),
    }
    train(nano, second, **from_first, trainer__max_training_steps=4)
    shutil.rmtree(second / "run" / "model")
    train(nano, second, trainer__max_training_steps=6)
    assert "lacks" not in capsys.readouterr().err
