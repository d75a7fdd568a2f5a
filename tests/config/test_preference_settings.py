"""Settings of preference runs: what is refused, what acts when, and which models a run has."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import ConfigError, PreferenceConfig, compose
from skyrl.config.loading.kinds import kind_of, roles_of
from skyrl.config.settings.preference_root import PREFERENCE_LOSSES
from skyrl.planning.layout import Pool, layout

RUN: dict[str, Any] = {"kind": "preference", "model.path": "m", "train_datasets": ["rows"], "device": "cpu"}
ADAPTER: dict[str, Any] = {"model.lora.rank": 4}


def problems(**values: Any) -> dict[str, str]:
    """Path -> message and hint of what is refused."""
    try:
        compose([], RUN | {name.replace("__", "."): value for name, value in values.items()})
    except ConfigError as error:
        return {problem.path: f"{problem.message}; {problem.hint}" for problem in error.problems}
    return {}


def warned(values: dict[str, Any]) -> set[str]:
    """Paths of written values without effect."""
    return {problem.path for problem in compose([], RUN | values).warnings}


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights", "1 weights for 2 losses"),
        ({"loss_type": ["robust"], "label_smoothing": 0.5}, "label_smoothing", "labelled the wrong way round"),
        ({"loss_type": ["exo_pair"]}, "label_smoothing", "0 makes the loss of exo_pair infinite"),
        (
            {"loss_type": ["nca_pair", "sft", "aot"], "f_divergence_type": "forward_kl"},
            "f_divergence_type",
            "nca_pair and aot are defined for reverse_kl only; losses that take others: sigmoid, hinge",
        ),
        ({"loss_type": ["kto", "sft"]}, "loss_type", "kto is for single answers with labels; set it to kto alone"),
        ({"loss_type": ["kto"], "batch_size": 1}, "batch_size", "1 has no other; choose 2 or more"),
        ({"loss_type": ["kto"], "precompute_ref_log_probs": True}, "precompute_ref_log_probs", "change with every"),
        (
            {"streaming": True, "num_steps": 2, "precompute_ref_log_probs": True},
            "precompute_ref_log_probs",
            "not known in advance",
        ),
        ({"loss_type": ["aot"], "num_answers": 4}, "num_answers", "aot sorts the pairs of a batch; set it to 2"),
        ({"loss_type": ["aot"], "use_weighting": True}, "use_weighting", "aot pairs answers of different rows"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "precompute_ref_log_probs", "reference changes"),
        ({"num_answers": 1}, "num_answers", "at least 2"),
        ({"loss_type": ["nowhere.py:mine"]}, "loss_type", "nowhere.py"),
        ({"loss_type": ["sigmod"]}, "loss_type", "there is no loss 'sigmod' here; did you mean sigmoid?"),
        ({"too_long": "truncate"}, "too_long", "truncate would compare parts of answers; set it to skip"),
        ({"loss_type": []}, "loss_type", "distinct names"),
        ({"loss_type": ["sft", "sft"]}, "loss_type", "distinct names"),
        ({"loss_type": ["dpo"]}, "loss_type", "sigmoid"),
        ({"ld_alpha": 1.5}, "ld_alpha", "between 0 and 1"),
        ({"beta": 0.0}, "beta", "positive"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], path: str, message: str) -> None:
    assert message in problems(**values)[path]


@pytest.mark.parametrize(
    "values",
    [
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["exo_pair"], "label_smoothing": 0.001},
        {"loss_type": ["sigmoid", "sft"], "f_divergence_type": "js_divergence"},
    ],
)
def test_settings_of_published_recipes_are_taken(values: dict[str, Any]) -> None:
    assert problems(**values) == {} and warned(values) == set()


@pytest.mark.parametrize(
    ("path", "value", "acts"),
    [
        ("label_smoothing", 0.1, {"loss_type": ["sigmoid"]}),
        ("discopop_tau", 0.1, {"loss_type": ["discopop"]}),
        ("simpo_gamma", 0.1, {"loss_type": ["simpo"]}),
        ("beta", 0.2, {"loss_type": ["hinge"]}),
        ("ld_alpha", 0.5, {"loss_type": ["hinge"]}),
        ("ref_model_path", "other", {"loss_type": ["hinge"]}),
        ("reference_free", True, {"loss_type": ["hinge"]}),
        ("precompute_ref_log_probs", True, {"loss_type": ["hinge"]}),
        ("f_divergence_type", "forward_kl", {"loss_type": ["hinge"]}),
        ("f_alpha_divergence_coef", 0.1, {"loss_type": ["hinge"], "f_divergence_type": "alpha_divergence"}),
        ("sync_ref_model", True, {"loss_type": ["hinge"]}),
        ("ref_model_mixup_alpha", 0.5, {"loss_type": ["hinge"], "sync_ref_model": True}),
        ("ref_model_sync_steps", 5, {"loss_type": ["hinge"], "sync_ref_model": True}),
        ("use_weighting", True, {"loss_type": ["hinge"]}),
        ("ref_log_probs_path", "there", {"loss_type": ["hinge"], "precompute_ref_log_probs": True}),
        ("loss_weights", [2.0], {}),
        ("desirable_weight", 1.3, {"loss_type": ["kto"]}),
        ("undesirable_weight", 1.3, {"loss_type": ["apo_zero_unpaired"]}),
        ("label_key", "good", {"loss_type": ["kto"]}),
        ("completion_key", "answer", {"loss_type": ["kto"]}),
    ],
)
def test_a_value_acts_under_its_condition_alone(path: str, value: Any, acts: dict[str, Any]) -> None:
    assert path in warned({"loss_type": ["sft"], path: value})
    assert not acts or path not in warned({**acts, path: value})


@pytest.mark.parametrize(
    ("values", "models"),
    [
        ({}, ["policy", "ref"]),
        (ADAPTER, ["policy"]),
        ({**ADAPTER, "ref_model_path": "other"}, ["policy", "ref"]),
        ({**ADAPTER, "model.lora.path": "adapter"}, ["policy", "ref"]),
        ({"reference_free": True}, ["policy"]),
        ({"loss_type": ["simpo"]}, ["policy"]),
        ({"loss_type": ["orpo", "sft"]}, ["policy"]),
        ({"loss_type": ["simpo", "sigmoid"]}, ["policy", "ref"]),
        ({"loss_type": ["kto"]}, ["policy", "ref"]),
        ({**ADAPTER, "sync_ref_model": True}, ["policy", "ref"]),
    ],
)
def test_a_reference_is_loaded_where_it_is_another_model(values: dict[str, Any], models: list[str]) -> None:
    run = compose([], RUN | values).config
    assert [role.name for role in roles_of(run)] == models


def test_policy_and_reference_share_their_gpus() -> None:
    run = compose([], RUN | {"placement.num_gpus_per_node": 2}).config
    assert layout(kind_of(run).sizes(run)).pools == (Pool(name="policy+ref", nodes=1, gpus_per_node=2),)


def test_every_setting_of_a_loss_is_a_field() -> None:
    for loss in PREFERENCE_LOSSES.values():
        assert all(hasattr(PreferenceConfig(), name) for name in loss.fields)
