from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from skyrl.config import compose
from skyrl.envs import find_env
from skyrl.models.files.loading import load_causal_lm, load_tokenizer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ROW = {"reward_spec": {"method": "rule", "ground_truth": "abdghh"}, "extra_info": {"split": "train", "index": 0}}


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with two supervised steps instead of 300 and fewer rows."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import prepare

    for name, value in {"STEPS": 2, "TRAIN_ROWS": 64, "VALIDATION_ROWS": 16}.items():
        monkeypatch.setattr(prepare, name, value)
    return prepare


def run(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, seed: int = 0) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(out), "--seed", str(seed)])
    prepare.main()


def rows(out: Path, split: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pq.read_table(out / f"{split}.parquet").to_pylist()
    return read


@pytest.mark.parametrize("task", ["reward.py:sorted_exactly", "sort_env.py:SortEnv"])
@pytest.mark.parametrize(
    ("answer", "reward"), [("abdghh", 1.0), (" abdghh\n", 1.0), ("hhgdba", 0.0), ("abdgh", 0.0), ("", 0.0)]
)
def test_only_the_sorted_word_is_rewarded(task: str, answer: str, reward: float) -> None:
    step = find_env(f"{QUICKSTART}/{task}")(ROW).step(answer)
    assert (step.reward, step.done) == (reward, True)


def test_the_environment_reports_the_habit() -> None:
    env = find_env(f"{QUICKSTART}/sort_env.py:SortEnv")(ROW)
    env.step("hhgdba")
    assert env.get_metrics() == {"ascending": 0.0, "descending": 1.0}


def test_the_configuration_runs_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compose([str(QUICKSTART / "grpo.toml")], [], strict=True).warnings


def test_training_and_validation_words_are_different_and_their_truth_is_sorted(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(prepare, monkeypatch, tmp_path / "base")
    train, validation = rows(tmp_path / "base", "train"), rows(tmp_path / "base", "validation")
    words = [row["prompt"][0]["content"].removeprefix("sort: ") for row in train + validation]
    assert (len(train), len(validation), len(set(words))) == (64, 16, 80)
    truths = [row["reward_spec"]["ground_truth"] for row in train + validation]
    assert truths == ["".join(sorted(word)) for word in words]
    assert all(3 <= len(word) <= 7 and truth != truth[::-1] for word, truth in zip(words, truths, strict=True))


@pytest.mark.long
def test_what_is_prepared_loads_and_every_letter_is_one_token(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(prepare, monkeypatch, tmp_path / "base")
    model_path = str(tmp_path / "base" / "model")
    tokenizer = load_tokenizer(model_path)
    model = load_causal_lm(model_path, dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    assert sum(weight.numel() for weight in model.parameters()) == 3_020_032
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    chat = [{"role": "user", "content": "sort: hgdbha"}]
    assert (
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        == "<|user|>sort: hgdbha<|end|><|assistant|>"
    )
    assert [tokenizer.decode([token]) for token in tokenizer.encode("abdghh")] == list("abdghh")


@pytest.mark.long
def test_a_seed_determines_everything(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def made(name: str, seed: int) -> tuple[list[dict[str, Any]], bytes]:
        run(prepare, monkeypatch, tmp_path / name, seed)
        return rows(tmp_path / name, "train"), (tmp_path / name / "model" / "model.safetensors").read_bytes()

    one, repeated, other = made("one", seed=3), made("again", seed=3), made("other", seed=4)
    assert one == repeated
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.long
def test_a_complete_folder_is_left_alone(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(prepare, monkeypatch, tmp_path / "base")
    before = (tmp_path / "base" / "prepared.json").stat().st_mtime_ns
    monkeypatch.setattr(prepare, "prepare", None)
    run(prepare, monkeypatch, tmp_path / "base")
    assert (tmp_path / "base" / "prepared.json").stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.long
def test_what_a_killed_preparation_left_is_not_taken_for_complete(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    warm_start = prepare.warm_start
    monkeypatch.setattr(prepare, "warm_start", killed)
    with pytest.raises(KeyboardInterrupt):
        run(prepare, monkeypatch, tmp_path / "base")
    monkeypatch.setattr(prepare, "warm_start", warm_start)
    assert not (tmp_path / "base").exists()
    run(prepare, monkeypatch, tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (None, "was not made by this script"),
        ({"recipe": 1, "seed": 5}, "was made with seed 5, not 0"),
        ({"recipe": 0, "seed": 0}, "was made with recipe 0, not 1"),
    ],
)
def test_a_folder_that_holds_something_else_is_refused_and_kept(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, marker: dict[str, int] | None, message: str
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "mine.txt").touch()
    if marker is not None:
        (tmp_path / "base" / "prepared.json").write_text(json.dumps(marker))
    with pytest.raises(SystemExit, match=message):
        run(prepare, monkeypatch, tmp_path / "base")
    assert (tmp_path / "base" / "mine.txt").exists()
