"""Every command that leaves files: killed at any moment, it leaves what was there before or its whole result."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w
from attrs import frozen
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.launchers.job import Launch
from skyrl.starter.tiny_chat import made_whole
from tests.kill_moments import State, states_of
from tests.nano_run import as_words, overrides, train

ROOT = Path(__file__).parents[2]

Write = Callable[["Scene", int], None]
"""Writes into the scene's folder `out`; the number tells the old result, 1, from the new one, 2."""


@frozen
class Scene:
    """What the commands work on."""

    nano: Path
    trained: Path
    out: Path

    @property
    def run(self) -> str:
        return str(self.trained / "run")

    def skyrl(self, *words: object) -> None:
        result = CliRunner().invoke(cli, [str(word) for word in words])
        assert result.exit_code == 0, result.output


def evaluate(scene: Scene, number: int) -> None:
    words = as_words(overrides(scene.nano, scene.trained, trainer__seed=number))
    scene.skyrl("eval", scene.nano / "model", *words, "--to", scene.out / "results")


def evaluate_a_checkpoint(scene: Scene, number: int) -> None:
    words = as_words(overrides(scene.nano, scene.trained))
    scene.skyrl("eval", scene.run, "--step", number, *words, "--to", scene.out / "results")


def generate(scene: Scene, number: int) -> None:
    words = (f"trainer.seed={number}", "trainer.eval_batch_size=2", "trainer.resume_with_changes=true")
    scene.skyrl("generate", scene.run, scene.trained / "run" / "config.json", *words, "--to", scene.out / "results")


def export(scene: Scene, number: int) -> None:
    scene.skyrl("export", scene.run, "--step", number, "--to", scene.out / "model")


def export_adapter(scene: Scene, number: int) -> None:
    scene.skyrl("export", scene.run, "--adapter", "--step", number, "--to", scene.out / "adapter")


def convert(scene: Scene, number: int) -> None:
    source = scene.trained / "areal.yaml"
    source.write_text(
        f"experiment_name: e\ntrial_name: t\nseed: {number}\ncluster:\n  n_nodes: {number}\n  n_gpus_per_node: 4\n"
        f"launcher:\n  trainer_cpus_per_gpu: {number}\n  inference_server_cpus_per_gpu: {number}\n"
    )
    words = ("--from", "areal", "--keep-going", "--force", "--to", scene.out / "run.toml")
    scene.skyrl("config", "convert", *words, source)
    assert (scene.out / "run.cluster.toml").exists(), "the table wants two files"


def plan_as_picture(scene: Scene, number: int) -> None:
    words = as_words(overrides(scene.nano, scene.trained, generator__inference_engine__num_engines=number))
    placed = ("trainer.placement.executor=ray", "trainer.placement.colocate_all=false")
    scene.skyrl("plan", *words, *placed, "--svg", scene.out / "plan.svg")


def plan_as_layer(scene: Scene, number: int) -> None:
    if number == 2:  # it replaces nothing
        words = ("trainer.device=cuda", "trainer.logger=console", "trainer.placement.gpu_kind=H100-80")
        scene.skyrl("plan", "--fit", 2, *words, "--to", scene.out / "fit.toml")


def report(scene: Scene, number: int) -> None:
    scene.skyrl("report", scene.run, "--samples", number, "--force", "--to", scene.out / "report.html")


def timeline(scene: Scene, number: int) -> None:
    scene.skyrl("timeline", scene.run, "--step", number, "--to", scene.out / "timeline.json")


def sweep(scene: Scene, number: int) -> None:
    (scene.trained / "sweep.toml").write_text(
        tomli_w.dumps(
            {
                "name": "s",
                "folder": str(scene.out / "sweep"),
                "run": [str(scene.trained / "run.toml")],
                "metric": "reward/avg_raw_reward",
                "grid": {"trainer.seed": list(range(number))},
            }
        )
    )
    for trial in range(number):
        folder = scene.out / "sweep" / "tasks" / str(trial) / "run"
        shutil.copytree(scene.trained / "run", folder, dirs_exist_ok=True)
    scene.skyrl("sweep", scene.trained / "sweep.toml", "--report")


def init(scene: Scene, number: int) -> None:
    if number == 2:
        scene.skyrl("init", scene.out / "task", "--no-model")


def made_model(scene: Scene, number: int) -> None:
    if number == 2:
        with made_whole(scene.out / "model") as folder:
            for name in ("config.json", "model.safetensors"):
                (folder / name).write_text(name)


def launch(scene: Scene, number: int) -> None:
    Launch(target="local", name=f"{number}", folder=scene.out, id="1", cwd="/", submitted=1.0).write()


TABLE: dict[str, Write] = {
    "eval": evaluate,
    "eval of a checkpoint": evaluate_a_checkpoint,
    "generate": generate,
    "export": export,
    "export --adapter": export_adapter,
    "config convert": convert,
    "plan --svg": plan_as_picture,
    "plan --fit --to": plan_as_layer,
    "report": report,
    "timeline": timeline,
    "sweep": sweep,
    "init": init,
    "prepare.py": made_model,
    "launch": launch,
}


@pytest.fixture(scope="module")
def trained(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder around a LoRA run of two steps, both saved and profiled."""
    out = tmp_path_factory.mktemp("trained")
    settings = {
        "trainer__policy__model__lora__rank": 2,
        "trainer__max_training_steps": 2,
        "trainer__ckpt_interval": 1,
        "trainer__eval_interval": -1,
        "trainer__profile_steps": [1, 2],
    }
    train(nano, out, **settings)
    values = overrides(nano, out, **settings)
    (out / "run.toml").write_text("\n".join(f"{path} = {json.dumps(value)}" for path, value in values.items()))
    return out


@pytest.mark.long
@pytest.mark.parametrize("command", TABLE)
def test_a_killed_command_leaves_the_old_result_or_the_new_one(
    command: str, nano: Path, trained: Path, tmp_path: Path
) -> None:
    scene = Scene(nano, trained, tmp_path / "out")
    scene.out.mkdir()
    TABLE[command](scene, 1)
    with states_of(scene.out) as states:
        TABLE[command](scene, 2)
    old, new = visible(states[0]), visible(states[-1])
    hidden = {name for name in states[-1] if "/." in f"/{name}" and "tasks" not in name}
    assert hidden <= {"task/.gitignore"}, "something was left over"
    assert old != new and len(states) >= 4, "no moment of the command was seen"
    for state in states:
        seen = visible(state)
        assert seen.items() <= old.items() or seen.items() <= new.items(), names(seen, old, new)
        if seen not in (old, new):  # between two renames: both are whole, beside
            renamed = {re.sub(r"(^|/)\.([^/]+)\.new", r"\1\2", name) for name in state}
            assert new.keys() <= renamed, names(seen, old, new)


def visible(state: State) -> State:
    """What has its final name: results of a sweep without its trials."""
    return {name: content for name, content in state.items() if not re.search(r"(^|/)\.|^sweep/tasks|^sweep$", name)}


def names(seen: State, old: State, new: State) -> str:
    return f"visible: {sorted(seen)}, old: {sorted(old)}, new: {sorted(new)}"


def test_results_of_the_other_command_and_files_of_the_user_are_not_replaced(
    nano: Path, trained: Path, tmp_path: Path
) -> None:
    scene = Scene(nano, trained, tmp_path)
    evaluate(scene, 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").touch()
    for write, folder, content in ((generate, "results", "results.json, samples"), (export, "model", "thesis.tex")):
        with pytest.raises(AssertionError, match=rf"{folder} holds {content}: it would be replaced as a whole"):
            write(scene, 2)
    assert (tmp_path / "results" / "results.json").exists() and (tmp_path / "model" / "thesis.tex").exists()


WRITERS = {
    "storage/atomic.py": "the mechanism",
    "storage/disk.py": "checkpoints, whose folder gets its name at the end",
    "storage/bucket.py": "an object exists once its upload has ended",
    "tracking/jsonlines.py": "lines are added, and readers leave out a half one",
    "data/row_store.py": "a folder that gets its name at the end",
    "processes/naming/names_on_disk.py": "replaced by a rename; a lower layer than storage",
    "launchers/job.py": "replaced by a rename, from a name of its own: two processes write it",
    "training/evaluation.py": "into an atomic folder",
    "starter/template_files.py": "into an atomic folder",
    "tools/sampling_alone.py": "into an atomic folder",
    "tools/data_report.py": "into atomic files",
    "tools/evaluating.py": "into the atomic folder of sampling_alone.py",
    "tracking/token_file.py": "into an atomic file",
    "tools/rehearsal.py": "working files of a rehearsal, made anew by each",
    "starter/tiny_chat.py": "a temporary folder",
    "starter/pretrained.py": "a temporary folder",
    "inference/adapters.py": "a temporary folder",
    "weight_sync/senders.py": "weights on their way to engines",
    "weight_receiver/transfer_group.py": "memory without a name",
    "learners/cpu_adam.py": "a lock of DeepSpeed's compiler",
    "learners/profiling.py": "a table for people beside torch's own trace",
    "runs/run_owner.py": "the owner of a lock",
    "config/loading/stored_code.py": "lines that are added",
    "processes/ray/cluster.py": "the token of a private cluster, before it starts",
    "processes/logs.py": "a stream",
    "processes/progress.py": "stacks, which are added",
    "processes/dies_with_parent.py": "a log",
    "launchers/node.py": "a log",
    "launchers/local.py": "a log",
    "tracking/services/follower.py": "a log",
    "tracking/services/follow.py": "a lock",
    "sandbox/fork_server.py": "inside a sandbox",
    "sandbox/memory_groups.py": "the kernel's files",
    "sandbox/confinement.py": "the kernel's files",
}
"""Modules that open files for writing themselves, and why nobody finds half of one."""


def test_no_other_module_writes_a_file_in_place() -> None:
    writers = {
        str(path.relative_to(ROOT / "skyrl"))
        for path in (ROOT / "skyrl").rglob("*.py")
        if "templates" not in path.parts and any(writes(path.read_text(encoding="utf-8")))
    }
    assert writers == WRITERS.keys()


def writes(text: str) -> Iterator[bool]:
    """For each call that may open a file for writing."""
    if not re.search(r"\bopen\(|write_text|write_bytes", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            modes = [
                argument.value
                for argument in (*node.args, *(k.value for k in node.keywords))
                if isinstance(argument, ast.Constant)
            ]
            is_mode = any(isinstance(mode, str) and re.fullmatch(r"[wax]b?\+?", mode) for mode in modes)
            if name in ("write_text", "write_bytes") or (name == "open" and is_mode):
                yield True
