from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from skyrl.cli.main import cli


def test_the_checker_says_whether_a_models_template_is_safe(nano: Path) -> None:
    result = CliRunner().invoke(cli, ["templates", "check", str(nano / "model")])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].split() == ["two", "turns", "stable"]
    assert "Safe" in result.output


def test_a_template_that_is_not_safe_ends_with_code_1_and_the_difference(nano: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(nano / "model", model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m['content'] }}] {% endfor %}{% if add_generation_prompt %}>{% endif %}",
        encoding="utf-8",
    )
    result = CliRunner().invoke(cli, ["templates", "check", str(model)])
    assert result.exit_code == 1
    assert "the template has:" in result.output


def test_another_template_can_be_checked_by_name(nano: Path) -> None:
    result = CliRunner().invoke(
        cli, ["templates", "check", str(nano / "model"), "--template", "qwen3_without_thinking"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1].split()[-1] == "differs"  # thoughts in the first turn


def test_a_template_file_that_is_not_there_is_named(nano: Path) -> None:
    result = CliRunner().invoke(cli, ["templates", "check", str(nano / "model"), "--template", "gone.jinja"])
    assert result.exit_code != 0
    assert "gone.jinja cannot be read" in str(result.exception or result.output)
