"""Makes pairs of answers for the quick start's model: the letters of a word in ascending order are better than in
descending order, which is what the model answers.

    python examples/quickstart/prepare.py           the model and the words, once
    python examples/preference/prepare.py           runs/quickstart-base/pairs.jsonl and held_out_pairs.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq


def main(folder: Path) -> None:
    """Writes both files beside the words."""
    for words, pairs in (("train", "pairs"), ("validation", "held_out_pairs")):
        rows = pq.read_table(folder / f"{words}.parquet").to_pylist()
        with (folder / f"{pairs}.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                answer = row["reward_spec"]["ground_truth"]
                pair = {"prompt": row["prompt"], "chosen": answer, "rejected": answer[::-1]}
                file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes pairs of answers for the quick start's model.")
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart-base"), help="folder of the words")
    main(parser.parse_args().base)
