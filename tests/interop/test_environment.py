"""Values of the environment are kept as `env:NAME`, resolved, or refused by name; never taken as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from skyrl.config import load
from skyrl.interop.shell.unknown import as_argument
from skyrl.interop.skyrl.scripts import convert_overrides, convert_skyrl
from skyrl.interop.values import read_environment
from skyrl.interop.verl import convert as verl
from skyrl.tree.sparse import as_toml_has_it


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("${oc.env:MODEL}", "env:MODEL"),
        ("$MODEL", "env:MODEL"),
        ("${oc.env:SEED,7}", 7),
        ("${oc.env:NAME, abc}", "abc"),
        ("${oc.env:HOME}/ckpts/", "~/ckpts/"),
        ("${oc.env:HOME}", "~"),
        ("a/${oc.env:X,b}/c", "a/b/c"),
        (["${oc.env:HOME}/a.parquet"], ["~/a.parquet"]),
    ],
)
def test_references_to_the_environment_have_our_form(text: object, value: object) -> None:
    parsed = read_environment(text, "trainer.ckpt_path")
    assert (parsed.value, parsed.refused) == (value, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${oc.env:BASE}/ckpts", "BASE is set outside of the file"),
        ("$BASE/ckpts", "BASE is set outside of the file"),
        ("${now:%Y}", "${now:%Y} is evaluated by another program"),
        ("a/$(date)", "only a shell can evaluate $(...)"),
        ("$1", "$1 is an argument of the script"),
        (["ok", "$BASE/x"], "BASE is set outside of the file"),
    ],
)
def test_unresolvable_references_are_refused_by_name(text: object, message: str) -> None:
    assert message in read_environment(text, "trainer.ckpt_path").refused


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("'$NAME'", "$NAME"),
        ('"$NAME"', "env:NAME"),
        ('"\\$NAME"', "$NAME"),
        ("\\$NAME", "$NAME"),
        ("a'$1'b", "a$1b"),
        ("'a$(date)'", "a$(date)"),
        ("'$HOME/x'", "$HOME/x"),
        ("'${oc.env:NAME}'", "env:NAME"),  # an expansion of OmegaConf, not of Bash
        ("'${oc.env:NAME,b}/$NAME'", "b/$NAME"),
    ],
)
def test_a_dollar_that_bash_passes_on_is_text(word: str, value: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python -m skyrl.train.entrypoints.main_base trainer.seed=1 trainer.policy.model.path={word}\n")
    conversion = convert_skyrl(str(script))
    assert conversion.refused == ()
    assert conversion.tables["trainer"]["policy"]["model"]["path"] == value
    script.write_text(f"python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.model.path={word}\n")
    if "oc.env" not in word:
        assert verl.convert_verl(str(script)).tables["trainer"]["policy"]["model"]["path"] == value


def test_a_list_of_texts_with_dollars_stays_one() -> None:
    marked = as_argument("generator.sampling_params.stop=['$$', '$x$']")
    assert convert_overrides([marked]).tables["generator"]["sampling_params"]["stop"] == ["$$", "$x$"]


def test_run_names_may_contain_shell_commands() -> None:
    assert read_environment("grpo-$(date)", "trainer.run_name").value == "grpo-$(date)"


def test_nulls_are_values_and_a_number_may_come_from_the_environment(tmp_path: Path) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "run.toml"
    file.write_text(
        "trainer:\n  seed: ${oc.env:SEED}\n  algorithm: {value_clip: null, max_seq_len: null}\n  logger: console\n"
        "  policy: {model: {path: null}}\n"
    )
    conversion = convert_skyrl(str(file))
    assert [line.outcome for line in conversion.lines if line.is_refused] == []
    out.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    run = load([out], environ={"SEED": "7"}).config
    assert (run.trainer.algorithm.value_clip, run.trainer.seed) == (None, 7)


def test_a_null_that_toml_cannot_express_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {epochs: 2}\ngenerator: {inference_engine: {engine_init_kwargs: {seed: null, a: 1}}}\n")
    conversion = convert_skyrl(str(file))
    [refused] = [line for line in conversion.lines if line.is_refused]
    assert (refused.source, "TOML cannot express" in refused.reason) == (
        "generator.inference_engine.engine_init_kwargs.seed",
        True,
    )
    assert as_toml_has_it(conversion.tables, conversion.root)["trainer"]["epochs"] == 2


def test_every_null_of_skyrls_tree_is_a_null_of_ours(reference: Path) -> None:
    fields = json.loads((reference / "skyrl_config_fields.json").read_text())["fields"]
    nulls = [path for path, field in fields.items() if field["default"] is None]
    lines = convert_overrides([f"{path}=null" for path in nulls]).lines
    assert len(nulls) > 20
    assert [line for line in lines if line.is_refused] == []
