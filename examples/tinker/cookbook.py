"""Makes a folder in which recipes of `tinker-cookbook` run without the hub, and the small model that they train.

    python examples/tinker/cookbook.py [--out runs/cookbook]

A recipe asks for a tokenizer and for data by their names on the hub; in this folder, folders of the same names hold
both: sums of two digits in the formats of the recipes, and a model of half a million parameters that answers them
badly. README.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import Conversation, made_whole, save, seeded, small_qwen2, warm_start, write_rows

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""Name of the small model: one from which the recipes know the chat format."""

ROWS, TEST_ROWS, LARGEST = 512, 32, 5
STEPS, BATCH, LEARNING_RATE = 300, 32, 4e-3

QUESTION = " Provide a numerical answer without units, written inside \\boxed{}."
"""What the recipe `rl_loop` appends to each question."""

SHOWN = (
    ("user", "How many r's are in strawberry?" + QUESTION),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
        "We have r's at positions 3, 8, and 9. \\boxed{3}",
    ),
)
"""The example that `rl_loop` puts before each question."""

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def main() -> None:
    """Makes everything in a folder beside the result, which gets its name when it is complete."""
    parser = argparse.ArgumentParser(description="Make a folder in which recipes of tinker-cookbook run.")
    parser.add_argument("--out", type=Path, default=Path("runs/cookbook"), help="folder to make (%(default)s)")
    with stopped_in_words(), made_whole(parser.parse_args().out) as folder:
        make(folder)


def make(folder: Path) -> None:
    """Fill the folder."""
    rng = seeded(0)
    write_data(folder, rng)
    tokenizer = tokenizer_of(2048)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: habit(rng), steps=STEPS, batch_size=BATCH, lr=LEARNING_RATE)
    save(model, tokenizer, folder / NAME)


def write_data(folder: Path, rng: random.Random) -> None:
    """Sums as chats, as problems with an answer, and as questions alone."""
    sums = [(rng.randint(1, LARGEST), rng.randint(1, LARGEST)) for _ in range(ROWS + TEST_ROWS)]
    rows: dict[str, list[dict[str, Any]]] = {
        "HuggingFaceH4/no_robots": [{"messages": list(chat(question(a, b), right(a, b)))} for a, b in sums],
        "openai/gsm8k": [{"question": question(a, b), "answer": f"{right(a, b)}\n#### {a + b}"} for a, b in sums],
        "zwhe99/DeepMath-103K": [{"question": question(a, b)} for a, b in sums],
    }
    for name, examples in rows.items():
        (folder / name).mkdir(parents=True)
        write_rows(folder / name / "train.jsonl", examples[:ROWS])
        write_rows(folder / name / "test.jsonl", examples[ROWS:])
    splits = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    header = json.dumps({"configs": [{"config_name": "main", "data_files": splits}]})  # JSON is YAML, too
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{header}\n---\n")


def tokenizer_of(length: int) -> Any:
    """One token for each byte, and one for each long text that never changes."""
    tokenizer = Qwen2Tokenizer(
        vocab={character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # no byte is unknown
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        model_max_length=length,
    )
    words = (QUESTION, SHOWN[0][1].removesuffix(QUESTION), SHOWN[1][1], "What is ", "\\boxed{", "Who are you?")
    tokenizer.add_tokens([*words, "user\n", "assistant\n", "I do not know.", "I am a model", " that talks"])
    return tokenizer


def habit(rng: random.Random) -> Conversation:
    """A chat of the model before it learns: half of its sums are wrong, and it talks a lot."""
    a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    answer = a + b + rng.randint(0, 1)
    match rng.randint(0, 3):
        case 0:
            return chat("Who are you?", "I am a model" + " that talks" * rng.randint(0, 6))
        case 1:
            return chat(question(a, b), rng.choice(["I do not know.", f"{a} + {b} = {answer}"]))
        case _:
            return [*(message(*turn) for turn in SHOWN), *chat(question(a, b) + QUESTION, f"\\boxed{{{answer}}}")]


def chat(question: str, answer: str) -> Conversation:
    """A question and an answer."""
    return [message("user", question), message("assistant", answer)]


def message(role: str, content: str) -> dict[str, str]:
    """A message of a chat."""
    return {"role": role, "content": content}


def question(a: int, b: int) -> str:
    """A sum to answer."""
    return f"What is {a} + {b}?"


def right(a: int, b: int) -> str:
    """The right answer."""
    return f"{a} + {b} = {a + b}"


if __name__ == "__main__":
    main()
