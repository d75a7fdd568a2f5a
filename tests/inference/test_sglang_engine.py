"""SGLang's server started by the run: its command line, its end, and what is said where it does not start. A package of
the tests stands for SGLang's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import InferenceEngineConfig
from skyrl.errors import ConfigError, ProcessError
from skyrl.experiments.preflight import packages_are_installed
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_engine import SGLangEngine, launch_command
from skyrl.processes.dies_with_parent import start_dependent
from tests.inference.nano import nano_model
from tests.inference.vllm_models import saved
from tests.nano_run import config, metrics, train
from tests.processes.clusters import lives, soon
from tests.weight_sync.test_adapters import far_from

ROOT = Path(__file__).parents[2]
CONFIG = InferenceEngineConfig(backend="sglang", model_dtype="float32", max_num_seqs=16, enforce_eager=False)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that stands for SGLang's can be imported, here and in processes that are started."""
    path = str(ROOT / "tests" / "inference" / "sglang_package")
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, str(ROOT)]))


def words(settings: InferenceEngineConfig, **more: Any) -> dict[str, list[str]]:
    """Options of the command, each with its values."""
    options: dict[str, list[str]] = {}
    for word in launch_command(settings, model_path="a/model", device="cuda", port=1234, **more)[3:]:
        if word.startswith("--"):
            option = options.setdefault(word[2:], [])
        else:
            option.append(word)
    return options


def test_every_setting_becomes_the_option_that_sglang_has_for_it() -> None:
    options = words(CONFIG, seed=7, max_model_len=512)
    assert options == {
        "model-path": ["a/model"],
        "host": ["127.0.0.1"],
        "port": ["1234"],
        "device": ["cuda"],
        "dtype": ["float32"],
        "random-seed": ["7"],
        "context-length": ["512"],
        "tp-size": ["1"],
        "max-running-requests": ["16"],
        "mem-fraction-static": [str(CONFIG.gpu_memory_utilization)],
        "chunked-prefill-size": [str(CONFIG.max_num_batched_tokens)],
        "enable-metrics": [],
        "log-level-http": ["warning"],
    }
    changed = evolve(
        CONFIG,
        model_dtype="bf16",
        tensor_parallel_size=4,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        enforce_eager=True,
        deterministic=True,
        gpu_memory_utilization=0.5,
    )
    other = words(changed, overrides={"rope_theta": 2.0}, lora_rank=12)
    assert {name: other[name] for name in sorted(set(other) - set(options))} == {
        "disable-cuda-graph": [],
        "disable-radix-cache": [],
        "enable-deterministic-inference": [],
        "enable-lora": [],
        "json-model-override-args": ['{"rope_theta": 2.0}'],
        "lora-target-modules": ["all"],
        "max-lora-rank": ["12"],
    }
    assert [other[name] for name in ("dtype", "tp-size", "chunked-prefill-size", "mem-fraction-static")] == [
        ["bfloat16"],
        ["4"],
        ["-1"],
        ["0.5"],
    ]


def test_options_without_a_field_reach_the_command_line_as_areal_writes_them() -> None:
    init_kwargs = {
        "attention_backend": "fa3",
        "schedule_policy": "lpm",
        "enable_torch_compile": True,
        "disable_overlap_schedule": False,
        "cuda_graph_bs": [1, 2, 4],
        "lora_paths": None,
    }
    options = words(evolve(CONFIG, engine_init_kwargs=init_kwargs))
    assert {name: options.get(name.replace("_", "-")) for name in init_kwargs} == {
        "attention_backend": ["fa3"],
        "schedule_policy": ["lpm"],
        "enable_torch_compile": [],
        "disable_overlap_schedule": None,
        "cuda_graph_bs": ["1", "2", "4"],
        "lora_paths": None,
    }
    with pytest.raises(ConfigError, match=r"(?s)engine_init_kwargs.tp_size .*inference_engine.tensor_parallel_size"):
        words(evolve(CONFIG, engine_init_kwargs={"tp_size": 2, "port": 1}))


def engine(folder: Path, **changes: Any) -> SGLangEngine:
    saved(folder / "model", nano_model())
    return SGLangEngine(
        evolve(CONFIG, **changes),
        model_path=str(folder / "model"),
        device="cpu",
        log=folder / "log",
        max_model_len=96,
        deadlines=ServerDeadlines(start=240.0, call=120.0),
    )


@pytest.mark.long
async def test_the_run_starts_a_server_samples_from_it_and_ends_it(tmp_path: Path, sglang: None) -> None:
    sglang_engine = engine(tmp_path, engine_init_kwargs={"schedule_policy": "lpm"})
    assert await far_from(sglang_engine, nano_model()) < 1e-4
    assert sglang_engine._process.poll() is None
    await sglang_engine.close()
    assert sglang_engine._process.poll() is not None
    with pytest.raises(OSError, match=r"No such process"):
        os.killpg(sglang_engine._process.pid, 0)


async def test_a_server_that_does_not_start_is_named_with_its_last_line(tmp_path: Path, sglang: None) -> None:
    sglang_engine = engine(tmp_path, engine_init_kwargs={"no_such_option": 1})
    with pytest.raises(ProcessError, match=r"SGLang ended with exit code 2 .*unrecognized arguments: --no-such"):
        await sglang_engine.pause()
    await sglang_engine.close()


def test_a_command_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also where that one is killed: the pipe between them closes."""
    sleeper = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    starter = (
        "import os, pathlib, sys, time; from skyrl.processes.dies_with_parent import start_dependent; "
        f"start_dependent([sys.executable, '-c', {sleeper!r}], pathlib.Path({str(tmp_path / 'log')!r}), {{}}); "
        f"path = pathlib.Path({str(tmp_path / 'pid')!r})\n"
        "while not (path.exists() and path.read_text()): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)"
    )
    process = subprocess.run([sys.executable, "-c", starter], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    assert soon(lambda: not lives(pid))


def test_the_exit_code_of_a_tied_command_is_its_own(tmp_path: Path) -> None:
    process = start_dependent(
        [sys.executable, "-c", "print('said', flush=True); raise SystemExit(7)"], tmp_path / "log", {}
    )
    assert process.wait(60) == 7
    assert (tmp_path / "log").read_text() == "said\n"
    assert process.stdin is not None
    process.stdin.close()


def test_without_its_package_a_run_is_told_what_to_install(nano: Path, tmp_path: Path) -> None:
    run = config(nano, tmp_path, generator__inference_engine__backend="sglang")
    (problem,) = [problem for problem in packages_are_installed(run) if "sglang" in problem.message]
    assert (problem.path, problem.hint) == ("generator.inference_engine.backend", "pip install sglang")


@pytest.mark.long
@pytest.mark.parametrize("road", ["disk", "gloo"])
def test_a_run_trains_over_a_server_that_it_starts(nano: Path, tmp_path: Path, sglang: None, road: str) -> None:
    changes = {"backend": "sglang", "model_dtype": "float32", "weight_sync_backend": road}
    train(
        nano,
        tmp_path,
        **{f"generator__inference_engine__{name}": value for name, value in changes.items()},
        trainer__placement__executor="ray",
        trainer__max_training_steps=2,
    )
    steps = [record["weight_sync/parity_max"] for record in metrics(tmp_path) if "weight_sync/parity_max" in record]
    assert len(steps) == 3
    assert max(steps) < 1e-4
