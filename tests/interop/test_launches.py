"""The program of a script says what its run is: it is converted, chosen among several, or refused by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import frozen
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import SkyRLError

SKYRL = "python -m skyrl.train.entrypoints.main_base trainer.epochs=1 "
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b "
TRL = "accelerate launch --num_processes 4 trl grpo --model_name_or_path a/b --num_generations 8 "


@frozen
class Told:
    """What a command says, with the exit code of its error."""

    exit_code: int
    stdout: str
    stderr: str


def command(file: Path, *options: str) -> Told:
    result = CliRunner().invoke(cli, ["config", "convert", str(file), *options])
    error = result.exception
    if isinstance(error, SkyRLError):
        return Told(error.exit_code, result.stdout, str(error))
    assert error is None or isinstance(error, SystemExit), result.exc_info
    return Told(result.exit_code, result.stdout, result.stderr)


def convert(folder: Path, text: str, system: str, *options: str) -> Told:
    file = folder / "run.sh"
    file.write_text(text)
    return command(file, "--from", system, "--keep-going", *options)


REFUSED = [
    ("trl", "trl bco --model_name_or_path a/b", "trl bco: a trainer of preferences"),
    ("trl", "trl gold --model_name_or_path a/b", "trl gold: distillation from a teacher"),
    ("trl", "accelerate launch --num_processes 2 examples/scripts/cpo.py --model_name_or_path a/b", "preferences"),
    ("trl", "torchrun --nproc_per_node 2 -m trl.scripts.online_dpo --model_name_or_path a/b", "online preference"),
    ("trl", "python examples/scripts/grpo_vlm.py --model_name_or_path a/b", "rows with images"),
    ("trl", "trl vllm-serve --model a/b", "a server, which trains nothing"),
    ("verl", "python -m verl.trainer.main_generation data.path=a", "it only samples"),
    ("verl", "python -m verl.experimental.vla.main_ppo trainer.nnodes=1", "images and actions"),
    ("verl", VERL + "data.image_key=images", "rows with images"),
    ("verl", VERL + "actor_rollout_ref.model.path=Qwen/Qwen3-VL-8B-Instruct", "rows with images"),
    ("verl", VERL + "data.video_key=v", "rows with images"),
    ("verl", "torchrun -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-VL-2B data.train_files=a", "rows with images"),
    ("skyrl", "python -m skyrl.train.entrypoints.serve trainer.epochs=1", "a server, which trains nothing"),
    ("skyrl", "uv run -m skyrl.tinker.api --base-model a/b", "a server, which trains nothing"),
    ("skyrl", "python -m examples.dapo.main_dapo_flashrl trainer.epochs=1", "quantized"),
    ("skyrl", "python -m examples.train.fully_async.main_fully_async_sim trainer.epochs=1", "simulates"),
    ("skyrl", "python examples/train/geometry3k/geometry3k_entrypoint.py trainer.epochs=1", "rows with images"),
    ("skyrl", "python examples/train/visgym/entrypoint.py trainer.epochs=1", "rows with images"),
    ("skyrl", "python -m skyrl.train.main_sft model.path=Qwen/Qwen3-VL-2B strategy=fsdp", "rows with images"),
    ("skyrl", "python -m skyrl.train.entrypoints.main_generate trainer.epochs=1", "skyrl generate"),
]


@pytest.mark.parametrize(("system", "text", "message"), REFUSED)
def test_a_program_that_is_not_converted_is_refused_by_its_name(
    system: str, text: str, message: str, tmp_path: Path
) -> None:
    result = convert(tmp_path, f"set -x\n{text}\n", system)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr), result.stderr
    assert "another" in message or "images" in message or "line 2" in result.stderr


TWO = {"skyrl": (SKYRL, "trainer.seed="), "verl": (VERL, "trainer.total_epochs="), "trl": (TRL, "--seed ")}


@pytest.mark.parametrize("system", TWO)
@pytest.mark.parametrize(
    "form",
    [
        "RUN1\nRUN2\n",
        "if [ -d x ]; then RUN1; else RUN2; fi",
        "for n in 1 2; do RUN$n; done",
        "f() { RUN$1; }\nf 1\nf 2",
        "echo first && RUN1 | tee a && RUN2",
    ],
)
def test_of_several_runs_one_is_chosen(system: str, form: str, tmp_path: Path) -> None:
    run, number = TWO[system]
    text = form.replace("RUN", run + number)
    result = convert(tmp_path, text, system)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "starts 2 different runs: choose one with --command N" in result.stderr
    assert "--command 2" in result.stderr
    one, two = (convert(tmp_path, text, system, "--command", str(number)) for number in (1, 2))
    assert one.exit_code == two.exit_code == 0
    assert one.stdout.replace("= 1\n", "= 2\n") == two.stdout.replace("= 1\n", "= 2\n") and one.stdout != two.stdout
    third = convert(tmp_path, text, system, "--command", "3")
    assert third.exit_code == 2 and "there is no --command 3" in third.stderr


def test_a_command_that_is_repeated_word_for_word_is_one_run(tmp_path: Path) -> None:
    result = convert(tmp_path, f"for i in 1 2 3; do {SKYRL}; sleep 5; done", "skyrl")
    assert result.exit_code == 0 and "kept 1" in result.stderr


def test_commands_that_prepare_a_run_are_none(tmp_path: Path) -> None:
    text = f"python prep.py --local_dir data\npython -m verl.trainer.main_generation data.train_batch_size=7\n{VERL}"
    result = convert(tmp_path, text, "verl")
    assert result.exit_code == 0 and "train_batch_size = 7" not in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bash other.sh trainer.epochs=3", "line 1 starts other.sh"),
        ("#!/bin/bash\nsbatch job.slurm", "line 2 starts job.slurm"),
        ("source ./run_base.sh", "line 1 starts ./run_base.sh"),
        (
            'if [ "$#" -lt 2 ]; then echo "Usage: $0 A B"; exit 1; fi\n' + SKYRL,
            "called without arguments, it ends in line 1",
        ),
        ("echo done\npip install x", "it starts: pip"),
        ("A=1", "it starts no program at all"),
    ],
)
def test_a_script_without_a_run_says_what_it_does(text: str, message: str, tmp_path: Path) -> None:
    result = convert(tmp_path, text, "skyrl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("system", "text", "program"),
    [
        ("skyrl", "python -m mine.main trainer.epochs=1", "mine.main"),
        ("skyrl", "python3 -u ./tasks/train.py trainer.epochs=1", "tasks.train"),
        ("skyrl", "ray job submit --working-dir . -- python -m mine.main trainer.epochs=1", "mine.main"),
        ("verl", "python -m recipe.mine.main_mine trainer.nnodes=1", "recipe.mine.main_mine"),
        ("trl", "accelerate launch --num_processes 2 mine.py --model_name_or_path a/b --num_generations 8", "mine"),
    ],
)
def test_an_unknown_program_is_remarked_upon_first(system: str, text: str, program: str, tmp_path: Path) -> None:
    result = convert(tmp_path, text, system)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{program} (line 1) is not a known program of ")


@pytest.mark.parametrize(
    ("system", "text"),
    [("skyrl", SKYRL), ("verl", VERL), ("trl", TRL), ("trl", "python examples/scripts/gspo.py --num_generations 4")],
)
def test_a_known_program_is_not_remarked_upon(system: str, text: str, tmp_path: Path) -> None:
    assert "not a known program" not in convert(tmp_path, text, system).stderr


@pytest.mark.parametrize(
    ("system", "text", "word"),
    [
        ("skyrl", SKYRL + "epochs", "epochs"),
        ("skyrl", SKYRL + "--epochs 3", "--epochs"),
        ("skyrl", SKYRL + "trainer.seed=1 \\ # a comment\n  trainer.run_name=a", "trainer.run_name"),
        ("skyrl", SKYRL + "$(cat options)", "$(cat options)"),
        ("skyrl", "if [ -f x ]; then MORE='trainer.seed=1'; fi\n" + SKYRL + "$MORE", "$(MORE of line 1)"),
        ("verl", VERL + "-x", "-x"),
        ("verl", VERL + "$(cat options)", "$(cat options)"),
        ("verl", VERL + "actor_rollout_ref.rollout.n=$N", "actor_rollout_ref.rollout.n"),
        ("trl", TRL.replace("trl grpo", "trl grpo config.yaml"), "config.yaml"),
        ("trl", TRL + "--seed=1 2", "2"),
    ],
)  # fmt: skip
def test_a_script_with_words_that_were_not_read_is_not_wholly_in_the_result(
    system: str, text: str, word: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.sh"
    file.write_text(text.replace("$N", "${N}") + ("\n: ${N:=}" if "$N" in text else ""))
    result = command(file, "--from", system)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "100 %" not in result.stderr and f"\n  {word}" in result.stderr


def test_the_report_tells_what_was_assumed(tmp_path: Path) -> None:
    text = f'[ "$DEBUG" = 1 ] && LR=1\nsource env.sh\n[ -f x ] && A=1\n{SKYRL} trainer.seed=${{SEED:-7}}'
    stderr = convert(tmp_path, text, "skyrl").stderr
    assert "assumed to be unset (and what follows): DEBUG (false), SEED (7)" in stderr
    assert "line 3: [ -f x ]" in stderr
    assert "whose variables are not known: env.sh (line 2)" in stderr


def test_a_branch_that_the_script_does_not_take_is_not_converted(tmp_path: Path) -> None:
    text = f'LR=1e-6; if [ "$DEBUG" = 1 ]; then LR=1e-2; fi\n{SKYRL} trainer.policy.optimizer_config.lr=$LR'
    assert "lr = 1e-06" in convert(tmp_path, text, "skyrl").stdout


def test_other_files_have_no_commands_to_choose_from(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("actor: {path: a}\n")
    result = command(file, "--from", "areal", "--command", "2")
    assert result.exit_code == 2 and "a.yaml is none" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name_or_path: a/b\nassistant_only_loss: true\nbeta: 0.1\n", "--kind grpo|rloo|sft|reward|dpo|kto"),
        ("model_name_or_path: a/b\nlearning_rate: 1e-5\n", "--kind grpo|rloo|sft|reward|dpo|kto"),
    ],
)
def test_a_file_with_arguments_of_another_trainer_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    result = command(file, "--from", "trl")
    assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
