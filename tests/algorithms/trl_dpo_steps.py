"""Trains three steps of DPO by TRL 1.16, and stores its log and the weights.

    python -m tests.algorithms.trl_dpo_steps MODEL ROWS OUT '{"beta": 0.5}'

The interpreter needs `trl==1.16.*`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.trl_settings import PLAIN

BATCH = 8


class InOrder(DPOTrainer):  # type: ignore[misc]  # of a package that is not installed beside the others
    """Takes rows as they stand in the file."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def main(model: str, rows: str, out: str, changes: str) -> None:
    """Write `log.json` and `weights.pt` into `out`."""
    lines = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    chats = [{key: [{"role": role, "content": line[key]}] for key, role in roles.items()} for line in lines]
    settings = DPOConfig(
        output_dir=out,
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        **PLAIN,
        **json.loads(changes),
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        args=settings,
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    Path(out, "log.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")
    torch.save(trainer.model.state_dict(), Path(out, "weights.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
