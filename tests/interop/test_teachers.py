"""Teachers of AReaL and verl: what they become, and what of them has no equivalent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import load
from skyrl.interop.areal import convert as areal
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.report import Conversion
from skyrl.interop.verl import convert as verl
from skyrl.tree.sparse import as_toml_has_it

LOSS = "distillation.distillation_loss."
MODEL = "distillation.teacher_models.teacher_model.model_path"


def loaded(conversion: Conversion, folder: Path) -> Any:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return load([file], environ={}).config.trainer


def why(conversion: Conversion, source: str) -> str:
    return next(line.reason for line in conversion.lines if line.source == source)


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, (0.005, 1.0)),
        ({"teacher.distill_loss_weight": 0.02, "teacher.rl_loss_weight": 0.5}, (0.02, 0.5)),
        ({"teacher.distill_loss_weight": 1, "teacher.rl_loss_weight": 0}, (1.0, 0.0)),
    ],
)
def test_areals_teacher_has_a_weight_beside_that_of_rewards(
    changes: dict[str, Any], weights: tuple[float, float], tmp_path: Path
) -> None:
    keys = {"actor.path": "a/b", "actor.kl_ctl": 0.0, "teacher.path": "c/d"}
    conversion = areal.convert_keys({**keys, **changes})
    trainer = loaded(conversion, tmp_path)
    settings = trainer.algorithm.distillation
    assert (trainer.teacher.model.path, settings.type, settings.coef, settings.task_coef) == (
        "c/d",
        "advantage",
        *weights,
    )
    assert conversion.lost == ()


@pytest.mark.parametrize("version", ["1.0.4", "2.0.0"])
def test_every_default_of_areals_teacher_needs_nothing(version: str) -> None:
    [tree] = [tree for tree in peer_trees("areal", "GRPOConfig") if tree.version == version]
    own = {key: value for key, value in tree.defaults.items() if key.startswith("teacher.")}
    assert len(own) > 200
    for path in ("", "c/d"):
        conversion = areal.convert_keys({"actor.path": "a/b", **own, "teacher.path": path})
        assert [
            line.source for line in conversion.lines if line.source.startswith("teacher.") and line in conversion.lost
        ] == []


def test_what_areals_teacher_asks_for_and_is_not_there_is_named() -> None:
    keys = {"actor.path": "a/b", "teacher.path": "c/d", "teacher.train.backend": "fsdp:d4"}
    assert "the teacher's train.backend" in why(areal.convert_keys(keys), "teacher.train.backend")
    none = areal.convert_keys({**keys, "teacher.distill_loss_weight": 0.0})
    assert "teaches nothing" in why(none, "teacher.distill_loss_weight")


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"loss_mode": "k1", "use_policy_gradient": True}, {"type": "advantage", "task_coef": 1.0}),
        (
            {"loss_mode": "forward_kl_topk", "use_task_rewards": False, "loss_max_clamp": 10.0, "topk": 64},
            {"type": "loss", "beta": 0.0, "task_coef": 0.0, "max_divergence": 10.0, "top_k": 64, "tail": False},
        ),
        ({"loss_mode": "k1", "use_policy_gradient": True, "distillation_loss_coef": 0.5}, {"coef": 0.5}),
    ],
)
def test_verls_teacher_is_an_advantage_or_a_loss(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"actor_rollout_ref.model.path": "a/b", "distillation.enabled": True, MODEL: "c/d"}
    conversion = verl.convert_keys({**keys, **{LOSS + name: value for name, value in changes.items()}})
    trainer = loaded(conversion, tmp_path)
    assert trainer.teacher.model.path == "c/d"
    assert trainer.placement.teacher_num_gpus_per_node == trainer.placement.policy_num_gpus_per_node == 8
    for name, value in settings.items():
        assert getattr(trainer.algorithm.distillation, name) == value


def test_verls_teachers_by_source_are_ours(tmp_path: Path) -> None:
    one, two = "distillation.teacher_models.one.", "distillation.teacher_models.two."
    keys = {"actor_rollout_ref.model.path": "a/b", "distillation.enabled": True, LOSS + "loss_mode": "forward_kl_topk"}
    keys |= {one + "key": "gsm8k", one + "model_path": "c/d", two + "key": "code", two + "model_path": "e/f"}
    conversion = verl.convert_keys({**keys, "distillation.teacher_key": "data_source"})
    teacher = loaded(conversion, tmp_path).teacher
    assert (teacher.model.path, dict(teacher.sources)) == (None, {"gsm8k": "c/d", "code": "e/f"})
    assert conversion.refused == ()


def test_what_verls_teacher_asks_for_and_is_not_there_is_named() -> None:
    keys = {"actor_rollout_ref.model.path": "a/b", "distillation.enabled": True, MODEL: "c/d"}
    assert "estimate k3:" in why(verl.convert_keys(keys), "distillation.enabled")
    by_k2 = verl.convert_keys({**keys, LOSS + "loss_mode": "k2"})
    assert "estimate k2:" in why(by_k2, LOSS + "loss_mode")
    second = MODEL.replace("teacher_model.", "other.")
    assert "several teachers without a key" in why(verl.convert_keys({**keys, second: "e/f"}), MODEL)
    by_task = {**keys, "distillation.teacher_key": "task"}
    assert "the choice of a teacher by 'task'" in why(verl.convert_keys(by_task), "distillation.teacher_key")
    off = verl.convert_keys({**keys, "distillation.enabled": False})
    assert "only read with distillation.enabled" in why(off, MODEL)
