"""Probes of `data` and of chat templates: which prompts there are, and in which order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from skyrl.data.prompts import PromptDataset
from skyrl.errors import SkyRLError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.sampling import prompt_cursor, read_prompts
from skyrl.trajectory import Prompt
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
            outcome: object = (experiment.train_dataset.prompts, evaluated and evaluated.prompts)
            experiment.check_inputs()
        except SkyRLError as error:
            outcome = f"{type(error).__name__}: {error}"
    return outcome, reported.getvalue()


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


@observable("the prompts of training, and where they are written")
def written(scene: Scene) -> object:
    dataset = BasePPOExp(scene.run).train_dataset
    return tuple(dataset.prompts), sorted(file.name for file in Path().rglob("rows.bin"))


@observable("the order of prompts")
def order(scene: Scene) -> object:
    async def three(stage: SimulatedRun) -> object:
        return [[group.prompt.id for group in await stage.rollouts.next_batch(number)] for number in range(3)]

    return staged(SimulatedRun(scene), three)["end"]


@observable("the prompts that are drawn under rewards of 0, 0.5 and 1")
def drawn(scene: Scene) -> object:
    prompts = tuple(
        Prompt(
            id=str(number),
            messages=(),
            token_ids=(number,),
            env_class="gsm8k",
            extras={"difficulty": number, "level": 23 - number},
        )
        for number in range(24)
    )
    sources = len(scene.run.data.train_data)
    cursor = prompt_cursor(scene.run, PromptDataset(prompts=prompts, sizes=(24 // sources,) * sources))
    drawn_ids: list[str] = []
    for _ in range(12):
        first = cursor.drawn
        batch = cursor.take()
        drawn_ids += [prompt.id for prompt in batch]
        for number, prompt in enumerate(batch, first):
            cursor.observe(number, (prompt.token_ids[0] % 3 / 2,))
    return drawn_ids


TWO = {f"{D}train_data": ["{nano}/train.jsonl", "{nano}/validation.jsonl"]}
SIX = {f"{D}train_data": ["{nano}/validation.jsonl"], "trainer.epochs": 2}
"""Six prompts, which are a batch and a half."""

C = f"{D}curriculum."
MIXED = {**TWO, f"{C}sampler": "mixture", f"{C}mixture": [{"weights": [1.0, 1.0]}]}
STAGED = {f"{C}sampler": "schedule", f"{C}stages": [{"sampler": "permutation"}]}
TARGET = {f"{C}sampler": "target_difficulty"}

PROBES: tuple[Probe, ...] = (
    Probe(f"{D}train_data", ["{nano}/validation.jsonl"], prompts),
    Probe(f"{D}train_weights", [1.0, 3.0], order, TWO),
    Probe(f"{D}streaming", True, order, {"trainer.max_training_steps": 3}),
    Probe(f"{D}shuffle_buffer_size", 2, order, {f"{D}streaming": True, "trainer.max_training_steps": 3}),
    Probe(f"{D}tokenized_path", "tokens", written),
    Probe(f"{D}val_data", ["{nano}/train.jsonl"], prompts),
    Probe(f"{D}prompt_column", "question", questions),
    Probe(f"{D}answer_column", "answer", questions),
    Probe(f"{D}bad_rows", "skip", broken),
    Probe(f"{D}shuffle", False, order),
    Probe(f"{D}epoch_tail", "carry", order, SIX),
    Probe(f"{C}sampler", "pools", drawn),
    Probe(f"{C}sampler_kwargs", {"window": 3}, drawn, {f"{C}sampler": "tests.effects.own:Window"}),
    Probe(f"{C}mixture", [{"weights": [0.0, 1.0]}], drawn, MIXED),
    Probe(f"{C}stages", [{"sampler": "pools"}], drawn, STAGED),
    Probe(f"{C}pools", [{"name": "all"}], drawn, {f"{C}sampler": "pools"}),
    Probe(f"{C}pool_memory", 0.9, drawn, {f"{C}sampler": "pools"}),
    Probe(f"{C}unseen_weight", 0.01, drawn, {f"{C}sampler": "pools"}),
    Probe(f"{C}target.column", "level", drawn, TARGET),
    Probe(f"{C}target.initial", 10.0, drawn, TARGET),
    Probe(f"{C}target.min", 8.0, drawn, {**TARGET, f"{C}target.initial": 8.0}),
    Probe(f"{C}target.max", 5.0, drawn, TARGET),
    Probe(f"{C}target.step_size", 1.0, drawn, TARGET),
    Probe(f"{C}target.sensitivity", 0.1, drawn, TARGET),
    Probe(f"{C}target.reward", 0.2, drawn, TARGET),
    Probe(f"{C}skip_solved", 1, drawn, {"trainer.epochs": 4}),
    Probe(f"{C}solved_reward", 0.5, drawn, {f"{C}skip_solved": 1, "trainer.epochs": 4}),
    Probe(f"{TEMPLATE}.name_or_path", "qwen3_with_thinking", prompts, {"trainer.max_prompt_length": 58}),
    Probe(f"{TEMPLATE}.source", "file", prompts, QWEN),
    Probe(f"{TEMPLATE}_kwargs", {"enable_thinking": False}, prompts, QWEN),
)
