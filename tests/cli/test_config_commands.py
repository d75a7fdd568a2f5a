"""`skyrl config ...` as a person or a machine uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner, Result

from skyrl.cli import main
from skyrl.cli.command_line.arguments import paths_from, split_words
from skyrl.cli.command_line.commands import Commands
from skyrl.cli.main import cli
from skyrl.cli.preparing.config import config
from skyrl.config import SkyRLTrainConfig, load
from skyrl.config.cluster import load_cluster
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.config.loading.stored import stored_form
from skyrl.errors import ConfigError, UserError
from tests.config.leaves import LEAVES

RUN = '[trainer]\ndevice = "cpu"\nlogger = "console"\nepochs = 2\n\n[generator.inference_engine]\nbackend = "torch"\n'


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def said(*arguments: str, code: int = 0) -> str:
    """What the command prints, of which nothing may end in an exception but our own."""
    result: Result = CliRunner().invoke(config, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.parametrize("language", ["json", "toml", "yaml"])
@pytest.mark.parametrize("form", [(), ("--written",), ("--sparse",)])
def test_a_tree_that_is_shown_can_be_loaded_again(run_toml: Path, language: str, form: tuple[str, ...]) -> None:
    text = said("show", "run.toml", "--format", language, *form)
    (run_toml / f"again.{language}").write_text(text)
    loaded, original = load([f"again.{language}"]), load(["run.toml"])
    resolved = resolve_with_origins(original.config, original.origins)[0]
    assert loaded.config == (resolved if form == () else original.config)


def test_a_sparse_tree_is_what_was_written(run_toml: Path) -> None:
    text = said("show", "run.toml", "--sparse", "--format", "toml")
    assert sorted(text.splitlines()) == sorted(RUN.splitlines())


def test_origins_stand_beside_the_values(run_toml: Path) -> None:
    lines = said("show", "run.toml", "trainer.seed=7", "--origins").splitlines()
    leaves = {path for path in LEAVES if ".mixed_precision." not in path}  # a table that is null by default
    assert {line.partition(" = ")[0] for line in lines} >= leaves
    [epochs] = [line for line in lines if line.startswith("trainer.epochs = ")]
    [seed] = [line for line in lines if line.startswith("trainer.seed = ")]
    assert (epochs.split("#")[1].strip(), seed.split("#")[1].strip()) == ("run.toml:4", "argument 1")


def test_sparse_and_origins_show_what_was_written_and_where(run_toml: Path) -> None:
    lines = said("show", "run.toml", "trainer.seed=7", "--sparse", "--origins").splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        *("trainer.device", "trainer.seed", "trainer.epochs", "trainer.logger", "generator.inference_engine.backend"),
    ]
    assert lines[1].startswith("trainer.seed = 7 ") and lines[1].endswith("# argument 1")


@pytest.mark.parametrize("option", ["--written", "--sparse", "--origins"])
def test_derived_values_are_shown_alone(option: str, run_toml: Path) -> None:
    result = CliRunner().invoke(cli, ["config", "show", "run.toml", "--derived", option])
    assert isinstance(result.exception, UserError) and option in str(result.exception)


def test_what_was_derived_is_shown_with_its_reason(run_toml: Path) -> None:
    text = said("show", "run.toml", "--derived")
    assert "generator.max_input_length = 512\n    input_length_follows_prompt_length: " in text
    assert "    from trainer.max_prompt_length = 512" in text
    assert "trainer.epochs" not in text


def test_explain_lists_the_fields_of_a_table(run_toml: Path) -> None:
    lines = said("explain", "trainer.policy", "run.toml").splitlines()
    assert lines[:2] == ["trainer.policy", "  a table (PolicyConfig)"]
    assert "  sequence_parallel_size = 1" in lines
    number = sum(path.startswith("trainer.policy.optimizer_config.") for path in LEAVES)
    assert f"  optimizer_config  (a table of {number} fields)" in lines


def test_explain_is_printed_for_people_and_machines(run_toml: Path) -> None:
    assert said("explain", "trainer.epochs", "run.toml").startswith(
        "trainer.epochs = 2\n  a whole number, zero or positive\n"
    )
    assert json.loads(said("explain", "trainer.epochs", "run.toml", "--json"))["result"]["chain"][-1] == {
        "location": "run.toml:4",
        "value": 2,
        "because": "",
        "reads": [],
    }


def test_two_files_a_folder_and_a_preset_are_compared_by_type_too(run_toml: Path) -> None:
    (run_toml / "other.toml").write_text(RUN.replace("epochs = 2", "epochs = 3"))
    assert said("diff", "run.toml", "run.toml") == ""
    assert said("diff", "run.toml", "other.toml", code=1) == "trainer.epochs  2  ->  3\n"
    loaded = load(["run.toml"])
    run = resolve_with_origins(loaded.config, loaded.origins)[0]
    (run_toml / "runs").mkdir()
    (run_toml / "runs" / "config.json").write_text(json.dumps(stored_form(run)))
    assert said("diff", "run.toml", "runs") == ""
    assert "0.28  ->  0.2\n" in said("diff", "preset:dapo", "preset:dr-grpo", code=1)
    for name, flag in (("one", "true"), ("two", "1")):
        (run_toml / f"{name}.toml").write_text(RUN + f"[generator.chat_template_kwargs]\na = {flag}\n")
    rows = json.loads(said("diff", "one.toml", "two.toml", "--json", code=1))["result"]
    assert rows == [{"path": "generator.chat_template_kwargs", "before": {"a": True}, "after": {"a": 1}}]


def test_check_answers_machines_in_json(run_toml: Path) -> None:
    valid = {"command": "config check", "ok": True, "result": None, "problems": []}
    assert json.loads(CliRunner().invoke(cli, ["config", "check", "run.toml", "--json"]).stdout) == valid
    refused = CliRunner().invoke(cli, ["config", "check", "run.toml", "trainer.epoch=3", "--json"])
    assert isinstance(refused.exception, ConfigError)
    answer = json.loads(refused.stdout)
    assert answer["ok"] is False
    assert answer["problems"] == [
        {
            "path": "trainer.epoch",
            "message": "no such field; did you mean trainer.epochs?",
            "hint": "",
            "location": "argument 1",
            "severity": "error",
            "code": "misspelled field",
        }
    ]


def converted(script: str, *options: str) -> Result:
    Path("run.sh").write_text(script)
    return CliRunner().invoke(config, ["convert", "run.sh", "--from", "skyrl-hydra", *options])


@pytest.mark.usefixtures("run_toml")
def test_conversion_writes_a_file_that_loads_and_a_report() -> None:
    result = converted(
        "python -m skyrl.train.entrypoints.main_base generator.num_inference_engines=2 trainer.epochs=3\n",
        "--to",
        "new.toml",
    )
    assert (result.exit_code, result.stdout) == (0, "")
    assert load(["new.toml"]).config.generator.inference_engine.num_engines == 2
    assert result.stderr.startswith("kept 1, renamed 1, derived 0, needless 0, refused 0\n")
    assert result.stderr.endswith("\nWrote new.toml. Next: skyrl doctor new.toml\n")


@pytest.mark.usefixtures("run_toml")
def test_a_dash_is_standard_output() -> None:
    script = "python -m x trainer.epochs=3\n"
    dashed, plain = converted(script, "--to", "-"), converted(script)
    assert (dashed.exit_code, dashed.stdout, dashed.stderr) == (0, plain.stdout, plain.stderr)
    assert "epochs = 3" in dashed.stdout
    assert not Path("-").exists()


@pytest.mark.usefixtures("run_toml")
def test_conversion_replaces_a_file_only_when_asked_to() -> None:
    Path("new.toml").write_text("mine")
    script = "python -m x trainer.epochs=3\n"
    refused = converted(script, "--to", "new.toml")
    assert str(refused.exception) == "new.toml already exists: choose another file, or overwrite it with --force"
    assert Path("new.toml").read_text() == "mine"
    assert converted(script, "--to", "new.toml", "--force").exit_code == 0
    assert load(["new.toml"]).config.trainer.epochs == 3


@pytest.mark.usefixtures("run_toml")
def test_nothing_is_written_where_a_setting_is_refused() -> None:
    script = "python -m skyrl.train.entrypoints.main_base +trainer.mine=1 trainer.epochs=3\n"
    refused = converted(script, "--to", "new.toml")
    assert (refused.exit_code, Path("new.toml").exists()) == (1, False)
    assert refused.stderr.startswith("kept 1, renamed 0, derived 0, needless 0, refused 1 (1 may change the training)")
    assert "Of the 2 settings that need a counterpart, 50 % are in the result." in refused.stderr
    assert "because some settings were refused, 1 of which may change the training" in refused.stderr
    written = converted(script, "--keep-going", "--to", "new.toml")
    assert (written.exit_code, load(["new.toml"]).config.trainer.epochs) == (0, 3)
    assert Path("new.toml").read_text().startswith("# Refused by the conversion:\n#   trainer.mine = 1")


@pytest.mark.usefixtures("run_toml")
def test_a_refused_setting_that_only_watches_the_training_is_no_other_training() -> None:
    result = converted("python -m x hydra.run.dir=x trainer.epochs=3\n", "--to", "new.toml")
    assert (result.exit_code, Path("new.toml").exists()) == (1, False)
    assert "Nothing was written, because some settings were refused. --keep-going" in result.stderr


@pytest.mark.usefixtures("run_toml")
def test_what_belongs_to_the_machines_goes_into_the_description_of_a_cluster() -> None:
    Path("grpo.yaml").write_text("launcher: {trainer_cpus_per_gpu: 12}\nseed: 1\n")
    arguments = ["convert", "grpo.yaml", "--from", "areal", "--to", "new.toml"]
    result = CliRunner().invoke(config, arguments)
    assert (result.exit_code, load_cluster("new.cluster.toml").slurm.cpus_per_gpu) == (0, 12)
    assert result.stderr.endswith("\nWrote new.toml and new.cluster.toml. Next: skyrl doctor new.toml\n")
    Path("new.toml").unlink()
    repeated = CliRunner().invoke(config, arguments)
    assert str(repeated.exception).startswith("new.cluster.toml already exists")
    assert not Path("new.toml").exists()


def test_schema_and_docs_know_classes_of_ones_own(run_toml: Path) -> None:
    (run_toml / "mine.py").write_text(
        "from skyrl.config import AlgorithmConfig\nfrom skyrl.tree import frozen\n\n\n@frozen\n"
        'class Mine(AlgorithmConfig):\n    bonus: float = 0.5\n    """Added to every reward."""\n'
    )
    (run_toml / "own.toml").write_text(RUN + '[trainer.algorithm]\nclass = "mine.py:Mine"\nbonus = 2\n')
    definitions = json.loads(said("schema", "own.toml"))["$defs"]
    assert definitions["Mine"]["properties"]["bonus"]["description"] == "Added to every reward."
    assert definitions["TrainerConfig"]["properties"]["algorithm"]["$ref"] == "#/$defs/Mine"
    facts = "Type: a number. Default: `0.5`. May change on resume: with `resume_with_changes`."
    assert f"### trainer.algorithm.bonus\n\n{facts}\n\nAdded to every reward." in said("docs", "own.toml")
    assert "Added to every reward." in said("explain", "trainer.algorithm.bonus", "own.toml")


def test_a_root_may_be_in_the_home_folder_and_a_path_may_be_forgotten() -> None:
    words = ["~/run.toml", "~trainer.epochs", "a=1", "@b.toml", "c.yaml"]
    assert split_words(words) == (["~/run.toml", "c.yaml"], ["~trainer.epochs", "a=1", "@b.toml"])


def test_paths_are_completed_name_by_name() -> None:
    assert paths_from("train") == ["trainer.", "training_service."]
    assert "trainer.epochs=" in paths_from("trainer.ep")
    assert paths_from("trainer.policy.optimizer_config.lr") == ["trainer.policy.optimizer_config.lr="]
    assert paths_from("nothing") == []


@pytest.mark.parametrize(
    ("shell", "line"),
    [("bash", "== *[.=:/] ]] && compopt -o nospace"), ("zsh", "compadd -S '' -U -V unsorted")],
)
def test_no_space_is_put_behind_a_path_that_goes_on(shell: str, line: str) -> None:
    result = CliRunner().invoke(main.cli, ["completion", shell])
    assert result.output.count(line) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_answers_without_heavy_imports(shell: str, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom skyrl.cli.main import main\ntry:\n    main()\nfinally:\n"
        "    print(*sorted({'torch', 'ray', 'numpy', 'rich', 'yaml'} & set(sys.modules)), file=sys.stderr)\n"
    )
    words = "skyrl config check trainer.policy.optimizer_config.l"
    environment = {
        "_SKYRL_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": "3" if shell != "fish" else words.rpartition(" ")[2],
        "COMP_LINE": words,
        "COMP_POINT": str(len(words)),
        "COMP_WORDBREAKS": "=:@",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "trainer.policy.optimizer_config.lr=" in result.stdout, result.stderr
    assert result.stderr.strip() == ""


NOT_NEEDED = {
    "importlib.metadata": "which kernels are installed is asked of CUDA runs only",
    "skyrl.planning.memory": "no kind of GPU is named, so no memory is estimated",
    "skyrl.config.settings.supervised_root": "the file describes a reinforcement-learning run",
    "skyrl.cli.results.view": "another command",
    "skyrl.interop.systems": "nothing is converted",
}
"""Modules that checking a file for a CPU has no use for, and why."""


def test_checking_a_file_imports_only_what_its_kind_of_run_needs(run_toml: Path) -> None:
    program = (
        "import sys\nfrom skyrl.cli.main import main\ntry:\n    main()\nfinally:\n"
        f"    print(*sorted({set(NOT_NEEDED)} & set(sys.modules)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, "config", "check", "run.toml"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert all(map(find_spec, NOT_NEEDED))
    assert result.stdout.startswith("The configuration is valid"), result.stderr
    assert result.stderr.splitlines()[-1] == ""


def test_the_tree_of_a_command_is_of_the_root_class(run_toml: Path) -> None:
    assert json.loads(said("show", "run.toml")).keys() == SkyRLTrainConfig.__annotations__.keys()


def test_docs_of_a_path_are_its_section_alone(run_toml: Path) -> None:
    page = said("docs", "trainer.faults")
    assert page.startswith("## trainer.faults\n")
    assert page.count("\n## ") == 0
    facts = "Type: a whole number. Allowed: zero or positive. Default: `1`. May change on resume: freely.\n"
    assert said("docs", "trainer.epochs").startswith(f"### trainer.epochs\n\n{facts}")
    assert said("docs", "generator.eval_sampling_params.top_p").startswith("### generator.eval_sampling_params.top_p\n")
    assert said("docs", "kind=sft", "learner").startswith("There is nothing to print")
    assert "did you mean trainer.faults?" in said("docs", "trainer.fault")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("trainer.algorithm=grpo", "trainer.algorithm.advantage_estimator=grpo"),
        ("generator.inference_engine=vllm", "generator.inference_engine.backend=vllm"),
        ("trainer.policy.model=Qwen/Qwen3-8B", "trainer.policy.model.path=Qwen/Qwen3-8B"),
        ("environment=gsm8k", "environment.env_class=gsm8k"),
        ("trainer.policy.optimizer_config.lrr=1e-5", "trainer.policy.optimizer_config.lr"),
    ],
)
def test_a_mistake_names_the_field_that_was_meant(word: str, meant: str) -> None:
    assert f"did you mean {meant}?" in said("check", word)


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ("trainer.epochs = 2", ["trainer.epochs=2"]),
        ("trainer.epochs =2", ["trainer.epochs=2"]),
        ("trainer.epochs= 2", ["trainer.epochs=2"]),
        ("preset:one-process trainer.epochs = 2", ["trainer.epochs=2"]),
        ("trainer.epochs = 2 trainer.seed = 3", ["trainer.epochs=2", "trainer.seed=3"]),
        ("trainer.run_name = a trainer.seed=3", ["trainer.run_name=a"]),
    ],
)
def test_spaces_around_an_equals_sign_are_one_mistake_each(words: str, hints: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        split_words(words.split())
    assert [problem.hint for problem in caught.value.problems] == [
        f"write the value without a space: {h}" for h in hints
    ]
    assert {problem.message for problem in caught.value.problems} == {"there are spaces around its equals sign"}


@pytest.mark.parametrize("words", ["trainer.run_name= run.toml", "run.toml trainer.run_name=", "a=b=c", "a=1 b=2"])
def test_an_empty_value_before_a_file_is_no_mistake(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    assert sum(map(len, split_words(words.split()))) == len(words.split())


def test_an_empty_check_reports_no_problem() -> None:
    assert said("check", "=", "trainer.epochs=1").splitlines()[1].startswith("  =  is not a dotted path")


def test_nothing_is_not_checked() -> None:
    result = CliRunner().invoke(config, ["check"])
    assert result.exit_code == 2
    assert "there is nothing to check: give a file" in result.stderr


@pytest.mark.parametrize(("words", "to_do"), [(["run"], "run"), (["launch", "slurm"], "launch")])
def test_nothing_is_not_run(words: list[str], to_do: str) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert f"there is nothing to {to_do}: give a file" in result.stderr


PLACES = [
    (["convert", "x.sh"], "skyrl config convert"),
    (["show", "runs/mine"], "skyrl ckpt show or skyrl config show or skyrl data show or skyrl templates show"),
    (["config", "launch"], "skyrl launch"),
    (["ckpt", "convert"], "skyrl config convert"),
]


@pytest.mark.parametrize(("words", "meant"), PLACES)
def test_a_command_of_another_group_is_named_in_full(words: list[str], meant: str) -> None:
    result = CliRunner().invoke(cli, words, prog_name="skyrl")
    assert result.exit_code == 2
    assert f"did you mean: {meant}?" in result.stderr


def test_every_command_of_a_group_is_named_where_it_is_looked_for_at_the_top() -> None:
    assert isinstance(cli, Commands)
    context = Context(cli)
    top = dict(cli.each_command(context))
    names = [
        (group, name)
        for group, commands in top.items()
        if isinstance(commands, Commands)
        for name, command in commands.each_command(context)
        if name not in top and not command.hidden
    ]
    assert ("config", "explain") in names
    for group, name in names:
        assert f"skyrl {group} {name}" in CliRunner().invoke(cli, [name], prog_name="skyrl").stderr


def test_each_command_is_found_under_its_own_name() -> None:
    assert isinstance(cli, Commands)
    assert [(name, command.name) for name, command in cli.each_command(Context(cli)) if name != command.name] == []


@pytest.mark.parametrize("name", ["run.toml", "elsewhere.yaml"])
def test_a_file_in_the_place_of_a_path_is_told_from_one(run_toml: Path, name: str) -> None:
    assert f"skyrl config explain trainer.epochs {name}" in said("explain", name)


@pytest.mark.usefixtures("run_toml")
def test_sglang_stays_the_engine_of_an_areal_file_where_it_is_kept() -> None:
    Path("grpo.yaml").write_text(
        "allocation_mode: sglang:d4+fsdp:d4\nsglang: {attention_backend: fa3, mem_fraction_static: 0.5}\n"
    )
    arguments = ["convert", "grpo.yaml", "--from", "areal", "--to", "new.toml"]
    result = CliRunner().invoke(config, [*arguments, "--keep-engine"])
    engine = load(["new.toml"]).config.generator.inference_engine
    assert (result.exit_code, engine.backend, engine.gpu_memory_utilization) == (0, "sglang", 0.5)
    assert engine.engine_init_kwargs == {"attention_backend": "fa3"}
    assert "The engines remain SGLang" in result.stderr
    repeated = CliRunner().invoke(config, [*arguments, "--force"])
    engine = load(["new.toml"]).config.generator.inference_engine
    assert (repeated.exit_code, engine.backend, engine.engine_init_kwargs) == (0, "vllm", {})
    assert "--keep-engine keeps SGLang" in repeated.stderr


@pytest.mark.usefixtures("run_toml")
def test_engines_are_kept_of_areals_files_only() -> None:
    refused = converted("python -m x trainer.epochs=3\n", "--to", "new.toml", "--keep-engine")
    assert str(refused.exception) == "--keep-engine works only with --from areal, not --from skyrl-hydra"
    assert not Path("new.toml").exists()
