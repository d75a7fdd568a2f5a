"""Supervised fine-tuning and reward models, run to the end in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cattrs
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from skyrl.config import ConfigError, RewardModelConfig, SFTConfig, SkyRLTrainConfig, compose, load
from skyrl.envs import find_env
from skyrl.envs.reward_service import reward_app
from skyrl.errors import DataError, ResumeError
from skyrl.experiments.exporting import export
from skyrl.experiments.kinds import experiment_of
from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.stored_runs import checkpoints_of
from skyrl.learners.schedule import adamw
from skyrl.models.reward_model import RewardModel
from tests.nano_run import overrides as rl_overrides


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Words of different lengths, answered in capitals."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcd", k=rng.randint(2, 6))) for _ in range(count)]
    return [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]}
        for word in words
    ]


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of x, y, z are better than those of m, n, o."""
    rng = random.Random(seed)
    return [
        {"prompt": "".join(rng.choices("abcd", k=3)), "chosen": _word(rng, "xyz"), "rejected": _word(rng, "mno")}
        for _ in range(count)
    ]


def _word(rng: random.Random, letters: str) -> str:
    return "".join(rng.choices(letters, k=rng.randint(2, 5)))


def settings(nano: Path, folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    rows = chats(32) if kind == "sft" else pairs(32)
    return {
        "kind": kind,
        "model.path": str(nano / "model"),
        "train_datasets": (write(folder / "train.jsonl", rows),),
        "batch_size": 8,
        "micro_train_batch_size_per_gpu": 3,
        "optimizer_config.lr": 1e-2 if kind == "sft" else 3e-3,
        "num_epochs": 2,
        "device": "cpu",
        "run_path": str(folder / "run"),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def train(nano: Path, folder: Path, kind: str = "sft", **changes: Any) -> list[dict[str, Any]]:
    """Runs it, and reads its metrics."""
    folder.mkdir(exist_ok=True)
    config: Any = compose([], settings(nano, folder, kind, **changes)).config
    experiment_of(config.kind)(config).run()
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_the_loss_falls_on_the_rows_and_on_others(nano: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.jsonl", chats(16, seed=1))
    found = train(nano, tmp_path, eval_datasets=(held_out,), eval_interval="1 epoch", eval_before_train=True)
    assert [record["step"] for record in found] == list(range(9))
    assert found[8]["train/loss"] < found[1]["train/loss"] / 2
    before, after = found[0], found[8]
    assert after["eval/held_out/loss"] < before["eval/held_out/loss"] / 2
    assert after["eval/all/perplexity"] == pytest.approx(2.718281828 ** after["eval/all/loss"])


def test_a_run_is_the_plain_loop_of_pytorch(nano: Path, tmp_path: Path) -> None:
    found = train(nano, tmp_path, sampler="sequential", num_epochs=1)
    model: Any = AutoModelForCausalLM.from_pretrained(nano / "model").eval()
    run = load([], settings(nano, tmp_path, "sft")).config
    assert isinstance(run, SFTConfig)
    optimizer = adamw(model, run.optimizer_config)
    tokenizer = experiment_of("sft")(compose([], settings(nano, tmp_path, "sft")).config).tokenizer
    losses = []
    for start in range(0, 32, 8):
        nats, learned = torch.tensor(0.0), 0
        for row in chats(32)[start : start + 8]:
            asked, said = (
                [*tokenizer.encode(message["content"]), tokenizer.eos_token_id] for message in row["messages"]
            )
            logits = model(input_ids=torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1]
            nats = nats + torch.nn.functional.cross_entropy(logits, torch.tensor(said), reduction="sum")
            learned += len(said)
        (nats / learned).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((nats / learned).item())
    assert [record["train/loss"] for record in found[1:]] == pytest.approx(losses, rel=1e-4)
    assert farthest(weights(tmp_path), model.state_dict()) < 2e-4


def test_packing_and_micro_batches_change_nothing_but_rounding(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path / "rows", num_epochs=1, optimizer_config__lr=1e-3)
    other: dict[str, Any] = {"use_sequence_packing": False, "max_tokens_per_microbatch": 24}
    train(nano, tmp_path / "tokens", num_epochs=1, optimizer_config__lr=1e-3, **other)
    assert farthest(weights(tmp_path / "rows"), weights(tmp_path / "tokens")) < 2e-4


def test_a_run_that_goes_on_is_one_that_was_never_interrupted(nano: Path, tmp_path: Path) -> None:
    whole = train(nano, tmp_path / "whole", deterministic=True)
    train(nano, tmp_path / "parts", deterministic=True, num_steps=3, ckpt_interval=2)
    found = train(nano, tmp_path / "parts", deterministic=True, ckpt_interval=2)
    assert [record["step"] for record in found] == list(range(9))
    assert [record.get("train/loss") for record in found] == [record.get("train/loss") for record in whole]
    assert farthest(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0.0


@pytest.mark.parametrize("kind", ["sft", "reward_model"])
def test_a_run_that_was_moved_is_exported_out_of_the_checkpoints_in_its_folder(
    nano: Path, tmp_path: Path, kind: str
) -> None:
    train(nano, tmp_path, kind, num_epochs=1, ckpt_interval=4)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert checkpoints_of(str(moved)) == str(moved / "checkpoints")
    assert export(moved) == (4, moved / "exports" / "global_step_4" / "model")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (moved / "exports" / "global_step_4" / "model", moved / "model")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_folder_of_another_run_is_refused_in_the_words_of_its_own_tree(nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, num_epochs=1, ckpt_interval=4)
    with pytest.raises(ResumeError) as refused:
        train(nano, tmp_path, num_epochs=1, ckpt_interval=4, seed=7)
    assert "seed: 42 there, 7 here" in str(refused.value) and "trainer." not in str(refused.value)
    assert "run_path=" in str(refused.value)


def test_sources_are_mixed_by_weight_and_limits_end_the_run(nano: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second.jsonl", chats(8, seed=3))
    both = (write(tmp_path / "train.jsonl", chats(32)), second)
    found = train(nano, tmp_path, train_datasets=both, train_dataset_weights=(1, 1), max_training_samples=30)
    assert found[-1]["step"] == 3  # 30 rows are three batches of eight


def test_too_few_rows_are_told(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="batch_size = 64 rows, but the training data has 32"):
        train(nano, tmp_path, batch_size=64)


def test_a_reward_model_tells_better_from_worse_and_transformers_reads_it(nano: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.jsonl", pairs(32, seed=1))
    found = train(nano, tmp_path, "reward_model", eval_datasets=(held_out,), eval_interval=8, num_epochs=3)
    assert found[-1]["eval/all/accuracy"] > 0.9 and found[-1]["train/accuracy"] > 0.9
    assert found[-1]["train/loss"] < found[1]["train/loss"] / 2
    folder = str(tmp_path / "run" / "model")
    model, theirs = RewardModel(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    asked = [[{"role": "user", "content": "abc"}, {"role": "assistant", "content": each}] for each in ("zxy", "mo")]
    better, worse = scores = model.scores(asked)
    assert better > worse
    found_there = [theirs(input_ids=torch.tensor([model.tokens(chat)])).logits.item() for chat in asked]
    assert scores == pytest.approx(found_there, abs=1e-5)


@pytest.mark.parametrize("changes", [{"max_tokens_per_microbatch": 12}, {"use_sequence_packing": False}])
def test_pairs_stay_whole_in_every_layout(nano: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = train(nano, tmp_path / "plain", "reward_model", num_epochs=1)
    other = train(nano, tmp_path / "other", "reward_model", num_epochs=1, **changes)
    both = ([record["train/loss"] for record in found[1:]] for found in (plain, other))
    assert next(both) == pytest.approx(next(both), rel=1e-3)


@pytest.fixture(scope="module")
def judge(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model that likes capitals."""
    folder = tmp_path_factory.mktemp("judge")
    rng = random.Random(0)
    rows = [{"prompt": "a", "chosen": _word(rng, "ABCXYZ"), "rejected": _word(rng, "abcxyz")} for _ in range(48)]
    data = write(folder / "pairs.jsonl", rows)
    train(nano, folder, "reward_model", train_datasets=(data,), num_epochs=4)
    return str(folder / "run" / "model")


def test_a_reward_model_as_the_reward_of_reinforcement_learning_is_learned_from(
    nano: Path, tmp_path: Path, judge: str
) -> None:
    changes = {
        "environment__env_class": "reward_model",
        "environment__skyrl_gym__reward_model__path": judge,
        "trainer__epochs": 3,
        "trainer__eval_interval": -1,
        "trainer__eval_before_train": False,
        "generator__n_samples_per_prompt": 8,
    }
    config: SkyRLTrainConfig = compose([], rl_overrides(nano, tmp_path, **changes)).config
    BasePPOExp(config).run()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [
        record["reward/avg_raw_reward"] for record in map(json.loads, lines) if "reward/avg_raw_reward" in record
    ]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_reward_service_gives_the_scores_of_the_model_and_wants_its_token(judge: str) -> None:
    from starlette.testclient import TestClient

    model = RewardModel(judge)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "XYZ"}]
    client = TestClient(reward_app(model, judge, token="secret"))
    key = {"Authorization": "Bearer secret"}
    assert client.post("/score", json={"chats": [chat]}, headers=key).json() == {"scores": model.scores([chat])}
    assert client.post("/score", json={"chats": [chat]}).status_code == 401
    refused = client.post("/score", json={"chats": [[{"role": "user"}]]}, headers=key)
    assert refused.status_code == 400 and "'role' and 'content'" in refused.json()["error"]
    assert client.get("/health").json() == {"model": judge}


def test_the_environment_asks_a_service_over_http(judge: str) -> None:
    import threading

    import uvicorn

    from skyrl.config import RewardModelEnvConfig, SkyRLGymConfig
    from skyrl.envs.service import listen

    model = RewardModel(judge)
    with listen("127.0.0.1", 0, None, "SKYRL_REWARD_TOKEN") as bound:
        server = uvicorn.Server(uvicorn.Config(reward_app(model, judge), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/score"
        gym = SkyRLGymConfig(reward_model=RewardModelEnvConfig(url=url))
        env = find_env("reward_model", gym)({})
        env.init(({"role": "user", "content": "a"},))
        reward = env.step("XYZ").reward
        server.should_exit = True
        thread.join()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "XYZ"}]
    assert reward == pytest.approx(model.scores([chat])[0])


def test_kind_chooses_the_tree(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('kind = "reward_model"\nbatch_size = 6\n', encoding="utf-8")
    loaded: Any = load([str(file)]).config
    assert isinstance(loaded, RewardModelConfig) and loaded.batch_size == 6
    assert isinstance(load([], {"kind": "sft"}).config, SFTConfig)
    assert type(load([]).config) is SkyRLTrainConfig
    assert cattrs.structure(cattrs.unstructure(loaded), RewardModelConfig) == loaded
    with pytest.raises(ConfigError, match="'sfx' is not one of: rl, sft, reward_model"):
        load([], ["kind=sfx"])


def test_everything_that_is_wrong_with_a_supervised_tree_is_told_at_once() -> None:
    wrong = {
        "kind": "sft",
        "batch_size": 3,
        "placement.num_gpus_per_node": 2,
        "eval_interval": 5,
        "train_dataset_weights": (1.0,),
        "optimizer_config.num_warmup_steps": 3,
        "optimizer_config.warmup_steps_proportion": 0.1,
        "faults.on_non_finite": "roll_back",
    }
    with pytest.raises(ConfigError) as refused:
        compose([], wrong)
    paths = {problem.path for problem in refused.value.problems if problem.severity == "error"}
    assert paths == {
        "model.path",
        "train_datasets",
        "eval_datasets",
        "train_dataset_weights",
        "batch_size",
        "optimizer_config.warmup_steps_proportion",
        "faults.on_non_finite",
    }
