"""Every command with every kind of run: it works, or it says in a sentence why there is nothing for it to do."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import tomli_w
from attrs import frozen
from click.testing import CliRunner, Result

from skyrl.cli.command_line.commands import Commands
from skyrl.cli.main import cli, main
from skyrl.config import load
from skyrl.config.cluster import ClusterConfig
from skyrl.config.loading.kinds import KINDS
from skyrl.errors import ProcessError, SkyRLError, UserError
from skyrl.launchers.local import LocalLauncher
from skyrl.launchers.ray import RayLauncher
from tests import nano_run, supervised_run
from tests.command_pages import contexts
from tests.supervised_run import toml_file

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "commands.schema.json").read_text(encoding="utf-8"))
OF_THE_SCHEMA = jsonschema.Draft202012Validator(SCHEMA)

pytestmark = pytest.mark.xdist_group("kinds_of_run")


@frozen
class Refused:
    """The command ends in one sentence, which begins with this or has it inside, and changes nothing."""

    sentence: str


@frozen
class Row:
    """A command, and what each kind of run makes of it: text that is printed, or a refusal. None: the other table has
    the cell.
    """

    words: str
    rl: str | Refused | None
    sft: str | Refused | None
    reward_model: str | Refused | None
    preference: str | Refused | None
    code: int = 0


def alike(words: str, says: str | Refused, code: int = 0) -> Row:
    """A command that does the same for every kind."""
    return Row(words, says, says, says, says, code)


def sampling(words: str, says: str | Refused | None, refused: str | None) -> Row:
    """A command for runs that sample."""
    other = None if refused is None else Refused(refused)
    return Row(words, says, other, other, other)


NOT_SAMPLED = "{run} is a run of kind = {kind}, which samples nothing"
NOT_REHEARSED = "kind = {kind}: only reinforcement-learning runs can be rehearsed"
SCORES = Refused("{run} is a run of kind = reward_model, which scores chats: use skyrl serve-reward")
CONFIGURED = Refused("also give a configuration")
VALID, LAUNCHED = "The configuration is valid", "launches/{name}/run.toml"
PROMPTED = Refused("also give prompts, with --prompts FILE")
NOT_RL = Refused("the configuration is of kind = {kind}, which does not say how to sample: leave it out, or pass one")
SHORT = "generator.eval_sampling_params.max_generate_length=5"
UNNAMED = Refused("this is the default: set data.val_data")
TRUST = Refused("if you trust it, pass --trust, or name it in this command, too: environment.env_class=")
ON_TORCH = "generator.inference_engine.backend=torch trainer.device=cpu generator.sampling_params.max_generate_length=5"
ANSWERS = "--prompts {nano}/validation.jsonl --to out"
OWN_REWARD = "environment.env_class={nano}/reward.py:in_ascii --to out"

QUICK = (
    alike("config show {file}", '"kind": "{kind}"'),
    alike("config show {file} --sparse --format toml", "{last}"),
    alike("config check {file}", "The configuration is valid"),
    Row("config check {run}", TRUST, VALID, VALID, VALID),
    alike("config explain {lr} {file}", "run.toml"),
    alike("config diff {file} {other}", "{lr}", 1),
    alike("config diff {file} {run}", ""),
    alike("config docs {file}", "# Every field"),
    alike("config schema {file}", '"$schema"'),
    alike("doctor {file} {again}", "this machine has what it names"),
    alike("doctor {file} {again} --cluster", Refused("--cluster checks a running Ray cluster: set {table}placement")),
    alike("data show {file}", "tokens"),
    alike("data inspect {file}", "are used"),
    alike("data split {file} --out halves", "halves/validation.jsonl: "),
    sampling("plan {file}", "Everything runs in the command's own process", "kind = {kind}: its models are on placem"),
    sampling("simulate {file}", Refused("--answer-seconds is missing"), "kind = {kind}: nothing is sampled"),
    sampling("rehearse {file}", None, NOT_REHEARSED),
    alike("launch local {file} --dry-run", "run {here}/launches/{name}/run.toml"),
    Row("launch local {run} --dry-run", TRUST, LAUNCHED, LAUNCHED, LAUNCHED),
    alike("launch slurm {file} --dry-run", "#SBATCH --job-name={name}"),
    alike("launch ray {file} --dry-run", "run {here}/launches/{name}/run.toml"),
    alike("sweep sweep.toml --dry-run", "{lr}=0.01"),
    alike("ckpt list {run}", "2 checkpoints"),
    alike("ckpt verify {run}", "2  good"),
    alike("ckpt show {run}", "global_step_2"),
    alike("ckpt diff {checkpoints}/global_step_1 {checkpoints}/global_step_2", "trainer.version: 1 -> 2"),
    alike("watch --once {run}", "{run}: finished"),
    alike("timeline {run} --to trace.json", "1 step in trace.json"),
    alike("bisect {run} {run}", "are equal in"),
    sampling("view {run} --port 0", "{run} at http://127.0.0.1:", NOT_SAMPLED + ": skyrl report {run} shows"),
    sampling("engines list {run}", Refused("has no engines/state.json"), NOT_SAMPLED + ": it has no engines"),
    sampling("replay {run} --step 9", Refused("is not in the recording"), NOT_SAMPLED + " and records no steps"),
    alike("eval {run} --step 9", Refused("there is no checkpoint of step 9")),
    Row("eval {run}", TRUST, CONFIGURED, SCORES, Refused("eval_datasets is empty")),
    Row("generate {run} --to out", "6 answers in", PROMPTED, SCORES, PROMPTED),
    Row("generate {run} {file} --to out", "6 answers in", NOT_RL, SCORES, NOT_RL),
    Row(f"generate {{run}} {SHORT} --to out", "6 answers in", UNNAMED, SCORES, UNNAMED),
    alike("serve {run} --adapter a=nowhere", Refused("nowhere contains no adapter")),
    Row(
        "serve-reward {run} --port 0",
        Refused("{run} is a run of kind = rl, whose model scores nothing"),
        Refused("{run} is a run of kind = sft, whose model scores nothing"),
        "{run} at http://127.0.0.1:",
        Refused("{run} is a run of kind = preference, whose model scores nothing"),
    ),
)  # fmt: skip
"""What takes no more than a moment."""

WHOLE = (
    Row(f"eval {{run}} {{rl_file}} {OWN_REWARD}", "letters  ", "letters  ", SCORES, "letters  "),
    Row(f"eval {{run}} {{rl_file}} {OWN_REWARD} --step 1", "letters  ", "letters  ", SCORES, "letters  "),
    Row(f"generate {{run}} {{rl_file}} {ANSWERS}", "6 answers in", "6 answers in", SCORES, "6 answers in"),
    Row(f"generate {{run}} {ANSWERS} {ON_TORCH}", "6 answers in", "6 answers in", SCORES, "6 answers in"),
    alike("export {run} --to out", "step 2: model in out"),
    alike("report {run} --to report.html", "report.html: "),
    alike("track {run} --to tensorboard", "up to step 2"),
    sampling("replay {run} --step 1 --trust", "bit-equal", NOT_SAMPLED + " and records no steps"),
    sampling("rehearse {file}", "passed", None),
    alike("sweep sweep.toml", "finished"),
)  # fmt: skip
"""What loads or trains a model."""

MACHINE = (
    ("config check {file}", 0), ("config check {file} trainer.epoch=1", 2), ("config explain {lr} {file}", 0),
    ("config diff {file} {other}", 1), ("config convert script.sh --from skyrl --to out.toml", 0),
    ("config convert missing.sh --from skyrl --to out.toml", 2), ("doctor {file} {again}", 0), ("data show {file}", 0),
    ("data inspect {file}", 0), ("data split {file} --out halves", 0), ("data make gsm8 --out made", 2),
    ("templates check {nano}/model", 0), ("plan {file}", 0), ("plan {file} --fit 1", 2),
    ("simulate {file} --answer-seconds 1 --train-seconds 1 --restart-seconds 9 --checkpoint-seconds 1", 0),
    ("launch status", 0), ("sweep sweep.toml --report", 0), ("watch {run} --once", 0), ("ckpt list {run}", 0),
    ("ckpt verify {run}", 0), ("ckpt show {run}", 0), ("ckpt list nowhere", 2),
    ("ckpt diff {checkpoints}/global_step_1 {checkpoints}/global_step_2", 0), ("engines list engines", 0),
    ("bisect {run} {run}", 0),
)  # fmt: skip
"""Commands of a run that samples, and the exit codes."""

MACHINE_WHOLE = (
    (f"eval {{run}} {{rl_file}} {OWN_REWARD}", 0), ("rehearse {file}", 0),
)  # fmt: skip
"""What loads or trains a model."""

ELSEWHERE: Mapping[str, str] = {
    "engines add": "changes a run in progress: tests/inference/test_engine_changes.py",
    "engines drain": "the same",
    "run": "makes the runs of these tests",
    "completion": "reads no run",
    "templates check": "reads a model",
    "templates show": "reads a model",
    "model check": "reads a model",
    "model from-gguf": "makes a model",
    "publish": "starts a program",
    "serve-training": "serves no run: tests/training_service/test_whole_service.py",
    "serve-code": "reads no run",
    "serve-retriever": "reads documents",
    "data make": "reads no run",
    "config convert": "makes a run of a script: tests/interop",
    "init": "makes a task: test_a_task_is_made_for_each_kind_that_has_a_template",
    "launch node": "a part of launch local: test_a_launched_run_trains_as_the_run_of_its_file",
    "launch status": "reads launches: test_a_launched_run_is_the_run_of_its_file",
    "launch logs": "the same",
    "launch stop": "the same",
}
"""Commands without a cell, and why."""


@pytest.fixture(scope="module")
def stored(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """For each kind: the words of its cells, after `skyrl run` has trained it for two steps."""
    runs = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        lr, name, table = "optimizer_config.lr", "skyrl_sft_run", ""
        if kind == "rl":
            lr, name, table = f"trainer.policy.{lr}", "test_run", "trainer."
            changes: dict[str, Any] = {"trainer__max_training_steps": 2, "trainer__ckpt_interval": 1}
            changes |= {
                "trainer__eval_interval": -1,
                "trainer__eval_before_train": False,
                "trainer__recording": "jsonl",
            }
            values = nano_run.overrides(nano, folder, **changes, trainer__profile_steps=[2])
            del values["trainer.ckpt_path"], values["trainer.export_path"]
        else:
            values = supervised_run.settings(nano, folder, kind, num_steps=2, ckpt_interval=1, profile_steps=[2])
        file = toml_file(folder / "run.toml", values)
        result = CliRunner().invoke(cli, ["run", file])
        assert result.exit_code == 0, result.output
        runs[kind] = {
            "kind": kind,
            "file": file,
            "other": toml_file(folder / "other.toml", values | {lr: 0.5}),
            "run": str(folder / "run"),
            "checkpoints": str(folder / "run" / "checkpoints"),
            "lr": lr,
            "name": name,
            "last": f"[{lr.rpartition('.')[0]}]",
            "again": f"{table}run_path=fresh {table}run_name=fresh",
            "nano": str(nano),
            "table": table,
            "loss": "train/loss" if kind != "rl" else "policy/policy_loss",
        }
    return {kind: {**words, "rl_file": runs["rl"]["file"]} for kind, words in runs.items()}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no Slurm
    return tmp_path


def invoked(words: str, about: Mapping[str, str]) -> Result:
    Path("sweep.toml").write_text(tomli_w.dumps({"name": "s", "run": [about["file"]], "grid": {about["lr"]: [0.01]}}))
    return CliRunner().invoke(cli, shlex.split(words.format(**about)))


def judged(result: Result, expected: str | Refused, code: int, about: Mapping[str, str]) -> None:
    if isinstance(expected, Refused):
        assert isinstance(result.exception, SkyRLError), result.exc_info
        message = str(result.exception)
        assert result.exit_code != 0 and expected.sentence.format(**about) in message
        assert len(message.splitlines()) == 1 or message.startswith("This run cannot start (1 problem)"), message
    else:
        assert (result.exit_code, result.exception if code == 0 else None) == (code, None), (
            result.output,
            result.exception,
        )
        assert expected.format(**about) in result.output


def cells(table: Sequence[Row]) -> list[Any]:
    """Each command with each kind that the table has something about."""
    rows = [(row, kind) for row in table for kind in KINDS if getattr(row, kind) is not None]
    return [pytest.param(row, kind, id=f"{row.words}-{kind}") for row, kind in rows]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("row", "kind"), cells(QUICK))
def test_a_command_takes_the_run_or_says_why_not(
    row: Row, kind: str, stored: Mapping[str, dict[str, str]], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.processes.service.serve", lambda app, bound: None)  # as after a signal
    about = stored[kind] | {"here": str(workspace)}
    expected = getattr(row, kind)
    judged(invoked(row.words, about), expected, row.code, about)
    if isinstance(expected, Refused) or "--dry-run" in row.words:
        assert [path.name for path in workspace.iterdir()] == ["sweep.toml"]


@pytest.mark.long
@pytest.mark.parametrize(("row", "kind"), cells(WHOLE))
def test_a_command_that_loads_or_trains_a_model_takes_the_run_or_says_why_not(
    row: Row, kind: str, stored: Mapping[str, dict[str, str]], workspace: Path
) -> None:
    about = stored[kind] | {"here": str(workspace)}
    judged(invoked(row.words, about), getattr(row, kind), row.code, about)


def conforms(words: str, code: int, about: Mapping[str, str]) -> None:
    """The command prints one object with --json, of the form that the schema has for it."""
    result = invoked(f"{words} --json", about)
    assert result.exit_code == code if code != 2 else isinstance(result.exception, UserError), (
        result.output,
        result.exc_info,
    )
    answer = json.loads(result.stdout)
    OF_THE_SCHEMA.validate(answer)
    command = answer["command"]
    assert words.startswith(command) and answer["ok"] == (code == 0)
    refused = code == 2
    assert (answer["result"] is None) == (refused or command == "config check")
    assert [problem for problem in answer["problems"] if problem["severity"] == "error"] != [] if refused else True


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "code"), MACHINE)
def test_a_machine_reads_the_same_form_from_every_command(
    words: str, code: int, stored: Mapping[str, dict[str, str]], workspace: Path
) -> None:
    (workspace / "engines" / "engines").mkdir(parents=True)
    state = {"number": 0, "state": "serving", "samples": 1, "weight_version": 3}
    listed = {"least": 1, "most": 1, "engines": [state], "answers": [{"asked": "add", "said": "no", "moment": 1.0}]}
    (workspace / "engines" / "engines" / "state.json").write_text(json.dumps(listed))
    (workspace / "script.sh").write_text("python -m skyrl.train.entrypoints.main_base trainer.epochs=3\n")
    conforms(words, code, stored["rl"] | {"here": str(workspace)})


@pytest.mark.long
@pytest.mark.parametrize(("words", "code"), MACHINE_WHOLE)
def test_a_machine_reads_the_same_form_from_commands_that_load_a_model(
    words: str, code: int, stored: Mapping[str, dict[str, str]], workspace: Path
) -> None:
    conforms(words, code, stored["rl"] | {"here": str(workspace)})


def test_every_command_with_json_is_in_the_schema_and_in_a_test() -> None:
    OF_THE_SCHEMA.check_schema(SCHEMA)
    with_json = {
        context.command_path.partition(" ")[2]
        for context in contexts()
        if any("--json" in parameter.opts for parameter in context.command.params)
    }
    tried = [words for words, _ in (*MACHINE, *MACHINE_WHOLE)]
    assert with_json == set(SCHEMA["properties"]["command"]["enum"]) == set(SCHEMA["$defs"]) - {"problem"}
    assert {name for name in with_json if not any(words.startswith(name) for words in tried)} == set()


@pytest.mark.parametrize("wrong", ["--no-such-option", "--json=3"])
def test_a_machine_reads_mistakes_in_arguments_of_every_command(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in SCHEMA["properties"]["command"]["enum"]:
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), "--json", wrong])
        assert ended.value.code == 2
        printed = capsys.readouterr()
        answer = json.loads(printed.out)
        OF_THE_SCHEMA.validate(answer)
        assert (answer["command"], answer["ok"], answer["result"]) == (name, False, None)
        [problem] = answer["problems"]
        assert problem["message"] in printed.err and wrong.partition("=")[0] in problem["message"]


def test_every_command_has_a_cell() -> None:
    named, rows = set(leaves(cli, click.Context(cli))), (*QUICK, *WHOLE)
    missing = {
        words
        for words in named
        for kind in KINDS
        if not any(f"{row.words} ".startswith(f"{words} ") and getattr(row, kind) is not None for row in rows)
    }
    assert missing == set(ELSEWHERE)


def leaves(group: Commands, context: click.Context, words: str = "") -> Iterator[str]:
    """Every command of the group and of those in it."""
    for name, command in group.each_command(context):
        if isinstance(command, Commands):
            yield from leaves(command, context, f"{words}{name} ")
        else:
            yield f"{words}{name}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["slurm", "ray", "local --after another"])
def test_a_refused_launch_leaves_nothing(
    kind: str, target: str, stored: Mapping[str, dict[str, str]], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayLauncher, "_connected", unreachable)
    for folder in ("launches", "of/mine"):
        result = CliRunner().invoke(cli, ["launch", *target.split(), "--set", f"folder={folder}", stored[kind]["file"]])
        assert isinstance(result.exception, SkyRLError), result.output
        assert list(workspace.iterdir()) == []
    (workspace / "launches").mkdir()
    CliRunner().invoke(cli, ["launch", *target.split(), stored[kind]["file"]])
    assert [path.name for path in workspace.iterdir()] == ["launches"]  # which was there


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["slurm", "ray"])
def test_a_refused_sweep_leaves_nothing(
    kind: str, target: str, stored: Mapping[str, dict[str, str]], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayLauncher, "_connected", unreachable)
    result = invoked(f"sweep sweep.toml --on {target}", stored[kind])
    assert isinstance(result.exception, SkyRLError), result.output
    assert [path.name for path in workspace.iterdir()] == ["sweep.toml"]


def unreachable(*_: object) -> None:
    """In place of connecting to a cluster."""
    raise ProcessError("Ray's dashboard is out of reach")


PYTHON = """#!/bin/bash
echo "$@" > words
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_launched_run_is_the_run_of_its_file(
    kind: str, stored: Mapping[str, dict[str, str]], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "python").write_text(PYTHON)
    (workspace / "python").chmod(0o755)
    launch = launched(stored[kind], workspace, monkeypatch, python=workspace / "python")
    assert (workspace / "words").read_text().endswith(f"run {launch / 'run.toml'}\n")
    assert load([launch / "run.toml"]).config == load([stored[kind]["file"]]).config
    for words in (["status"], ["logs", str(launch)], ["stop", str(launch)]):
        assert CliRunner().invoke(cli, ["launch", *words]).exit_code == 0


def launched(
    about: Mapping[str, str], workspace: Path, monkeypatch: pytest.MonkeyPatch, *words: str, python: Path | None = None
) -> Path:
    """The folder of a local launch that has ended."""
    launcher = LocalLauncher(ClusterConfig(), str(python or sys.executable))
    monkeypatch.setattr(
        "skyrl.cli.training.launch.launcher_of", lambda target, cluster: launcher
    )  # which keeps its processes
    result = CliRunner().invoke(cli, ["launch", "local", about["file"], "--name", "mine", *words])
    assert result.exit_code == 0, result.exception
    [process] = launcher._processes.values()
    process.wait(300)
    return workspace / "launches" / "mine"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_launched_run_trains_as_the_run_of_its_file(
    kind: str, stored: Mapping[str, dict[str, str]], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = stored[kind]
    launch = launched(about, workspace, monkeypatch, f"{about['table']}run_path={workspace / 'run'}")
    assert json.loads((launch / "state.json").read_text())["state"] == "finished"
    losses = []
    for folder in (Path(about["run"]), workspace / "run"):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([record[about["loss"]] for record in records if about["loss"] in record])
    assert len(losses[0]) == 2 and losses[0] == losses[1]


@pytest.mark.parametrize(("template", "kind"), [("reward", "rl"), ("sft", "sft"), ("preference", "preference")])
def test_a_task_is_made_for_each_kind_that_has_a_template(template: str, kind: str, workspace: Path) -> None:
    assert CliRunner().invoke(cli, ["init", "mine", "--template", template, "--no-model"]).exit_code == 0
    assert load([workspace / "mine" / "run.toml"]).config.kind == kind


def test_a_template_for_reward_models_is_not_there_and_the_ones_that_are_are_named(workspace: Path) -> None:
    result = CliRunner().invoke(cli, ["init", "mine", "--template", "reward_model"])
    assert result.exit_code == 2 and "'sft'" in result.output and list(workspace.iterdir()) == []
