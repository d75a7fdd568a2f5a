"""Makes the search example and trains it: a corpus, questions, a small model that searches badly, a retriever, a run.

    python examples/search/train.py [PATH=VALUE ...]        arguments go to `skyrl run`

Nothing is downloaded and no GPU is needed. The retriever is `skyrl serve-retriever`, on this machine, for as long as
the run takes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skyrl.envs.search import documents
from skyrl.starter.tiny_chat import (
    Conversation,
    byte_tokenizer,
    make_once,
    save,
    seeded,
    small_qwen2,
    train,
    warm_start,
    write_rows,
)

BASE = Path("runs/search-base")
CONFIG = Path(__file__).with_name("grpo.toml")
STEPS, BATCH, LEARNING_RATE = 300, 64, 2e-3
SEARCHES_WELL = 0.3
"""Share of the worked conversations whose query names what is wanted. The others find nothing of use, and guess."""

NAMES = [
    first + last for first in ("mi", "to", "ka", "le", "su", "ne", "ri", "do") for last in ("ra", "no", "li", "ze")
]
CITIES = ["oslo", "rome", "lima", "cairo", "delhi", "kyiv", "quito", "dakar"]
LIKES = ["figs", "jazz", "chess", "rain"]
VALIDATION = 8
"""Of the 32 people. Nobody asks for them in training."""

TRAIN_ROWS, VALIDATION_ROWS = 1024, 128
TAGS = [f"<{slash}{name}>" for name in ("search", "information", "answer") for slash in ("", "/")]


def make(out: Path, seed: int = 0) -> None:
    """Fill the folder."""
    rng = seeded(seed)
    make_data(out, rng)
    make_model(out / "model", rng)


def make_data(out: Path, rng: random.Random) -> None:
    """Corpus and questions."""
    homes = {name: rng.choice(CITIES) for name in NAMES}
    texts = [f"{name} lives in {city}" for name, city in homes.items()]
    texts += [f"{name} likes {rng.choice(LIKES)}" for name in NAMES]
    write_rows(out / "corpus.jsonl", [{"id": str(number), "contents": text} for number, text in enumerate(texts)])
    names = rng.sample(NAMES, len(NAMES))
    write_rows(out / "validation.jsonl", rows(names[:VALIDATION], homes, VALIDATION_ROWS))
    write_rows(out / "train.jsonl", rows(names[VALIDATION:], homes, TRAIN_ROWS))


def make_model(folder: Path, rng: random.Random) -> None:
    """One that knows how to search, and mostly does it badly."""
    tokenizer = byte_tokenizer(length=128, words=TAGS)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: conversation(rng), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    save(model, tokenizer, folder)


def question(name: str) -> dict[str, str]:
    """The prompt."""
    return {"role": "user", "content": f"where is {name}?"}


def conversation(rng: random.Random) -> Conversation:
    """A search and an answer, about facts that are made up each time: what the corpus says is not to be known."""
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    well = rng.random() < SEARCHES_WELL
    fact = f"{name} lives in {city}" if well else f"{name} likes {rng.choice(LIKES)}"
    information = documents({"result": [[{"document": {"contents": fact}}]]})
    return [
        question(name),
        {"role": "assistant", "content": f"<search>{name} lives</search>" if well else f"<search>{name}</search>"},
        {"role": "user", "content": f"\n<information>{information}</information>\n"},
        {"role": "assistant", "content": f"<answer>{city if well else rng.choice(CITIES)}</answer>"},
    ]


def rows(names: Sequence[str], homes: dict[str, str], count: int) -> list[dict[str, object]]:
    """Questions about these people, who go round."""
    return [
        {
            "data_source": "homes",
            "prompt": [question(names[number % len(names)])],
            "reward_spec": {"method": "rule", "ground_truth": {"target": homes[names[number % len(names)]]}},
        }
        for number in range(count)
    ]


@contextmanager
def retriever(corpus: Path) -> Iterator[str]:
    """Its address, while it runs, on a port that is free."""
    command = [sys.executable, "-m", "skyrl.cli", "serve-retriever", str(corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            words = process.stdout.readline().split()
            if not words:
                raise SystemExit("the retriever did not start")
            yield words[-1]
        finally:
            process.terminate()


def main() -> None:
    """Make what is missing, and train."""
    make_once(BASE, make)
    with retriever(BASE / "corpus.jsonl") as url:
        train(CONFIG, f"environment.skyrl_gym.search.search_url={url}")


if __name__ == "__main__":
    main()
