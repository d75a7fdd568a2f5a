"""Makes the text2sql example and trains it: SQLite databases, questions, a small model that rarely looks, a run.

    python examples/text2sql/train.py [PATH=VALUE ...]        arguments go to `skyrl run`

Nothing is downloaded and no GPU is needed.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from skyrl.envs.text2sql import result_text
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

BASE = Path("runs/text2sql-base")
CONFIG = Path(__file__).with_name("grpo.toml")
STEPS, BATCH, LEARNING_RATE = 300, 64, 2e-3
LOOKS = 0.3
"""Share of the worked conversations that look into the table first. The others guess how it spells its fruits."""

FRUITS = ["plum", "fig", "pear", "lime", "kiwi", "date", "guava", "mango"]
DATABASES, VALIDATION = 16, 4
"""How many there are, and how many of them nobody asks in training. Every other one writes fruits in capitals."""

TRAIN_ROWS, VALIDATION_ROWS = 512, 64
TAGS = [f"<{slash}{name}>" for name in ("think", "sql", "observation", "solution") for slash in ("", "/")]
WORDS = [*TAGS, "SELECT", "FROM", "WHERE", "LIMIT", "fruit", "stock"]
LOOK = "SELECT fruit FROM stock LIMIT 1"


def make(out: Path, seed: int = 0) -> None:
    """Fill the folder."""
    rng = seeded(seed)
    make_data(out, rng)
    make_model(out / "model", rng)


def make_data(out: Path, rng: random.Random) -> None:
    """Databases and questions."""
    (out / "databases").mkdir()
    for number in range(DATABASES):
        make_database(out / "databases" / f"{name_of(number)}.sqlite", capitals=number % 2 == 1, rng=rng)
    write_rows(out / "validation.jsonl", rows(range(VALIDATION), VALIDATION_ROWS))
    write_rows(out / "train.jsonl", rows(range(VALIDATION, DATABASES), TRAIN_ROWS))


def make_model(folder: Path, rng: random.Random) -> None:
    """One that knows how to look, and mostly guesses."""
    tokenizer = byte_tokenizer(length=192, words=WORDS)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: conversation(rng), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    save(model, tokenizer, folder)


def name_of(number: int) -> str:
    """As rows name the database."""
    return f"shop{number:02}"


def spelled(fruit: str, *, capitals: bool) -> str:
    """As a table has it."""
    return fruit.upper() if capitals else fruit


def make_database(path: Path, *, capitals: bool, rng: random.Random) -> None:
    """One table: fruits in any order, and how many there are of each."""
    counts = rng.sample(range(1, 100), len(FRUITS))
    stock = [(spelled(fruit, capitals=capitals), count) for fruit, count in zip(FRUITS, counts, strict=True)]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE stock (fruit TEXT, n INTEGER)")
        database.executemany("INSERT INTO stock VALUES (?, ?)", rng.sample(stock, len(stock)))


def question(fruit: str) -> dict[str, str]:
    """The prompt. It does not say how the table spells the fruit."""
    return {"role": "user", "content": f"stock(fruit, n): how many {fruit}?"}


def query(fruit: str, *, capitals: bool) -> str:
    """What answers the question."""
    return f"SELECT n FROM stock WHERE fruit='{spelled(fruit, capitals=capitals)}'"


def conversation(rng: random.Random) -> Conversation:
    """A solution that is right because it looked, or as often right as a coin."""
    fruit, other, capitals = rng.choice(FRUITS), rng.choice(FRUITS), rng.random() < 0.5
    solution = f"<think>so</think><solution>{query(fruit, capitals=capitals)}</solution>"
    if rng.random() >= LOOKS:
        return [question(fruit), {"role": "assistant", "content": solution}]
    seen = result_text({"columns": ["fruit"], "rows": [[spelled(other, capitals=capitals)]], "cut": False})
    return [
        question(fruit),
        {"role": "assistant", "content": f"<think>look</think><sql>{LOOK}</sql>"},
        {"role": "user", "content": f"\n\n<observation>{seen}\n(1 turns left)</observation>\n\n"},
        {"role": "assistant", "content": solution},
    ]


def rows(databases: Sequence[int], count: int) -> list[dict[str, object]]:
    """Every fruit of every database, which go round."""
    pairs = [(number, fruit) for fruit in FRUITS for number in databases]
    return [
        {
            "data_source": "stock",
            "prompt": [question(fruit)],
            "db_id": name_of(number),
            "reward_spec": {"method": "rule", "ground_truth": query(fruit, capitals=number % 2 == 1)},
        }
        for number, fruit in (pairs[index % len(pairs)] for index in range(count))
    ]


def main() -> None:
    """Make what is missing, and train."""
    make_once(BASE, make)
    train(CONFIG)


if __name__ == "__main__":
    main()
