"""A run whose models are drawn from its seed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.nano_run import metrics, train


def test_a_run_from_random_weights_begins_with_its_reference_and_engine(nano: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(nano / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    drawn = {f"trainer__{role}__model__init_from_scratch": True for role in ("policy", "ref")}
    train(
        nano,
        tmp_path,
        trainer__policy__model__path=str(bare),
        trainer__algorithm__use_kl_loss=True,
        trainer__max_training_steps=1,
        generator__inference_engine__logprob_parity_bound=1e-4,
        **drawn,
    )
    (first,) = (row for row in metrics(tmp_path) if "policy/policy_kl" in row)
    assert first["policy/policy_kl"] == pytest.approx(0, abs=1e-6), "another model is at several nats"
