"""SkyRL's scripts, of the Hydra era: every override has a fate, and what is kept has its recorded value."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import SkyRLTrainConfig, load
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.interop.report import Conversion
from skyrl.interop.skyrl.scripts import convert_overrides, convert_skyrl
from skyrl.tree.arguments import split_path
from skyrl.tree.dump import stored_value
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import hydra_scripts

Script = dict[str, Any]

AUTHORS_OWN = {
    "trainer.algorithm.overlong_buffer", "generator.retokenize_chat_history",
    "generator.miniswe_config_path", "generator.miniswe_traj_dir",
}  # fmt: skip
"""Fields that examples brought with them, by `+` or by a subclass."""

REFUSED = {**dict.fromkeys(AUTHORS_OWN, "a custom field"), "hydra": "Hydra is not used"}
"""Why an override may be refused."""


@pytest.fixture(scope="module")
def converted(reference: Path) -> list[tuple[Script, Conversion]]:
    """Each script of the corpus and what became of it."""
    return [(script.facts, script.conversion) for script in hydra_scripts(reference)]


def loaded(conversion: Conversion, folder: Path) -> SkyRLTrainConfig:
    """The resolved tree of a conversion, through the TOML that is written of it."""
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, SkyRLTrainConfig)))
    result = load([file])
    return resolve_with_origins(result.config, result.origins)[0]


def test_no_override_is_lost(converted: list[tuple[Script, Conversion]]) -> None:
    outcomes: Counter[str] = Counter()
    for script, conversion in converted:
        assert len(conversion.lines) == len(script["overrides"])
        outcomes.update(conversion.counts())
    print(dict(outcomes))
    assert outcomes["kept"] + outcomes["renamed"] > 0.95 * outcomes.total()


@pytest.mark.long
def test_every_refusal_has_a_reason(converted: list[tuple[Script, Conversion]]) -> None:
    for script, conversion in converted:
        for line in conversion.lines:
            if line.outcome != "refused" or line.value == "":
                continue
            reasons = [reason for start, reason in REFUSED.items() if line.source.startswith(start)]
            assert reasons, (script["script"], line)
            assert reasons[0] in line.reason


def test_what_is_kept_has_the_value_that_was_recorded(
    converted: list[tuple[Script, Conversion]], tmp_path: Path
) -> None:
    different = {}
    for script, conversion in converted:
        run = loaded(conversion, tmp_path)
        refused = {line.source.lstrip("+") for line in conversion.lines if line.outcome in ("refused", "needless")}
        refused |= {
            line.source for line in conversion.lines if line.outcome == "renamed" and line.source in line.targets
        }
        for path, value in (script.get("translated_values") or {}).items():
            if path not in refused and not same(at(run, path), value):
                different[path, at(run, path)] = value
    assert different == {("trainer.resume_mode", "none"): None}  # both words mean: start fresh


def at(run: SkyRLTrainConfig, path: str) -> Any:
    """The stored value at a path, inside free-form tables too."""
    value: Any = run
    for name in split_path(path):
        value = value[name] if hasattr(value, "get") else getattr(value, name)
    return stored_value(value)


def same(converted: Any, reference: Any) -> bool:
    """Equal in value and type, once a whole number may stand for the number of a field that holds such."""
    return repr(converted) == repr(
        float(reference) if type(converted) is float and type(reference) is int else reference
    )


def test_a_script_is_read_without_being_run(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        """#!/bin/bash
        # trainer.seed=1 in a comment is none
        GPUS=4
        uv run -m skyrl.train.entrypoints.main_base \\
          data.train_data="['$HOME/data/train.parquet']" \\
          trainer.placement.policy_num_gpus_per_node=$GPUS generator.num_inference_engines=${GPUS} \\
          trainer.run_name="1e5" trainer.epochs=${EPOCHS:-3} +generator.engine_init_kwargs.max_model_len=4096 $@
        """
    )
    run = loaded(convert_skyrl(str(file)), tmp_path)
    assert run.data.train_data == ("~/data/train.parquet",)
    assert run.trainer.placement.policy_num_gpus_per_node == run.generator.inference_engine.num_engines == 4
    assert (run.trainer.run_name, run.trainer.epochs) == ("1e5", 3)
    assert run.generator.inference_engine.engine_init_kwargs == {"max_model_len": 4096}


def test_what_only_a_shell_could_tell_is_refused_but_in_a_name(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text('python -m main trainer.run_name="a-$(date)" trainer.epochs=$(nproc) trainer.seed=$SEED')
    lines = {line.source: (line.outcome, line.value) for line in convert_skyrl(str(file)).lines}
    assert lines["trainer.run_name"] == ("kept", "a-$(date)")
    assert lines["trainer.epochs"] == ("refused", "$(nproc)")
    assert lines["trainer.seed"][0] == "kept"  # env:SEED


def test_a_hydra_file_is_converted_with_its_references_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "generator:\n  num_inference_engines: 2\n  max_input_length: ${trainer.max_prompt_length}\n"
        "trainer:\n  max_prompt_length: 300\n  algorithm: {ppo_loss_type: dual_clip, use_kl_estimator_k3: false}\n"
        "  policy: {optimizer_config: {lr: 1.0e-6}}\n"
    )
    conversion = convert_skyrl(str(file))
    run = loaded(conversion, tmp_path)
    assert run.generator.inference_engine.num_engines == 2
    assert (run.trainer.algorithm.policy_loss_type, run.trainer.algorithm.kl_estimator_type) == ("dual_clip", "k1")
    assert [line.source for line in conversion.lines if line.outcome == "derived"] == ["generator.max_input_length"]
    assert run.generator.max_input_length == 300


def test_a_removing_override_is_refused_with_the_reason() -> None:
    [line] = convert_overrides(["~trainer.policy"]).lines
    assert (line.outcome, line.reason) == ("refused", "removes a Hydra default, and there are none here")


def test_a_script_that_leaves_the_bounds_of_cispo_alone_gets_those_of_scale_rl(tmp_path: Path) -> None:
    run = loaded(convert_overrides(["trainer.algorithm.policy_loss_type=cispo"]), tmp_path)
    cispo = run.trainer.algorithm.cispo
    assert (1 - cispo.cispo_eps_clip_low, 1 + cispo.cispo_eps_clip_high) == (0.0, 5.0)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer.run_name="], "empty, so the default applies"),
        (["trainer.ckpt_path="], "empty, so the default applies"),
        (
            ["generator.step_wise_trajectories=true", "+generator.retokenize_chat_history=true"],
            "re-tokenizes every turn",
        ),
        (
            ["trainer.policy.torch_profiler_config.enable=false", "trainer.policy.torch_profiler_config.ranks=[0]"],
            "only read with trainer.policy.torch_profiler_config.enable, which is off",
        ),
    ],
)
def test_settings_without_effect_beside_others_are_redundant(overrides: list[str], reason: str) -> None:
    conversion = convert_overrides(overrides)
    assert (conversion.refused, conversion.lines[-1].outcome) == ((), "needless")
    assert reason in conversion.lines[-1].reason


def test_an_empty_text_of_a_file_is_null_where_null_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer: {critic: {model: {path: ''}}, ref: {model: {path: ''}}, resume_path: '', run_name: a}\n"
        "generator: {engine_init_kwargs: {revision: ''}}\n"
    )
    conversion = convert_skyrl(str(file))
    assert not conversion.problems
    run = loaded(conversion, tmp_path)
    assert (run.trainer.critic.model.path, run.trainer.resume_path) == (None, None)
    assert dict(run.generator.inference_engine.engine_init_kwargs) == {"revision": ""}


def test_the_same_settings_are_converted_where_they_act() -> None:
    overrides = ["trainer.policy.torch_profiler_config.enable=true", "+generator.retokenize_chat_history=true"]
    assert [line.outcome for line in convert_overrides(overrides).lines] == ["renamed", "refused"]
    assert convert_overrides(["data.train_data="]).lines[0].outcome == "refused"


def test_a_script_that_keeps_its_cache_under_new_weights_shares_no_prefixes(tmp_path: Path) -> None:
    overrides = ["trainer.fully_async.enabled=true", "trainer.fully_async.clear_kv_cache_on_weight_sync=false"]
    conversion = convert_overrides([*overrides, "trainer.placement.colocate_all=false"])
    assert not any(problem.path.endswith("weight_sync") for problem in conversion.problems)
    assert loaded(conversion, tmp_path).generator.inference_engine.enable_prefix_caching is False


def test_a_switch_without_a_value_is_off_and_other_settings_without_one_are_refused() -> None:
    conversion = convert_overrides(["trainer.remove_microbatch_padding=", "trainer.epochs="])
    assert conversion.tables["trainer"]["use_sample_packing"] is False
    switch, epochs = conversion.lines
    assert (switch.outcome, epochs.outcome) == ("renamed", "refused")
    assert "treats as false" in switch.reason
