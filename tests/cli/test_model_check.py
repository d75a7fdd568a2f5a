"""`skyrl model check` and `skyrl doctor` say how a model's rows run, and why not otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.cli.preparing.doctor import machine_facts
from skyrl.errors import ModelError
from skyrl.tools.model_check import model_report
from tests.models.families import FAMILIES
from tests.models.family_cells import store
from tests.nano_run import config


def stored(family: str, folder: Path) -> str:
    FAMILIES[family].config().save_pretrained(folder)
    return str(folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "lines"),
    [
        (
            "Llama",
            {"rows": "packed with shared prompts, within ", "engine": "attention sdpa", "megatron": "has a conver"},
        ),
        (
            "Gemma 2",
            {
                "rows": "packed with shared prompts, within ",
                "settings": "sequence_parallel_size = context_parallel_siz",
            },
        ),
        (
            "Llama 4",
            {"rows": "unpacked, with attention sdpa: packed rows with shared prompts differ", "engine": "refused: "},
        ),
        (
            "BLOOM",
            {
                "rows": "unpacked, with attention eager: BloomForCausalLM has no attention but its own",
                "settings": 'trainer.use_sample_packing = false, trainer.attention = "eager"',
            },
        ),
        (
            "Phi-3.5 and Phi-4-mini, LongRoPE",
            {"rotation": "one set in all of a run, by trainer.longest_row; here for rows of 20 tokens"},
        ),
    ],
)
def test_a_report_says_what_a_run_does_and_what_follows(family: str, lines: dict[str, str], tmp_path: Path) -> None:
    report = list(model_report(stored(family, tmp_path), longest=20))
    values = {line.split()[0]: line.split(maxsplit=1)[1] for line in report[1:]}
    for name, beginning in lines.items():
        assert values[name].startswith(beginning)
    assert ("rotation" in values) == ("rotation" in lines)


def test_the_command_prints_bounds_and_refuses_what_cannot_be_trained(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["model", "check", stored("Gemma 3", tmp_path / "gemma")])
    assert result.exit_code == 0
    assert "gemma3_text, sliding attention and full attention, windows of 8 tokens\n" in result.output
    from transformers import BertConfig

    BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=2).save_pretrained(
        tmp_path / "bert"
    )
    refused = CliRunner().invoke(cli, ["model", "check", str(tmp_path / "bert")])
    assert isinstance(refused.exception, ModelError)
    assert "it is not a causal language model" in str(refused.exception)


def test_doctor_says_what_does_not_run_as_asked(nano: Path, tmp_path: Path) -> None:
    usual = list(machine_facts(config(nano, tmp_path)))
    assert not [text for topic, text in usual if "rows run" in text or topic == "engine"]
    path = store("BLOOM", nano / "model", tmp_path / "bloom")
    unusual = list(machine_facts(config(nano, tmp_path, trainer__policy__model__path=path)))
    reason = "BloomForCausalLM has no attention"
    assert ("rows", f"bloom: rows run unpacked, with attention eager: {reason} but its own") in unusual
    assert ("engine", f"samples with attention eager: {reason} sdpa") in unusual
