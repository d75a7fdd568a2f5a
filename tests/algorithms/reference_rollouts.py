"""Functions of the reference cases that work on samples instead of tensors: rewards, filters, batches, metrics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config.settings.environment import Text2SQLEnvConfig
from skyrl.envs import search, text2sql
from skyrl.envs.builtin import aime, gsm8k
from skyrl.envs.registry import find_env
from skyrl.planning.staleness import room_for_groups
from skyrl.rollout.filters import drop_truncated, has_reward_variance
from skyrl.rollout.measures import measure
from skyrl.training.collate import collate
from skyrl.training.describe import mean_positive
from skyrl.trajectory import Prompt, StopReason, Trajectory, TrajectoryGroup, TurnReward

Case = dict[str, Any]
Result = dict[str, Any]


def answer(mask: list[int], rewards: list[float], stop_reason: StopReason = "stop", **more: Any) -> Trajectory:
    """An answer with these rewards, each given for the token at its place."""
    values: dict[str, Any] = {
        "prompt_id": "p",
        "sample_index": 0,
        "prompt_ids": (1,),
        "response_ids": (2,) * len(mask),
        "loss_mask": tuple(mask),
        "rollout_logprobs": (0.0,) * len(mask),
        "weight_versions": (0,) * len(mask),
        "rewards": tuple(TurnReward(token=token, reward=reward) for token, reward in enumerate(rewards)),
        "stop_reason": stop_reason,
    }
    return Trajectory(**values | more)


def group(*rows: Trajectory) -> TrajectoryGroup:
    prompt = Prompt(id="p", messages=(), token_ids=(1,), env_class="")
    return TrajectoryGroup(prompt=prompt, trajectories=rows)


def zero_variance(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    rewards = [sum(reward) if isinstance(reward, list) else reward for reward in inputs["rewards"]]
    masks = inputs["loss_masks"] or [[1]] * len(rewards)
    members = {uid: [row for row, other in enumerate(inputs["uids"]) if other == uid] for uid in inputs["uids"]}
    kept = [
        row
        for rows in members.values()
        if has_reward_variance(group(*(answer(masks[row], [rewards[row]]) for row in rows)), tolerance=inputs["tol"])
        for row in rows
        if any(masks[row])
    ]
    return {"kept_indices": sorted(kept)}


def overlong(case: Case, _: Any) -> Result:
    pairs = zip(case["inputs"]["loss_masks"], case["inputs"]["stop_reasons"], strict=True)
    return {"loss_masks": [list(drop_truncated(answer(mask, [], reason)).loss_mask) for mask, reason in pairs]}


def batch_tensors(case: Case, _: Any) -> Result:
    """Ours are padded on the right and as wide as the whole; the reference pads whole rows on the left, and keeps as
    many columns of an answer as the longest has, at the right.
    """
    columns = ("prompts", "responses", "rewards", "loss_masks", "logprobs")
    rows = [
        answer(mask, rewards, prompt_ids=tuple(prompt), response_ids=tuple(response), rollout_logprobs=tuple(logprobs))
        for prompt, response, rewards, mask, logprobs in zip(*(case["inputs"][name] for name in columns), strict=True)
    ]
    batch = collate([group(*rows)])
    width = batch.input_ids.shape[1]
    answers: Any = batch.answer_lengths
    positions = torch.arange(width)
    inside = positions < batch.lengths.unsqueeze(1)

    def to_the_right(values: Tensor) -> Tensor:
        pairs = zip(values, batch.lengths.tolist(), strict=True)
        return torch.stack([row.roll(width - length) for row, length in pairs])

    def of_answers(values: Tensor) -> Tensor:
        return to_the_right(values)[:, -int(answers.max()) :]

    assert batch.rollout_logprobs is not None
    return {
        "sequences": torch.where(to_the_right(inside), to_the_right(batch.input_ids), case["inputs"]["pad_token_id"]),
        "attention_mask": to_the_right(inside),
        "response_mask": of_answers(inside & (positions >= (batch.lengths - answers).unsqueeze(1))),
        "rewards": of_answers(batch.rewards),
        "loss_masks": of_answers(batch.loss_mask),
        "rollout_logprobs": of_answers(batch.rollout_logprobs),
    }


def mini_batches(case: Case, _: Any) -> Result:
    """Of `n` answers to each prompt, the last has the rows that are too many: its steps."""
    inputs = case["inputs"]
    rows = [len(list(same)) for _, same in groupby(inputs["uids"])]
    last = [step < inputs["n"] - 1 or step == count - 1 for count in rows for step in range(count)]
    prompts = torch.tensor([number for number, count in enumerate(rows) for _ in range(count)])
    shape = (len(prompts), 1)
    batch = TrainingBatch(
        input_ids=torch.arange(len(prompts)).unsqueeze(1),
        lengths=torch.ones(len(prompts), dtype=torch.long),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        rollout_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        groups=prompts,
    )
    if inputs["stepwise"]:
        batch = attrs.evolve(batch, last_step=torch.tensor(last))
    parts = list(batch.split_by_answers(inputs["mini_batch_size"] * inputs["n"]))
    ids = [part.input_ids.flatten().tolist() for part in parts]
    prompt_boundaries: list[list[int]] = []
    for part in parts:
        for _, same in groupby(part.input_ids.flatten().tolist(), key=lambda row: int(prompts[row])):
            indices = list(same)
            prompt_boundaries.append([indices[0], indices[-1] + 1])
    return {"boundaries": [[indices[0], indices[-1] + 1] for indices in ids], "prompt_boundaries": prompt_boundaries}


def rollout_metrics(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    rewards = [reward if isinstance(reward, list) else [reward] for reward in inputs["rewards"]]
    clocks = zip(inputs["completion_times"], inputs["splits"]["llm"], inputs["splits"]["env"], strict=True)
    timings = [{"completion": completion, "llm": llm, "env": env} for completion, llm, env in clocks]
    rows = zip(inputs["responses_len"], inputs["loss_masks"], rewards, timings, strict=True)
    metrics = measure(
        [group(answer(mask, reward, response_ids=(5,) * length, timings=times)) for length, mask, reward, times in rows]
    )
    return {name: metrics[name] for name in case["expected"]}  # each is there


def metrics_of_rewards(case: Case, _: Any) -> Result:
    rewards, uids = case["inputs"]["rewards"], case["inputs"]["uids"]
    totals = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
    solved = {uid: any(total > 0 for total, other in zip(totals, uids, strict=True) if other == uid) for uid in uids}
    return {
        "avg_score": sum(totals) / len(totals),
        "pass_at_n": sum(solved.values()) / len(solved),
        "mean_positive_reward": mean_positive(
            [
                answer([1] * len(reward), reward) if isinstance(reward, list) else answer([1], [reward])
                for reward in rewards
            ]
        ),
    }


def staleness(case: Case, _: Any) -> Result:
    """The reference counts steps from 1; below 0 it says 0."""
    room = [
        room_for_groups(
            concurrency=row["max_groups"],
            running=row["running"],
            accepted=row["accepted"],
            version=row["step"] - 1,
            staleness=row["S"],
            batch=row["B"],
        )
        for row in case["inputs"]["rows"]
    ]
    return {"capacity": [max(0, slots) for slots in room]}


def said(case: Case) -> str:
    inputs = case["inputs"]
    return str(inputs.get("action", inputs.get("response")))


def of_gsm8k(case: Case, _: Any) -> Result:
    action = said(case)
    return {"reward": gsm8k.score(action, case["inputs"]["ground_truth"]), "extracted": gsm8k.extracted(action)}


def of_aime(case: Case, _: Any) -> Result:
    env = find_env("aime")({"reward_model": {"ground_truth": case["inputs"]["ground_truth"]}})
    reward = env.step(said(case)).reward
    return {"reward": reward, "score": reward, "acc": reward > 0, "pred": aime.prediction(said(case))}


def of_search(case: Case, _: Any) -> Result:
    right = search.targets(case["inputs"]["ground_truth"])
    return {"reward": search.score(case["inputs"]["chat_concat"], right)}


def of_text2sql(case: Case, _: Any) -> Result:
    output = case["inputs"]["output"]
    solution = text2sql.solution(output)
    return {
        "valid": solution is not None,
        "solution": solution,
        "reward_if_invalid": reward_of_sql_without_form(output),
    }


class _NoSandbox:
    """Opens every database and runs nothing: an answer without the form is paid before a query runs."""

    tier = "none"

    def may_open(self, _: Path) -> bool:
        return True


def reward_of_sql_without_form(output: str) -> float:
    """What the environment pays in the last turn for the output without its thoughts."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "shop.sqlite").touch()
        sandbox: Any = _NoSandbox()
        extras = {"reward_spec": {"ground_truth": "SELECT 1"}, "db_id": "shop", "max_turns": 1}
        env = text2sql.Text2SQLEnv(extras, Text2SQLEnvConfig(db_path=folder), sandbox)
        return env.step(output.replace("<think>", "")).reward


OF_SAMPLES: dict[str, Callable[[Case, dict[str, Any]], Result]] = {
    "zero_variance_filter": zero_variance,
    "overlong_filtering": overlong,
    "batch_tensors": batch_tensors,
    "mini_batch_boundaries": mini_batches,
    "rollout_metrics": rollout_metrics,
    "metrics_from_generator_output": metrics_of_rewards,
    "async_staleness_capacity": staleness,
    "env_reward:gsm8k": of_gsm8k,
    "env_reward:gsm8k(strict)": of_gsm8k,
    "env_reward:aime": of_aime,
    "env_reward:search(em)": of_search,
    "env_format:text2sql": of_text2sql,
}
