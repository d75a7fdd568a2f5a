"""What `skyrl config explain` knows about a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.cli.preparing.config import explanation_text
from skyrl.config import ConfigError, load
from skyrl.config.loading.check import has_effect, without_effect
from skyrl.config.loading.explain import Explanation, explain
from skyrl.config.loading.kinds import KINDS, kind_named, kind_of, root_of
from skyrl.config.loading.reference import reference_page, reference_section
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree import get_at
from skyrl.tree.classes import table_paths
from skyrl.tree.imports import following
from skyrl.tree.rules import paths_read
from tests.config.leaves import LEAVES
from tests.long_cases import long_except


def explained(path: str, *overrides: str, files: Any = ()) -> Explanation:
    loaded = load(files, list(overrides))
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    return explain(path, run, origins)


def test_a_derived_value_is_traced_to_what_was_written() -> None:
    explanation = explained("trainer.algorithm.temperature", "generator.sampling_params.temperature=0.7")
    assert (explanation.value, explanation.type) == (0.7, "a number or null")
    default, rule = explanation.chain
    assert (default.location, default.value) == ("default", None)
    assert rule.location == "derived by learner_temperature_follows_sampling"
    assert rule.reads == (("generator.sampling_params.temperature", 0.7, "argument 1"),)
    assert rule.because == "Log-probabilities are only comparable at the temperature the tokens were drawn at."


def test_every_shadowed_value_is_in_the_chain(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[trainer]\nepochs = 2")
    explanation = explained("trainer.epochs", "trainer.epochs=3", files=[tmp_path / "a.toml"])
    assert [(step.location, step.value) for step in explanation.chain] == [
        ("default", 1),
        (f"{tmp_path}/a.toml:2", 2),
        ("argument 1", 3),
    ]


def test_what_follows_from_a_value_is_named() -> None:
    explanation = explained("trainer.max_prompt_length")
    assert ("generator.max_input_length", "input_length_follows_prompt_length") in explanation.feeds
    assert "input_length_covers_prompt" in {name for name, _ in explanation.checks}


GPUS = ("trainer.device=cuda", "trainer.placement.gpu_kind=H100-80", "trainer.logger=console")
FITS = "run_fits_gpu_memory"


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-72B"])  # which does not fit: changes are tried
@pytest.mark.parametrize(
    ("field", "reads"),
    [
        ("trainer.placement.gpu_kind", True),
        ("trainer.policy.model.path", True),
        ("generator.n_samples_per_prompt", True),
        ("generator.sampling_params.max_generate_length", True),
        ("generator.sampling_params.logprobs", False),
        ("generator.sampling_params.temperature", False),
        ("trainer.project_name", False),
        ("trainer.seed", False),
        ("trainer.algorithm.eps_clip_low", False),
        ("trainer.policy.optimizer_config.lr", False),
    ],
)
def test_only_checks_that_read_a_field_are_named(field: str, reads: bool, model: str) -> None:
    explanation = explained(field, *GPUS, f"trainer.policy.model.path={model}")
    assert (FITS in {name for name, _ in explanation.checks}) is reads


@pytest.mark.parametrize("kind", KINDS)
def test_no_check_reads_the_whole_tree(kind: str) -> None:
    """Whatever reads a whole table would be named among the checks of each of its fields."""
    loaded = load([], {"kind": kind})
    run, _, _ = resolve_with_origins(loaded.config, loaded.origins)
    tables = {"", *(path for path in table_paths(root_of(kind)) if get_at(run, path) is not None)}
    tables_read = {check.__name__: sorted(paths_read(check, run) & tables) for check in kind_named(kind).checks}
    assert {name: tables for name, tables in tables_read.items() if tables} == {}


def test_a_former_name_is_explained_by_the_current_one() -> None:
    explanation = explained("generator.enable_prefix_caching", "generator.enable_prefix_caching=false")
    assert (explanation.path, explanation.value) == ("generator.inference_engine.enable_prefix_caching", False)


def test_a_field_says_when_it_acts() -> None:
    off = explained("trainer.algorithm.kl_loss_coef", "trainer.algorithm.use_kl_loss=false")
    assert (off.acts_when, off.acts) == (
        "use_kl_in_reward has an effect, or use_kl_loss is true with a loss that does not learn from pairs "
        "(online_dpo does)",
        False,
    )
    assert explained("trainer.algorithm.kl_loss_coef").acts


@pytest.mark.parametrize(
    ("field", "acts", "named"),
    [
        ("eps_clip_high", None, ("mine.py:loss",)),
        ("lambd", None, ("mine.py:estimator",)),
        ("gamma", None, ("mine.py:estimator",)),
        ("max_importance_ratio", None, ("mine.py:loss",)),
        ("kl_loss_coef", None, ("mine.py:loss",)),
        ("sapo.tau_pos", False, ()),
        ("policy_loss", True, ()),
    ],
)
def test_what_code_decides_that_was_not_imported_is_not_known(
    field: str, acts: bool | None, named: tuple[str, ...]
) -> None:
    path, own = "trainer.algorithm.", ("policy_loss_type=mine.py:loss", "advantage_estimator=mine.py:estimator")
    overrides = [path + setting for setting in (*own, "eps_clip_high=0.28", "lambd=0.5", "sapo.tau_pos=2")]
    with following("nothing"):
        loaded = load((), overrides)
        run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
        explanation = explain(path + field, run, origins)
        told = [problem.path for problem in without_effect(run, origins)]
        assert has_effect(run, path + field) is (acts is not False)
    assert (explanation.acts, set(explanation.unread_code)) == (acts, {*named})
    assert told == [path + "sapo"]
    verdict = f"not known here, since {' and '.join(explanation.unread_code)} was not imported."
    assert (acts is None) is explanation_text(explanation).partition("\n\nChecks")[0].endswith(verdict)


@pytest.mark.long
@pytest.mark.parametrize("backend", long_except(["http", "torch", "vllm"], "vllm"))
def test_an_explanation_and_the_warning_of_idle_fields_agree(backend: str) -> None:
    loaded = load((), [f"generator.inference_engine.backend={backend}"])
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    paths = dict.fromkeys(effect.path for effect in kind_of(run).effects)
    explanations = {path: explain(path, run, origins) for path in paths}
    assert {path for path in paths if explanations[path].acts} == {path for path in paths if has_effect(run, path)}
    for path in paths:
        unmet = [
            effect.condition
            for effect in kind_of(run).effects
            if effect.path == path and not effect.condition.holds(run)
        ]
        assert all(condition.words in explanations[path].acts_when for condition in unmet)


@pytest.mark.parametrize(
    ("field", "when"),
    [
        ("lambd", "the estimator is gae"),
        ("grpo_norm_by_std", "the estimator is grpo"),
        ("clip_ratio_c", "the loss is dual_clip, decoupled with decoupled.dual_clip or your own in"),
    ],
)
def test_the_estimators_and_losses_that_read_a_field_are_named(field: str, when: str) -> None:
    assert explained(f"trainer.algorithm.{field}").acts_when.startswith(when)


def test_a_key_of_a_free_form_table_is_explained() -> None:
    explanation = explained("generator.chat_template_kwargs.thinking", "generator.chat_template_kwargs.thinking=true")
    assert (explanation.value, [step.location for step in explanation.chain]) == (True, ["default", "argument 1"])


def test_a_leaf_of_a_table_that_is_null_by_default_says_where_its_value_came_from() -> None:
    table = "generator.eval_sampling_params"
    derived = explained(f"{table}.temperature", f"{table}.top_p=0.95")
    assert [(step.location, step.value) for step in derived.chain] == [
        ("default of SamplingParams", 1.0), ("derived by evaluation_is_greedy", 0.0),
    ]  # fmt: skip
    left_alone = explained(f"{table}.top_k", f"{table}.top_p=0.95")
    assert [(step.location, step.value) for step in left_alone.chain] == [("default of SamplingParams", -1)]


@pytest.mark.parametrize(
    ("path", "message"),
    [("trainer.epoch", "did you mean trainer.epochs?"), ("trainer.epochs.x", "no such field: trainer.epochs is ")],
)
def test_a_path_that_does_not_exist_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explained(path)
    assert message in str(caught.value)


def test_leaves_all_over_the_tree_can_be_explained_and_printed() -> None:
    loaded = load()
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    for path in list(LEAVES)[::11]:
        text = explanation_text(explain(path, run, origins))
        assert text.startswith(f"{path} = ")
        assert len(text.splitlines()) > 4


def test_the_reference_page_has_every_leaf() -> None:
    page = reference_page(SkyRLTrainConfig())
    for path in LEAVES:
        table, _, _ = path.rpartition(".")
        section = page.partition(f"## {table or 'The root'}\n")[2].partition("\n## ")[0]
        assert f"\n### {path}\n" in section, path


def test_the_section_of_one_field_says_what_the_page_does() -> None:
    section = reference_section(SkyRLTrainConfig(), "trainer.algorithm.lambd")
    assert section in reference_page(SkyRLTrainConfig())
    own = "your own in the signature of SkyRL or verl"
    read = "either the loss uses advantages (cross_entropy and online_dpo do not) or there is a critic"
    assert section.endswith(f"Acts only when the estimator is gae or {own} and {read}.\n")
