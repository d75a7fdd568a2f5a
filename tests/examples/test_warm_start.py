"""The warm start of the quick start, a run of skyrl, is what a plain loop of PyTorch makes of the same rows."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl.config import compose
from skyrl.starter import tiny_chat

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, whose warm start leaves its folder in place."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import prepare

    @contextmanager
    def kept() -> Iterator[str]:
        yield str(tmp_path)

    monkeypatch.setattr(tiny_chat, "TemporaryDirectory", kept)
    return prepare


class PlainLoop:
    """AdamW whose rate rises over 20 steps and falls over the last 100; the gradient's norm is at most 1."""

    def __init__(self, model: Any, tokenizer: Any, steps: int, lr: float) -> None:
        self.model, self.tokenizer, self.steps, self.lr = model, tokenizer, steps, lr
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, number: int, rows: Sequence[Any]) -> float:
        """The loss of these rows, which are padded to the longest of them, before the step; counted from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1, (number + 1) / 20, (self.steps - number) / 100)
        ids, labels = padded(self.tokenizer, rows)
        logits = self.model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def go_on_from(self, checkpoint: Path) -> None:
        """Weights and running means of a checkpoint of skyrl."""
        (file,) = checkpoint.rglob("*.safetensors")
        stored = load_file(file)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(stored[f"model.{name}"])
            kept = {key: stored[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = kept


def padded(tokenizer: Any, rows: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) ids, and labels that are -100 outside of the answer and its end."""
    texts = [
        (f"<|user|>{question['content']}<|end|><|assistant|>", f"{answer['content']}<|end|>")
        for question, answer in rows
    ]
    pairs = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in texts]
    width = max(len(prompt_ids) + len(answer_ids) for prompt_ids, answer_ids in pairs)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (prompt_ids, answer_ids) in enumerate(pairs):
        end = len(prompt_ids) + len(answer_ids)
        ids[row, :end] = torch.tensor(prompt_ids + answer_ids)
        labels[row, len(prompt_ids) : end] = torch.tensor(answer_ids)
    return ids, labels


def both_ways(prepare: ModuleType, folder: Path, model: Any, *, steps: int, batch_size: int, meeting: int = 0) -> Any:
    """The losses of the warm start, which trains `model`, and those of the plain loop, which after every `meeting`
    steps goes on from where the other one is.
    """
    rng = prepare.random.Random(0)
    rows = list(islice(prepare.answered(prepare.draw_words(rng, 512, excluded=()), rng), steps * batch_size))
    tokenizer, drawn = prepare.build_tokenizer(), iter(rows)
    plain = PlainLoop(copy.deepcopy(model), tokenizer, steps, prepare.LEARNING_RATE)
    size: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "lr": prepare.LEARNING_RATE}
    prepare.warm_start(model, tokenizer, lambda: next(drawn), **size)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["train/loss"] for record in map(json.loads, lines) if record["step"]]
    expected = []
    for step in range(steps):
        if meeting and step and step % meeting == 0:
            plain.go_on_from(folder / "run" / "checkpoints" / f"global_step_{step}")
        expected.append(plain.step(step, rows[step * batch_size : (step + 1) * batch_size]))
    return losses, expected


@pytest.mark.long
def test_a_small_warm_start_has_the_losses_of_a_plain_loop(prepare: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prepare.small_qwen2(prepare.build_tokenizer(), hidden_size=32, layers=1)
    losses, expected = both_ways(prepare, tmp_path, model, steps=120, batch_size=6)
    assert losses == pytest.approx(expected, abs=1e-5) and len(losses) == 120
    assert losses[-1] < losses[0] - 1


@pytest.mark.long
def test_every_step_of_the_whole_warm_start_is_one_of_a_plain_loop(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet every 30 steps: rounding that differs by 1e-7 in the first step is 1e-5 after a hundred."""

    def kept(files: Any, values: dict[str, Any], root: Any) -> Any:
        return compose(files, {**values, "ckpt_interval": 30}, root)

    monkeypatch.setattr(tiny_chat, "compose", kept)
    torch.manual_seed(0)
    model = prepare.small_qwen2(prepare.build_tokenizer(), hidden_size=256, layers=4)
    losses, expected = both_ways(prepare, tmp_path, model, steps=prepare.STEPS, batch_size=prepare.BATCH, meeting=30)
    print(f"farthest losses of {len(losses)}: {max(map(abs, map(float.__sub__, losses, expected))):.1e}")
    assert losses == pytest.approx(expected, abs=1e-5) and len(losses) == 300
