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

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, whose warm start leaves its folder in place."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import prepare
    import tiny_chat

    @contextmanager
    def kept() -> Iterator[str]:
        yield str(tmp_path)

    monkeypatch.setattr(tiny_chat, "TemporaryDirectory", kept)
    return prepare


def plain_loop(
    model: Any, tokenizer: Any, rows: Sequence[Any], *, steps: int, batch_size: int, lr: float
) -> list[float]:
    """Trains `model` on `batch_size` rows after the other, padded to the longest of them; the loss of every step.

    The rate rises over 20 steps and falls over the last 100; the gradient's norm is at most 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20, (steps - step) / 100)
        ids, labels = padded(tokenizer, rows[step * batch_size : (step + 1) * batch_size])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def padded(tokenizer: Any, rows: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) ids, and labels that are -100 outside of the answer and its end."""
    texts = [(f"<|user|>{ask['content']}<|end|><|assistant|>", f"{answer['content']}<|end|>") for ask, answer in rows]
    pairs = [(tokenizer.encode(asked), tokenizer.encode(said)) for asked, said in texts]
    width = max(len(asked) + len(said) for asked, said in pairs)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (asked, said) in enumerate(pairs):
        end = len(asked) + len(said)
        ids[row, :end] = torch.tensor(asked + said)
        labels[row, len(asked) : end] = torch.tensor(said)
    return ids, labels


def both_ways(
    prepare: ModuleType, folder: Path, model: Any, *, steps: int, batch_size: int
) -> tuple[list[float], list[float], Any]:
    """The losses of the warm start, which trains `model`, those of the plain loop, and the model of that."""
    rng = prepare.random.Random(0)
    rows = list(islice(prepare.answered(prepare.draw_words(rng, 512, taken=()), rng), steps * batch_size))
    tokenizer, other, drawn = prepare.build_tokenizer(), copy.deepcopy(model), iter(rows)
    size: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "lr": prepare.LEARNING_RATE}
    prepare.warm_start(model, tokenizer, lambda: next(drawn), **size)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record["train/loss"] for record in map(json.loads, lines) if record["step"]]
    return found, plain_loop(other, tokenizer, rows, **size), other


def test_a_small_warm_start_has_the_losses_of_a_plain_loop(prepare: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prepare.small_qwen2(prepare.build_tokenizer(), hidden_size=32, layers=1)
    found, expected, _ = both_ways(prepare, tmp_path, model, steps=120, batch_size=6)
    assert found == pytest.approx(expected, abs=1e-5) and len(found) == 120
    assert found[-1] < found[0] - 1


@pytest.mark.long
def test_the_warm_start_has_the_losses_and_the_accuracy_of_a_plain_loop(prepare: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = prepare.build_tokenizer()
    model = prepare.small_qwen2(tokenizer, hidden_size=256, layers=4)
    found, expected, other = both_ways(prepare, tmp_path, model, steps=prepare.STEPS, batch_size=prepare.BATCH)
    words = prepare.draw_words(prepare.random.Random(1), 256, taken=())
    accuracies = []
    for each in (model, other):
        torch.manual_seed(1)
        accuracies.append(prepare.sampled_accuracy(each, tokenizer, words))
    farthest = max(abs(one - two) for one, two in zip(found, expected, strict=True))
    print(
        f"losses differ by {farthest:.1e} at most; accuracies: {accuracies}; last losses: {found[-1]}, {expected[-1]}"
    )
    assert found == pytest.approx(expected, abs=1e-5) and len(found) == 300
