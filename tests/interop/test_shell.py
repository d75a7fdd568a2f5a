"""Shell scripts are read without being run: variables and defaults that a script gives are filled in."""

from __future__ import annotations

import pytest

from skyrl.interop.shell.arithmetic import calculated
from skyrl.interop.shell.scripts import commands_in, overrides_in
from skyrl.interop.shell.variables import LONGEST, expanded


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("${B:-2}", "2"),
        ("${B-2}", "2"),
        ("${EMPTY:-2}", "2"),
        ("${EMPTY-2}", ""),
        ("${B:-${C:-3}/x}", "3/x"),
        ("${B:=4}/$B", "4/4"),
        ("$B and ${C}", "$B and ${C}"),
        ("${A%.sh} ${#A} $(date) $@", "${A%.sh} ${#A} $(date) $@"),
        ("${A", "${A"),
        ("cost: $", "cost: $"),
    ],
)
def test_a_variable_is_replaced_by_what_the_script_says(text: str, value: str) -> None:
    assert expanded(text, {"A": "1", "EMPTY": ""}) == value


def test_variables_that_repeat_each_other_end_at_a_bound() -> None:
    variables = {"A0": "x" * 10}
    for number in range(1, 40):
        variables[f"A{number}"] = expanded(f"$A{number - 1}$A{number - 1}", variables)
    assert len(variables["A39"]) <= 2 * LONGEST


@pytest.mark.parametrize(
    "before",
    ['NUM_GPUS=4', ': "${NUM_GPUS:=4}"', ': ${NUM_GPUS:=4}', "export NUM_GPUS=4", "readonly NUM_GPUS=4;",
     'N="4"; NUM_GPUS=$N'],
)  # fmt: skip
def test_each_way_to_set_a_variable_is_read(before: str) -> None:
    assert overrides_in(f"{before}\npython x trainer.epochs=$NUM_GPUS") == ["trainer.epochs=4"]


@pytest.mark.parametrize("before", ["GPUS=$(nvidia-smi -L | wc -l)", 'export GPUS="$(nproc)"', "GPUS=`nproc`"])
def test_a_variable_that_a_command_computes_is_left_for_the_converter_to_refuse(before: str) -> None:
    script = f"{before}\npython -m main trainer.placement.policy_num_gpus_per_node=$GPUS trainer.epochs=2"
    assert overrides_in(script) == ["trainer.placement.policy_num_gpus_per_node=$(...)", "trainer.epochs=2"]


def test_overrides_of_an_array_and_of_a_variable_are_found() -> None:
    script = (
        'ARGS=(trainer.epochs=2)\nARGS+=(trainer.seed=3)\nMORE="data.train_data=a generator.n_samples_per_prompt=4"\n'
    )
    assert overrides_in(script + 'python x "${ARGS[@]}" $MORE') == [
        "trainer.epochs=2",
        "trainer.seed=3",
        "data.train_data=a",
        "generator.n_samples_per_prompt=4",
    ]


def test_an_array_over_several_lines_holds_overrides_of_any_name() -> None:
    script = "ARGS=(\n  strategy=fsdp  # sharded\n  # a comment\n  model.path=a\n  seed=42\n)\npython -m x ${ARGS[@]}\n"
    assert overrides_in(script, ("strategy", "seed")) == ["strategy=fsdp", "model.path=a", "seed=42"]


def test_a_text_over_several_lines_holds_overrides() -> None:
    script = 'n=3\nMORE="\n  trainer.epochs=$n\n  trainer.seed=4"\npython x $MORE\n'
    assert overrides_in(script) == ["trainer.epochs=3", "trainer.seed=4"]


@pytest.mark.parametrize(
    ("sum_", "value"),
    [
        ("$((1024 * 2))", "2048"),
        ("$(((a + b) * 2))", "26"),
        ("$(($a - ${b}))", "7"),
        ("$((a / b))", "3"),
        ("$((-7 / 2))", "-3"),
        ("$((7 % 4))x$((b))", "3x3"),
        ("$((unknown + 1))", "$((unknown + 1))"),
        ("$((a ? 1 : 2))", "$((a ? 1 : 2))"),
        ("$((a / 0))", "$((a / 0))"),
        ("$((loop))", "$((loop))"),
    ],
)
def test_a_sum_of_what_the_script_says_is_calculated_as_a_shell_does(sum_: str, value: str) -> None:
    assert calculated(sum_, {"a": "10", "b": "3", "loop": "loop + 1"}) == value


def test_sums_in_overrides_and_assignments_are_calculated() -> None:
    script = "length=$((2 * 512))\npython x trainer.max_prompt_length=$((length + 1)) trainer.epochs=$(( 1 + 1 ))"
    assert overrides_in(script) == ["trainer.max_prompt_length=1025", "trainer.epochs=2"]


def test_commands_are_given_with_their_words_filled_in() -> None:
    script = "LR=1e-6\nMORE=(--beta 0.1)\ntrl grpo --learning_rate $LR \\\n  --bf16 ${MORE[@]}\n"
    array, command = commands_in(script)
    assert array == ["--beta", "0.1"]
    assert command[:5] == ["trl", "grpo", "--learning_rate", "1e-6", "--bf16"]


def test_a_name_that_the_shell_itself_reads_is_no_override() -> None:
    assert overrides_in("seed=42\npython -m x strategy=fsdp", ("strategy", "seed")) == ["strategy=fsdp"]


@pytest.mark.parametrize("script", ["", "'", '"', "a='b\nc'", "${${${", "A=(", "\\", "\x00", "x=" + "${A:-" * 5000])
def test_no_text_is_too_broken_to_be_read(script: str) -> None:
    assert overrides_in(script) == []
