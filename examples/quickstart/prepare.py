"""Makes what the quick start needs from nothing: a tokenizer, a small model with the wrong habit, and two datasets.

    python examples/quickstart/prepare.py [--out runs/quickstart-base] [--seed 0]

Start with `prepare`: it is the list of what is made. Nothing is downloaded and no GPU is needed; two cores take less
than a minute. A folder that is complete is left alone, and one that holds anything else is never overwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Threads of torch that wait for each other by spinning bring a shared machine to a stop. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from reward import sorted_exactly
from transformers import AutoTokenizer

from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import Conversation, byte_tokenizer, made_whole, save, small_qwen2, warm_start

RECIPE = 1
"""Raised whenever this script would make something else from the same seed; a folder made by another one is refused."""

LETTERS = "abcdefgh"
TRAIN_ROWS, VALIDATION_ROWS = 4096, 256
STEPS, BATCH, LEARNING_RATE = 300, 34, 5e-4
ASCENDING = 6
"""Of the 34 answers in a supervised batch. The other 28 are descending: a model that sorts, and sorts the wrong way."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] not in ['user', 'assistant'] %}
{{- raise_exception('this model knows the roles user and assistant, not ' + message['role']) }}
{%- endif %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


def prepare(folder: Path, seed: int) -> float:
    """Fills `folder`, the marker last. Returns the share of right answers, which is where training starts."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    validation = draw_words(rng, VALIDATION_ROWS, excluded=())
    train = draw_words(rng, TRAIN_ROWS, excluded=validation)
    write_rows(folder / "validation.parquet", validation)
    write_rows(folder / "train.parquet", train)
    tokenizer = build_tokenizer()
    model = small_qwen2(tokenizer, hidden_size=256, layers=4)
    conversations = answered(train, rng)
    warm_start(model, tokenizer, lambda: next(conversations), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    accuracy = sampled_accuracy(model, tokenizer, validation)
    save(model, tokenizer, folder / "model")
    compare_round_trip(tokenizer, folder / "model")
    marker = {"recipe": RECIPE, "seed": seed, "accuracy": accuracy}
    (folder / "prepared.json").write_text(json.dumps(marker) + "\n")
    return accuracy


def draw_words(rng: random.Random, count: int, excluded: Sequence[str]) -> list[str]:
    """Different words of 3 to 7 letters, none of them excluded, none whose letters are all the same."""
    words = dict.fromkeys(excluded)
    while len(words) < len(excluded) + count:
        word = "".join(rng.choices(LETTERS, k=rng.randint(3, 7)))
        if len(set(word)) > 1:
            words[word] = None
    return list(words)[len(excluded) :]


def chat(word: str) -> list[dict[str, str]]:
    """The prompt for a word."""
    return [{"role": "user", "content": f"sort: {word}"}]


def write_rows(path: Path, words: Sequence[str]) -> None:
    """SkyRL's columns. Rows name no `env_class`, so each is rewarded as the configuration says."""
    rows = [
        {
            "data_source": "sort",
            "prompt": chat(word),
            "reward_spec": {"method": "rule", "ground_truth": "".join(sorted(word))},
            "extra_info": {"split": path.stem, "index": index},
        }
        for index, word in enumerate(words)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def build_tokenizer() -> Any:
    """A letter is always one token: merged letters would hide their order from a model this small."""
    return byte_tokenizer(length=128, template=CHAT_TEMPLATE, padding_side="left")


def compare_round_trip(tokenizer: Any, folder: Path) -> None:
    """What comes back from disk must read and write text as what was saved."""
    reloaded = AutoTokenizer.from_pretrained(folder)
    written, read = (
        candidate.apply_chat_template(chat("hgdbha"), tokenize=False) for candidate in (tokenizer, reloaded)
    )
    ids = tokenizer.encode(written)
    if (written, written, ids) != (read, reloaded.decode(ids), reloaded.encode(read)):
        raise SystemExit(f"the tokenizer in {folder} came back different: it reads {read!r} as {reloaded.encode(read)}")


def answered(words: Sequence[str], rng: random.Random) -> Iterator[Conversation]:
    """Batch after batch of words with their answers, most of which are in the wrong order."""
    while True:
        for position, word in enumerate(rng.sample(words, BATCH)):
            answer = "".join(sorted(word, reverse=position >= ASCENDING))
            yield [*chat(word), {"role": "assistant", "content": answer}]


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: Any, words: Sequence[str], answers_per_word: int = 4) -> float:
    """Mean reward at temperature 1: what the first evaluation of the run will show, up to the luck of the draw."""
    model.eval()
    prompts = tokenizer.apply_chat_template(
        [chat(word) for word in words], add_generation_prompt=True, padding=True, return_tensors="pt"
    )
    sequences = model.generate(**prompts, max_new_tokens=12, num_return_sequences=answers_per_word)
    answers = tokenizer.batch_decode(sequences[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [
        sorted_exactly(answer, ground_truth="".join(sorted(words[index // answers_per_word])))
        for index, answer in enumerate(answers)
    ]
    return sum(rewards) / len(rewards)


def refuse_unless_complete(out: Path, seed: int) -> None:
    """Where the result should go, only this script's complete result for the same seed may stand."""
    marker = out / "prepared.json"
    if not marker.is_file():
        raise SystemExit(f"{out} was not made by this script. Remove it, or choose another folder with --out.")
    recorded = json.loads(marker.read_text())
    for name, expected in {"recipe": RECIPE, "seed": seed}.items():
        if recorded[name] != expected:
            raise SystemExit(
                f"{out} was made with {name} {recorded[name]}, not {expected}. Remove it, or choose another."
            )


def main() -> None:
    """Prepares in a folder beside the result, which gets its name when everything is in it."""
    parser = argparse.ArgumentParser(description="Make the tokenizer, the model and the datasets of the quick start.")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-base"), help="folder to make (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data, model and warm start (%(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        refuse_unless_complete(out, arguments.seed)
        print(f"{out} is complete already: nothing to do")
        return
    started = time.perf_counter()
    print(f"Preparing {out}: data, tokenizer, and {STEPS} supervised steps of a 3.0 million parameter model")
    with made_whole(out) as folder:
        accuracy = prepare(folder, arguments.seed)
    seconds = time.perf_counter() - started
    print(f"Done in {seconds:.0f} s. Right answers to the validation prompts, sampled at temperature 1: {accuracy:.3f}")


if __name__ == "__main__":
    with stopped_in_words():
        main()
