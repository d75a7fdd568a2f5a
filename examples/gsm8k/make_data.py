"""Makes the prompts of GSM8K: each question with the form that the environment `gsm8k` reads, and the right number.

    python examples/gsm8k/make_data.py [--train SOURCE] [--test SOURCE] [--out FOLDER]

A source is a name on Hugging Face's hub (`pip install -e '.[data]'`), or a file of the same form: rows with the texts
`question` and `answer`, of which the number stands behind `####`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from skyrl.data.sources import BadRow, Columns, read_rows
from skyrl.errors import SkyRLError

HUB = "openai/gsm8k:main"
INSTRUCTION = 'Let\'s think step by step, and write the final answer behind "####".'


def rows(source: str) -> Iterator[dict[str, object]]:
    """The rows of a source as prompts. Raises SystemExit for one without a question and a number."""
    try:
        found = read_rows(source, Columns(prompt="question"))
    except SkyRLError as error:
        raise SystemExit(str(error)) from None
    for number, row in enumerate(found, start=1):
        if isinstance(row, BadRow) or not {"question", "answer"} <= set(row) or "####" not in str(row["answer"]):
            raise SystemExit(f"{source}, row {number}: no question, or no number behind #### in its answer")
        yield {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
            "reward_spec": {"ground_truth": str(row["answer"]).rpartition("####")[2].strip().replace(",", "")},
        }


def main() -> None:
    """Write train.jsonl and test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=f"{HUB}:train")
    parser.add_argument("--test", default=f"{HUB}:test")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, source in (("train", given.train), ("test", given.test)):
        found = list(rows(source))
        (given.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        print(f"{given.out / name}.jsonl: {len(found)} prompts")


if __name__ == "__main__":
    main()
