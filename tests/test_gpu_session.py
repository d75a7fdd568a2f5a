"""`make gpu` on a machine without a GPU: how stages are run, stored and shown, and a rehearsal of all of them."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks.gpu_session import device
from benchmarks.gpu_session.__main__ import main
from benchmarks.gpu_session.cuda_paths import PATHS
from benchmarks.gpu_session.learner import _covered
from benchmarks.gpu_session.machine_code import keep_only
from benchmarks.gpu_session.page import merge, with_measurements
from benchmarks.gpu_session.parts import join, pack, wanted
from benchmarks.gpu_session.runner import GpuSession, Record, title
from benchmarks.gpu_session.shapes import SHAPES, flops_as_prime_rl, one_row, rollouts, training_flops
from benchmarks.gpu_session.smollm2 import write_task
from benchmarks.gpu_session.stages import STAGES, GpuStage, Job, chosen
from benchmarks.gpu_session.steps import EMBEDDED, ON_RAY, VLLM, configuration
from benchmarks.gpu_session.trl_steps import score_of
from skyrl.config import compose
from tests.processes.clusters import lives, soon


def session(folder: Path, **changes: Any) -> GpuSession:
    usual: dict[str, Any] = {"seconds": 600.0, "commit": "abc", "device": "cpu"}
    return GpuSession(out=folder / "out", work=folder / "work", **usual | changes)


def stage(function: str, **changes: Any) -> GpuStage:
    return GpuStage(name=function, function=f"gpu_stages:{function}", package="tests", limit=120, **changes)


def run(of: GpuSession, *stages: GpuStage) -> list[Record]:
    return of.run([(stage, "") for stage in stages])


def test_a_measurement_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [record] = run(session(tmp_path), stage("one_fails"))
    assert record == json.loads((tmp_path / "out" / "one_fails.json").read_text())
    assert record["state"] == "failed"
    assert {name: part["seconds"] for name, part in record["parts"].items()} == {"first": 2.0, "third": 3.0}
    assert record["failed"] == {"second": "ValueError: no such kernel"}
    assert "and more" in record["log"]
    assert (record["device"], record["commit"]) == ("CPU", "abc")
    assert record["date"] and record["versions"]["torch"]
    assert "first 2.000 s, third 3.000 s | FAILED second: ValueError: no such kernel" in capsys.readouterr().out


def test_a_stage_at_its_limit_is_killed_with_all_its_processes_and_keeps_what_it_measured(tmp_path: Path) -> None:
    blocked = tmp_path / "work" / "blocked"

    def until_blocked(process: subprocess.Popen[bytes], limit: float) -> int:
        deadline = time.monotonic() + 120
        while not (blocked.exists() and blocked.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("stage", limit)

    of = session(tmp_path, wait=until_blocked)
    record, after = run(of, stage("blocks"), attrs.evolve(stage("one_fails"), packages=("no_such_package",)))
    assert record["state"] == "limit" and record["error"] == "took more than 360 s"
    assert list(record["parts"]) == ["first"]
    assert soon(lambda: not lives(int(blocked.read_text())))  # a killed process takes a moment to end
    assert (after["state"], after["error"]) == ("left_out", "not installed: no_such_package")


@pytest.mark.long
def test_the_same_command_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    assert [run(session(tmp_path), stage("counts"))[0]["state"] for _ in range(3)] == ["failed", "done", "done"]
    calls = tmp_path / "work" / "calls"
    assert calls.read_text() == "first\nsecond\n"
    run(session(tmp_path, commit="def"), stage("counts"))
    assert calls.read_text() == "first\nsecond\n" * 2


def test_changed_settings_are_measured_beside_the_others(tmp_path: Path) -> None:
    words = ["run", "--device", "cpu", "--shape", "tiny", "--only", "facts", "--out", str(tmp_path)]
    assert main([*words, "--seconds", "0", "--set", "trainer.policy.use_torch_compile=true", "a.b=[1, 2]"]) == 0
    record = json.loads((tmp_path / "facts.use_torch_compile-true.b-_1__2_.json").read_text())
    assert record["changes"] == ["trainer.policy.use_torch_compile=true", "a.b=[1, 2]"]
    assert title("step", "0.5b", ["a.rate=1.5e+0"]) == "step-0.5b.rate-1.5e_0"
    job = Job(shape_name="tiny", device="cpu", work=tmp_path, changes={"a.b": [1, 2]})
    assert configuration(job, tmp_path, tmp_path, {}).endswith("a.b = [1, 2]\n")


def test_what_finds_no_time_or_no_device_is_left_out(tmp_path: Path) -> None:
    [record] = run(session(tmp_path, seconds=0.0), stage("one_fails"))
    assert (record["state"], record["error"]) == ("left_out", "no time was left")
    assert stage("blocks", only_on_cuda=True).why_not("cpu", None) == "needs CUDA"
    assert stage("blocks", needs_language_model=True).why_not("cuda", None) == "needs --language-model"
    assert stage("blocks", needs_language_model=True).why_not("cpu", None) is None


def test_stages_are_chosen_by_name_by_comparison_and_by_shape() -> None:
    assert [(stage.name, shape) for stage, shape in chosen(["step.vllm", "facts"], ["0.5b"])] == [
        ("facts", ""),
        ("step.vllm", "0.5b"),
    ]
    sides = [(stage.name, shape) for stage, shape in chosen(["smollm2"], [])]
    assert [shape for _, shape in sides] == ["smollm2"] * 4 + ["smollm2-long"] * 4
    assert {shape for _, shape in chosen([], ["tiny"])} == {"", "tiny"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "3b"], "no stage has the shape 3b"),
        (["--only", "lerner"], "no stage is called lerner"),
        (["--only", "facts"], "the driver sees no CUDA device; --device cpu --shape tiny"),
        (["--device", "cpu"], "add --shape tiny"),
        (["--device", "cpu", "--shape", "tiny", "--set", "compile"], "--set takes path=value, not compile"),
        (["--device", "cpu", "--shape", "tiny", "--language-model", "nowhere"], "nowhere holds no model"),
    ],
)
def test_mistakes_in_the_command_are_named(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "cuda_devices", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    for source, message in (
        ("nowhere.gguf", "is neither a GGUF file nor a wheel"),
        ("empty.whl", "holds 0 GGUF files"),
    ):
        with pytest.raises(SystemExit):
            main(["model", str(tmp_path / source), "--into", str(tmp_path / "lm")])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "lm").exists()


def test_the_list_names_what_this_machine_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--list", "--device", "cpu", "--shape", "tiny", "--only", "facts", "tests_vllm"]) == 0
    facts, tests = capsys.readouterr().out.splitlines()
    assert facts.split() == ["facts", "60", "s"]
    assert tests.endswith("needs CUDA") or "not installed" in tests


def test_a_shared_prompt_is_work_once() -> None:
    shape = SHAPES["tiny"]
    batch = rollouts(shape)
    answers = int((batch.lengths - 12).sum())
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 128
    separate, shared = (training_flops(shape, batch, shared=is_shared) for is_shared in (False, True))
    assert (
        separate - shared == 6.0 * 2 * layer * 6 * 12 + 12.0 * 64 * 2 * 6 * 12**2 / 2
    )  # 8 prompts less 2, of 12 tokens
    assert shared > 6.0 * (2 * layer * (24 + answers) + 384 * 64 * answers)


def test_the_arithmetic_of_a_row_is_that_of_prime_rl() -> None:
    """prime-rl publishes 11,900 tokens/s and 11.1 % for rows of 16,384 on one H100, 13,300 and 10.9 % with LoRA."""
    shape = SHAPES["0.6b"]
    assert shape.weights == pytest.approx(0.596e9, rel=1e-3)
    assert 11_900 * flops_as_prime_rl(shape, 16_384) / 989e12 == pytest.approx(0.111, abs=0.001)
    assert 13_300 * flops_as_prime_rl(shape, 16_384, lora=True) / 989e12 == pytest.approx(0.109, abs=0.002)
    ours = training_flops(shape, one_row(shape, 16_384), shared=False) / 16_384
    assert ours == pytest.approx(flops_as_prime_rl(shape, 16_384), rel=1e-3)


def test_kernels_that_overlap_are_busy_once() -> None:
    assert _covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0


@pytest.mark.parametrize(
    "more",
    [EMBEDDED, VLLM, {**ON_RAY, "trainer.strategy": "deepspeed"}, {**ON_RAY, "trainer.strategy": "megatron"}],
    ids=["embedded", "vllm", "deepspeed", "megatron"],
)
def test_the_runs_on_cuda_have_no_problem(tmp_path: Path, more: Mapping[str, Any]) -> None:
    job = Job(shape_name="0.5b", device="cuda", work=tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(configuration(job, tmp_path, tmp_path / "run", more))
    result = compose([str(file)], {})
    without_effect = {"generator.inference_engine.enforce_eager", "trainer.gradient_checkpointing"}
    assert {warning.path for warning in result.warnings} <= without_effect  # of the embedded engine, and of Megatron
    assert result.config.trainer.compute_dtype == "bfloat16"
    assert result.config.trainer.max_training_steps == SHAPES["0.5b"].steps


def test_an_answer_is_worth_most_as_a_number_alone(tmp_path: Path) -> None:
    write_task(tmp_path)
    score = score_of(tmp_path / "reward.py")
    assert [score(text, "12") for text in (" 12\n", "5 + 7 = 12", "12 is 5 + 7", "")] == [1.0, 0.5, 0.0, 0.0]
    rows = [
        json.loads(line) for name in ("train", "val") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len({row["prompt"][0]["content"] for row in rows}) == 29 * 29


RECORD: Record = {
    "stage": "step.embedded",
    "shape": "0.5b",
    "state": "failed",
    "date": "2026-11-27 09:30",
    "device": "NVIDIA H100 80GB HBM3",
    "commit": "abc",
    "versions": {"torch": "2.13.0", "ray": "2.60.0"},
    "parts": {
        "skyrl, embedded engine": {
            "seconds": 1.25,
            "tokens_per_second": 26214.4,
            "phases": {"generate": 0.75, "policy_train": 0.5},
            "device_bytes": 21.04e9,
        }
    },
    "failed": {"other": "OutOfMemoryError: tried /a/b/c.py"},
    "log": ["a line"],
}


def test_results_are_stored_by_card_and_shown_in_the_page(tmp_path: Path) -> None:
    out, results, page = tmp_path / "out", tmp_path / "results", tmp_path / "gpu.md"
    out.mkdir()
    (out / "step.json").write_text(json.dumps(RECORD))
    (out / "older.json").write_text(json.dumps(RECORD | {"date": "2026-11-26 09:30", "parts": {"old": {}}}))
    (out / "cpu.json").write_text(json.dumps(RECORD | {"device": "CPU"}))
    (out / "something.json").write_text("[]")
    page.write_text("# GPUs\n\n## Measurements\n\nnothing yet\n")
    assert merge([out], results, page) == 0
    [file] = results.rglob("*.json")
    assert file.relative_to(results) == Path("nvidia-h100-80gb-hbm3", "step.embedded-0.5b.json")
    text = page.read_text()
    assert "NVIDIA H100 80GB HBM3, 2026-11-27, commit abc; torch 2.13.0." in text
    assert "| 0.5b | skyrl, embedded engine | 26,214 | 1.250 | 750 | 500 | 21.0 |" in text
    assert "other failed: OutOfMemoryError: tried c.py." in text
    assert "| embedded engine | NVIDIA H100 80GB HBM3, 2026-11-27, abc |" in text
    assert "| Megatron | no GPU yet | `tests/" in text
    assert "nothing yet" not in text and "a line" not in file.read_text()


def test_a_folder_without_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpu.md").write_text("## Measurements\n")
    assert merge([tmp_path], tmp_path / "results", tmp_path / "gpu.md") == 1
    assert "holds no results" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no section Measurements"):
        with_measurements("# GPUs\n", "a table\n")


def test_tests_of_code_for_cuda_are_there_and_its_stages_are_known() -> None:
    for path in PATHS:
        assert path.tests
        for test in path.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in Path(file).read_text(encoding="utf-8"), test
    names = [stage.name for stage in STAGES]
    assert len(names) == len(set(names))


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Entries of kind (2 is a cubin, 1 is PTX), architecture and payload, as a CUDA library holds them."""
    inside = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture) + bytes(32)
        + payload
        for kind, architecture, payload in entries
    )  # fmt: skip
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def test_of_machine_code_only_that_of_one_gpu_stays(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(
        b"head" + fatbin((2, 80, b"ampere"), (2, 90, b"hopper"), (1, 90, b"source"))
        + b"\x50\xed\x55\xba looks like one" + fatbin((2, 80, b"ampere"), (1, 80, b"source"), (1, 100, b"newest"))
    )  # fmt: skip
    size = library.stat().st_size
    assert keep_only(library, 90) == len(b"amperesourceamperenewest")
    data = library.read_bytes()
    assert (len(data), data.count(b"hopper"), data.count(b"source")) == (size, 1, 1)
    assert b"ampere" not in data and b"newest" not in data and b"looks like one" in data


@pytest.mark.needs("zstd", "tar")
def test_what_is_packed_into_parts_is_whole_on_the_other_side(tmp_path: Path) -> None:
    carry, model, target = tmp_path / "carry", tmp_path / "lm.v2", tmp_path / "there"
    (carry / "wheels").mkdir(parents=True)
    model.mkdir()
    (model / "weights").write_bytes(random.Random(0).randbytes(5_000))
    with zipfile.ZipFile(carry / "wheels" / "some_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_package/__init__.py", "NAME = 'carried'\n")
        program = zipfile.ZipInfo("some_package/program")
        program.external_attr = 0o755 << 16
        wheel.writestr(program, "#!/bin/sh\n")
        wheel.writestr("some_package-1.0.data/purelib/beside.py", "")
        wheel.writestr("some_package-1.0.data/scripts/start", "")
    parts = pack(carry, [model], part_bytes=2_000, architecture=90)
    total = len(parts)
    assert [part.name for part in parts] == [f"part-{number:02d}-of-{total:02d}" for number in range(total)]
    assert total >= 3 and all(part.stat().st_size <= 2_000 for part in parts)
    command = [sys.executable, "benchmarks/gpu_session/parts.py", str(target), *map(str, reversed(parts))]
    subprocess.run(command, check=True)
    assert (target / "lm.v2" / "weights").read_bytes() == (model / "weights").read_bytes()
    site = target / "site"
    assert os.access(site / "some_package" / "program", os.X_OK) and (site / "beside.py").exists()
    assert not list(site.rglob("start"))
    script = f". {target / 'environment'}; {sys.executable} -c 'import some_package; print(some_package.NAME)'"
    assert subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout == "carried\n"
    with pytest.raises(ValueError, match="part-01-of-"):
        join([parts[0], *parts[2:]], tmp_path / "elsewhere")
    parts[0].write_bytes(b"")
    with pytest.raises(OSError, match="damaged"):
        join(parts, tmp_path / "elsewhere")


def test_two_versions_of_a_package_are_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wheels").mkdir()
    for name in ("some_package-1.0-py3-none-any.whl", "Some.Package-1.1-py3-none-any.whl"):
        (tmp_path / "wheels" / name).touch()
    with pytest.raises(SystemExit):
        main(["pack", str(tmp_path)])
    assert "two versions of some-package among the wheels" in capsys.readouterr().err


def test_only_requirements_that_hold_there_are_followed() -> None:
    requires = ["a>=1", 'b; sys_platform == "win32"', 'c==2; python_version < "3.12"', 'd; extra == "x"', "e.f[g]<3"]
    assert list(wanted(requires, "3.12")) == ["a>=1", "e.f<3"]


@pytest.mark.long
def test_every_stage_that_a_cpu_can_run_is_rehearsed_within_its_limit(tmp_path: Path) -> None:
    words = ["run", "--device", "cpu", "--shape", "tiny", "--seconds", "2000"]
    assert main([*words, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 0
    records = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    missing = {title(stage.name, shape): stage.why_not("cpu", None) for stage, shape in chosen([], ["tiny"])}
    assert {name: record.get("error") for name, record in records.items()} == missing
    assert all(record["state"] == "left_out" if missing[name] else "done" for name, record in records.items())
