"""`make gpu` on a machine without a GPU: the same sections on a tiny model, so that they run where one is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import SECTIONS, Section, main, with_measurements
from benchmarks.gpu_shapes import SHAPES, rollouts, settings, training_flops
from benchmarks.gpu_sides import VLLM_ON_ONE_GPU
from skyrl.config import compose


def test_all_sections_run_on_a_cpu_and_say_what_they_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path), "--one-process"]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    ran, left_out = result["shapes"]["tiny"], result["left_out"]
    assert {each.name for each in SECTIONS} == set(ran) | {name.split()[0] for name in left_out} - {"attention"}
    assert set(ran["learner"]) == {"shared_prompts", "packed", "padded"}
    assert len(ran["learner"]["shared_prompts"]["profile"]) == 20
    assert left_out["step_vllm tiny"] in ("needs CUDA", "not installed: vllm, ray")
    assert ran["step"]["skyrl"]["parts"]["generate"] > 0
    table = (tmp_path / "gpu.md").read_text()
    assert "| tiny | step: skyrl |" in table and "step_vllm tiny" in table
    assert table in capsys.readouterr().out


def test_a_section_that_fails_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"model": ({"device": "GPU", "matmul_flops": 1e12, "torch": "2"}, ""), "learner": (None, "out of memory")}
    monkeypatch.setattr(
        "benchmarks.gpu._in_a_process", lambda section, *_: said.get(section, ({"one": {"seconds": 2.0}}, ""))
    )
    assert main(["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path)]) == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["failed"] == {"learner tiny": "out of memory"}
    assert "| tiny | step: one |  |  | 2.000 |  |" in capsys.readouterr().out


def test_what_finds_no_time_or_no_package_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path), "--seconds", "0"]) == 0
    assert "- learner tiny: no time was left" in capsys.readouterr().out
    assert Section("x", ("no_such_package",)).why_not("cuda") == "not installed: no_such_package"
    assert Section("x", (), True).why_not("cpu") == "needs CUDA"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cpu", "--shape", "3b"], "invalid choice: '3b'"),
        (["--shape", "tiny"], "this torch sees no CUDA device; --device cpu --shape tiny"),
    ],
)
def test_a_shape_and_a_device_that_are_not_there_are_refused(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_shared_prompt_is_work_once() -> None:
    shape = SHAPES["tiny"]
    batch = rollouts(shape)
    answers = int((batch.lengths - 12).sum())
    layer = 64 * (2 * 64 + 2 * 64 * 2 // 4) + 3 * 64 * 128
    alone, shared = (training_flops(shape, batch, shared=each) for each in (False, True))
    assert alone - shared == 6.0 * 2 * layer * 6 * 12 + 12.0 * 64 * 2 * 6 * 12**2 / 2  # 8 prompts less 2, of 12 tokens
    assert shared > 6.0 * (2 * layer * (24 + answers) + 384 * 64 * answers)


@pytest.mark.parametrize("more", [{}, VLLM_ON_ONE_GPU], ids=["embedded", "vllm"])
def test_the_runs_on_cuda_are_configurations_without_a_problem(tmp_path: Path, more: Mapping[str, Any]) -> None:
    run = compose([], settings(SHAPES["0.5b"], tmp_path, tmp_path / "run", "cuda", **more))
    assert [str(each) for each in run.warnings] == []
    assert run.config.trainer.compute_dtype == "bfloat16"


def test_the_page_gets_the_measurements_of_a_run() -> None:
    page = "# GPUs\n\ntext\n\n## Measurements\n\nNot yet run on CUDA.\n"
    assert with_measurements(page, "a table\n") == "# GPUs\n\ntext\n\n## Measurements\n\na table\n"
    with pytest.raises(ValueError, match="no section Measurements"):
        with_measurements("# GPUs\n", "a table\n")
    assert "## Measurements\n" in Path("docs/gpu.md").read_text(encoding="utf-8")
