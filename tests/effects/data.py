"""Probes of `data` and of chat templates: which prompts there are, and in which order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from skyrl.errors import SkyRLError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.sampling import read_prompts
from tests.effects.probe import Probe, Scene, observable
from tests.effects.stage import SimulatedRun, staged

D, TEMPLATE = "data.", "generator.chat_template"
QWEN: Mapping[str, Any] = {f"{TEMPLATE}.name_or_path": "qwen3_with_thinking", "trainer.max_prompt_length": 58}
"""A built-in template, whose prompts are longer."""

QUESTION = {
    "prompt": [{"role": "user", "content": "2"}],
    "question": "2 and 2?",
    "answer": "They are #### 4",
    "ground_truth": "5",
}


@observable("the prompts of training and evaluation, and what is reported about them")
def prompts(scene: Scene) -> object:
    reported = StringIO()
    with redirect_stderr(reported):
        try:
            experiment = BasePPOExp(scene.run)
            evaluated = experiment.eval_dataset
            found: object = (experiment.train_dataset.prompts, evaluated and evaluated.prompts)
            experiment.check_inputs()
        except SkyRLError as error:
            found = f"{type(error).__name__}: {error}"
    return found, reported.getvalue()


def _read(scene: Scene, rows: Sequence[str]) -> object:
    file = Path("rows.jsonl")
    file.write_text("\n".join(rows), encoding="utf-8")
    try:
        return read_prompts(scene.run, [str(file)], BasePPOExp(scene.run).tokenizer)
    except SkyRLError as error:
        return f"{type(error).__name__}: {error}"


@observable("the prompts that are read from rows with a question and an answer")
def questions(scene: Scene) -> object:
    return _read(scene, [json.dumps(QUESTION)])


@observable("the prompts that are read from rows of which one is broken")
def broken(scene: Scene) -> object:
    return _read(scene, [json.dumps(QUESTION), "{"])


@observable("the order of prompts")
def order(scene: Scene) -> object:
    async def three(stage: SimulatedRun) -> object:
        return [[group.prompt.id for group in await stage.rollouts.next_batch(number)] for number in range(3)]

    return staged(SimulatedRun(scene), three)["end"]


TWO = {f"{D}train_data": ["{nano}/train.jsonl", "{nano}/validation.jsonl"]}
SIX = {f"{D}train_data": ["{nano}/validation.jsonl"], "trainer.epochs": 2}
"""Six prompts, which are a batch and a half."""

PROBES: tuple[Probe, ...] = (
    Probe(f"{D}train_data", ["{nano}/validation.jsonl"], prompts),
    Probe(f"{D}train_weights", [1.0, 3.0], order, TWO),
    Probe(f"{D}val_data", ["{nano}/train.jsonl"], prompts),
    Probe(f"{D}prompt_column", "question", questions),
    Probe(f"{D}answer_column", "answer", questions),
    Probe(f"{D}bad_rows", "skip", broken),
    Probe(f"{D}shuffle", False, order),
    Probe(f"{D}epoch_tail", "carry", order, SIX),
    Probe(f"{TEMPLATE}.name_or_path", "qwen3_with_thinking", prompts, {"trainer.max_prompt_length": 58}),
    Probe(f"{TEMPLATE}.source", "file", prompts, QWEN),
    Probe(f"{TEMPLATE}_kwargs", {"enable_thinking": False}, prompts, QWEN),
)
