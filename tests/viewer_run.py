"""A run folder as `skyrl run` leaves one, written by the run's own writer: for tests of what shows it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from skyrl.runs.run_folder import RunFolder
from skyrl.tracking.recording import Computed
from skyrl.trajectory import Failure, Prompt, Trajectory, TrajectoryGroup, TurnReward

SPECIAL = {"▶": "<|im_start|>", "■": "<|im_end|>"}
"""Texts of special tokens, by the character that stands for each."""

TURNS = "8■{\n▶user\nhigher■\n▶assistant\n}9■"
"""An answer of two turns in ChatML, with what the environment said between them."""

HOSTILE = """<script>document.title = "taken"</script><img src=x onerror="document.title='taken'">"</pre></span>'"""
"""A text that runs in every page that does not escape it."""


def group(
    step: int, number: int, texts: Sequence[str], *, source: str = "letters", prompt: str = "sort this"
) -> TrajectoryGroup:
    """A group whose n-th sample answers with the n-th text, a token for each character, and has the reward n."""
    name = f"0:{number}"
    return TrajectoryGroup(
        prompt=Prompt(
            id=name,
            messages=({"role": "system", "content": "Answer."}, {"role": "user", "content": prompt}),
            token_ids=(1, 2),
            env_class="e",
            data_source=source,
            extras={"reward_spec": {"ground_truth": f"{prompt} in order"}, "level": prompt},
        ),
        trajectories=tuple(_trajectory(name, step, sample, text) for sample, text in enumerate(texts)),
    )


def _trajectory(prompt: str, step: int, sample: int, text: str) -> Trajectory:
    """Characters between braces, and each `~`, were not sampled."""
    braces = list(accumulate({"{": 1, "}": -1}.get(character, 0) for character in text))
    marked = [(c, depth) for c, depth in zip(text, braces, strict=True) if c not in "{}"]
    ids = tuple(ord(character) for character, _ in marked)
    loss_mask = tuple(0 if character == "~" or depth else 1 for character, depth in marked)
    return Trajectory(
        prompt_id=prompt,
        sample_index=sample,
        prompt_ids=(1, 2),
        response_ids=ids,
        loss_mask=loss_mask,
        rollout_logprobs=tuple(-0.25 * mask for mask in loss_mask),
        weight_versions=(step - 1,) * len(ids),
        rewards=(TurnReward(token=len(ids) - 1, reward=float(sample)),),
        stop_reason="length" if sample else "stop",
        components={"correct": float(sample), "format": 0.5},
        failures=(Failure(kind="raised", reason="the judge was away"),) if text == "failure" else (),
    )


def decode(ids: Sequence[int]) -> str:
    return "".join(SPECIAL.get(chr(token), chr(token)) for token in ids)


def write(folder: Path, steps: Sequence[Sequence[TrajectoryGroup]], *, most: int = -1, first: int = 1) -> RunFolder:
    """Steps of a run, from the `first`. The learner gives each token -0.5, the engine -0.25; advantages are 1."""
    run = RunFolder(folder)
    sink = run.samples.sink(decode, most)
    for step, groups in enumerate(steps, first):
        sink.keep(step, groups)
        rows = [row for group in groups for row in group.trajectories]
        shape = len(rows), max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        tensors = {"old_logprobs": torch.full(shape, -0.5), "advantages": torch.ones(shape)}
        sink.write_computed(Computed(step=step, tensors=tensors, updates=(), weights={}))
    run.samples.close()
    return run
