"""What a resumed run reads again is what it was, or the run is refused: every file beside the training rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.checkpoint.store import Checkpoint
from skyrl.config import ModelConfig, SkyRLTrainConfig, compose
from skyrl.data.prompts import PromptDataset
from skyrl.errors import ResumeError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs import input_digests
from skyrl.runs.input_digests import STATE, carried_on, judged_with, model_digests, refuse_changed_inputs
from skyrl.trajectory import Prompt
from tests import nano_run, supervised_run
from tests.nano_run import train

MODEL = ("config.json", "generation_config.json", "model.safetensors")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"


def with_every_model(nano: Path, inputs: Path) -> dict[str, Any]:
    """Settings of a run with adapters on its policy and critic, and a reference with a stored one, all in `inputs`."""
    settings = json.loads((nano / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    for name in ("policy", "ref", "critic"):
        shutil.copytree(nano / "model", inputs / name)
    shutil.copytree(nano / "adapter", inputs / "adapter")
    shutil.copy(nano / "validation.jsonl", inputs)
    (inputs / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return {
        "trainer__policy__model__path": str(inputs / "policy"),
        "trainer__policy__model__lora__rank": 2,
        "trainer__policy__model__lora__alpha": 4,
        "trainer__critic__model__path": str(inputs / "critic"),
        "trainer__critic__model__lora__rank": 2,
        "trainer__critic__model__lora__alpha": 4,
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__critic_mini_batch_size": 4,
        "trainer__algorithm__use_kl_loss": True,
        "trainer__ref__model__path": str(inputs / "ref"),
        "trainer__ref__model__lora__path": str(inputs / "adapter"),
        "trainer__ref__model__lora__rank": settings["r"],
        "trainer__ref__model__lora__alpha": settings["lora_alpha"],
        "trainer__ref__model__lora__target_modules": settings["target_modules"],
        "generator__chat_template__source": "file",
        "generator__chat_template__name_or_path": str(inputs / "template.jinja"),
        "data__val_data": [str(inputs / "validation.jsonl")],
        "trainer__eval_interval": 2,
        "trainer__ckpt_interval": 1,
    }


def changed(file: Path) -> None:
    """Other content of the same meaning where the file is text, and another weight, of the same length, where not."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif file.suffix == ".jsonl":
        file.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    elif file.suffix == ".jinja":
        file.write_bytes(content + b"{# other #}")
    else:
        file.write_bytes(content + b"\n")


@pytest.mark.long
def test_every_input_of_a_run_is_the_same_or_refused_or_not_read_again(nano: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    settings = with_every_model(nano, inputs)
    train(nano, tmp_path, **settings, trainer__max_training_steps=1)
    files = sorted(file for file in inputs.rglob("*") if file.is_file())
    unread = [file for file in files if not is_refused(file, nano_run.config(nano, tmp_path, **settings))]
    assert {file.relative_to(inputs).as_posix() for file in files if file not in unread} == {
        *(f"{model}/{name}" for model in ("policy", "ref", "critic") for name in MODEL),
        *(f"policy/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
        *(f"adapter/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")),
        *("template.jinja", "validation.jsonl"),
    }
    changed(inputs / "ref" / "model.safetensors")
    with pytest.raises(
        ResumeError, match=r"step 1 was saved:\n  trainer.ref.model.path: model.safetensors has changed"
    ):
        train(nano, tmp_path, **settings, trainer__max_training_steps=2)
    changed(inputs / "ref" / "model.safetensors")  # back
    for file in unread:  # nothing misses them
        file.unlink()
    train(nano, tmp_path, **settings, trainer__max_training_steps=2)
    assert (tmp_path / "run" / "model").exists()


def is_refused(file: Path, run: SkyRLTrainConfig) -> bool:
    """Whether a session that finds another content in this file refuses to go on. The content is restored."""
    before = file.read_bytes()
    changed(file)
    experiment = BasePPOExp(run)
    checkpoint = experiment.checkpoints.latest()
    assert checkpoint is not None
    try:
        refuse_changed_inputs(checkpoint, experiment.input_digests(), run)
    except ResumeError:
        return True
    finally:
        file.write_bytes(before)
    return False


def sft(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    rows = Path(supervised_run.write(folder / "validation.jsonl", supervised_run.chats(4)))
    return supervised_run.settings(nano, folder, "sft", eval_datasets=(str(rows),)), rows, "eval_datasets: validation"


def sft_with_an_adapter(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    shutil.copytree(nano / "model", folder / "model")
    own = {"model__path": str(folder / "model"), "model__lora__rank": 2}
    weights = folder / "model" / "model.safetensors"
    return supervised_run.settings(nano, folder, "sft", **own), weights, f"model.path: {weights.name}"


def sft_with_a_template(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    file = folder / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    own = {"chat_template__source": "file", "chat_template__name_or_path": str(file)}
    return supervised_run.settings(nano, folder, "sft", **own), file, "chat_template.name_or_path"


def reward_model(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    shutil.copytree(nano / "model", folder / "model")
    own = {"model__path": str(folder / "model"), "tokenizer_path": str(nano / "model")}
    config = folder / "model" / "config.json"
    return supervised_run.settings(nano, folder, "reward_model", **own), config, "model.path: config.json"


def another_tokenizer(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    shutil.copytree(nano / "model", folder / "tokenizer")
    own = nano_run.overrides(nano, folder, trainer__tokenizer_path=str(folder / "tokenizer"))
    return own, folder / "tokenizer" / "tokenizer.json", "trainer.tokenizer_path: tokenizer.json"


def judged_by(task: str, nano: Path, folder: Path, **columns: str) -> dict[str, Any]:
    row = {
        "prompt": [{"role": "user", "content": "a"}],
        "reward_spec": {"method": "rule", "ground_truth": "a"},
        "env_class": task,
    }
    (folder / "train.jsonl").write_text((json.dumps(row | columns) + "\n") * 4, encoding="utf-8")
    data = {"data__train_data": [str(folder / "train.jsonl")], "environment__env_class": task}
    return nano_run.overrides(nano, folder, **data)


def judged_by_a_reward_model(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    shutil.copytree(nano / "model", folder / "judge")
    own = {"environment.skyrl_gym.reward_model.path": str(folder / "judge")}
    weights = folder / "judge" / "model.safetensors"
    digest_name = "environment.skyrl_gym.reward_model.path: model.safetensors"
    return judged_by("reward_model", nano, folder) | own, weights, digest_name


def with_a_database(nano: Path, folder: Path) -> tuple[Any, Path, str]:
    (folder / "databases").mkdir()
    (folder / "databases" / "shop.sqlite").write_bytes(b"rows")
    own = {"environment.skyrl_gym.text2sql.db_path": str(folder / "databases"), "generator.max_turns": 1}
    values = judged_by("text2sql", nano, folder, db_id="shop") | own
    return values, folder / "databases" / "shop.sqlite", "environment.skyrl_gym.text2sql.db_path"


Input = Callable[[Path, Path], tuple[Any, Path, str]]


@pytest.mark.parametrize(
    "of",
    [
        sft,
        sft_with_an_adapter,
        sft_with_a_template,
        reward_model,
        another_tokenizer,
        judged_by_a_reward_model,
        with_a_database,
    ],
)
def test_an_input_that_changed_has_another_digest_under_its_field(of: Input, nano: Path, tmp_path: Path) -> None:
    values, file, digest_name = of(nano, tmp_path)
    before = digests(values)
    changed(file)
    now = digests(values)
    assert before.keys() == now.keys()
    assert [name for name in before if before[name] != now[name]] == [digest_name]


def test_the_folders_of_harbor_tasks_are_read_again(nano: Path, tmp_path: Path) -> None:
    run = nano_run.config(nano, tmp_path)
    folder = tmp_path / "tasks" / "first"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("exit 0")
    task = {"harbor_task": str(folder)}
    prompt = Prompt(id="0:0", messages=(), token_ids=(1,), env_class="harbor", extras=task)
    before = judged_with(run, [PromptDataset(prompts=(prompt,))])
    assert before.keys() == {"the folders of Harbor tasks"}
    (folder / "tests" / "test.sh").write_text("exit 1")
    assert judged_with(run, [PromptDataset(prompts=(prompt,))]) != before
    assert judged_with(run, []) == {}


def digests(values: Any) -> dict[str, str]:
    run: Any = compose([], values).config
    digest_by_name: dict[str, str] = experiment_class(run)(run).input_digests()
    return digest_by_name


def test_a_revision_of_the_hub_that_moved_is_told_by_the_files_that_this_machine_has(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.runs.input_digests.cached_folder", lambda name: tmp_path / "snapshot")
    model = ModelConfig(path="owner/name")
    assert model_digests("trainer.ref.model.path", model, weights=True) == {}
    shutil.copytree(nano / "model", tmp_path / "snapshot")
    (tmp_path / "snapshot" / "README.md").write_text("first")
    before = model_digests("trainer.ref.model.path", model, weights=True)
    assert [name.partition(": ")[2] for name in before] == sorted(MODEL)
    (tmp_path / "snapshot" / "README.md").write_text("second")
    assert model_digests("trainer.ref.model.path", model, weights=True) == before
    changed(tmp_path / "snapshot" / "model.safetensors")
    assert model_digests("trainer.ref.model.path", model, weights=True) != before


def test_what_only_one_session_read_is_not_compared_but_kept(nano: Path, tmp_path: Path) -> None:
    run = nano_run.config(nano, tmp_path)
    first = Checkpoint(step=1, models={}, state={STATE: {"data.val_data": "a"}}, config={}, fingerprint="")
    refuse_changed_inputs(first, {"trainer.ref.model.path: config.json": "b"}, run)
    kept = carried_on(first, {"trainer.ref.model.path: config.json": "b"})
    later = Checkpoint(step=2, models={}, state={STATE: kept}, config={}, fingerprint="")
    with pytest.raises(ResumeError, match=r"\n  data.val_data has changed\nRestore it"):
        refuse_changed_inputs(later, {"data.val_data": "c"}, run)
    of_an_earlier_version = Checkpoint(step=2, models={}, state={}, config={}, fingerprint="")
    refuse_changed_inputs(of_an_earlier_version, {"data.val_data": "c"}, run)


@pytest.mark.parametrize("offset", [0, 999, 3000, 4095])
def test_a_large_file_is_read_in_blocks_spread_over_it(
    offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_digests, "BLOCK", 16)
    monkeypatch.setattr(input_digests, "BUDGET", 64)
    file = tmp_path / "weights"
    file.write_bytes(bytes(4096))
    before = input_digests.file_digests([file])
    blocks = {number * (4096 - 16) // 3 for number in range(4)}  # bytes 0, 1360, 2720 and 4080 and those after them
    file.write_bytes(bytes(offset) + b"x" + bytes(4095 - offset))
    is_read = any(start <= offset < start + 16 for start in blocks)
    assert (input_digests.file_digests([file]) != before) == is_read
    file.write_bytes(b"y" * 4096)
    assert input_digests.file_digests([file]) != before
    file.write_bytes(bytes(4097))
    assert input_digests.file_digests([file]) != before
