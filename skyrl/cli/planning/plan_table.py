"""Formats a plan, which `skyrl.tools.run_plan` computes, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from skyrl.planning.layout import counted
from skyrl.tools.run_plan import Plan, placement_text


def table(plan: Plan) -> str:
    """The plan as text: one line of totals, the GPUs of each process, then the work of each in one training step."""
    slot = "gpus" if plan["gpus"] else "slots"
    placements = _columns([["process", "ranks", "where"], *_seats(plan, slot)])
    work = [["model", "ranks", "data parallel", "work of each rank in a training step"], *map(_work, plan["models"])]
    seats = [] if plan["executor"] == "in_process" else [*placements, ""]
    return "\n".join([*_heading(plan), "", *seats, *_columns(work), *_engines(plan)])


def _heading(plan: Plan) -> list[str]:
    """The resources of the whole run, in words."""
    if plan["executor"] == "in_process":
        return ["Everything runs in the command's own process."]
    note = "trainer.device is cpu: slots are counted instead of GPUs, each a place for one process."
    return [f"{placement_text(plan)}, {counted(plan['actors'], 'actor')} on Ray.", *([] if plan["gpus"] else [note])]


def _seats(plan: Plan, slot: str) -> list[list[str]]:
    """(role, ranks, where) for each range of consecutive ranks that are placed alike."""
    rows = []
    for role, of_role in groupby(plan["seats"], key=lambda placed: str(placed["role"])):
        by_nodes = groupby(of_role, key=lambda placed: tuple(dict.fromkeys(node for node, _ in placed["places"])))
        stretches: list[tuple[list[int], list[int], str]] = []
        for nodes, group in by_nodes:
            members = list(group)
            ranks, where = [placed["rank"] for placed in members], _gpus_per_node(members, nodes)
            if stretches and stretches[-1][2] == where and stretches[-1][1][-1] + 1 == nodes[0] and len(nodes) == 1:
                stretches[-1][0].extend(ranks)
                stretches[-1][1].extend(nodes)
            else:
                stretches.append((ranks, list(nodes), where))
        rows += [
            [role, _ranges(ranks), f"{'node' if len(nodes) == 1 else 'nodes'} {_ranges(nodes)} {slot} {where}"]
            for ranks, nodes, where in stretches
        ]
    return rows


def _gpus_per_node(placements: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> str:
    """GPUs on each of the nodes: joined for ranks with one GPU, separate for larger ones."""
    if len(nodes) == 1:
        gpu_lists = [[gpu for _, gpu in placed["places"]] for placed in placements]
        return (
            _ranges([gpu for gpus in gpu_lists for gpu in gpus])
            if len(gpu_lists[0]) == 1
            else " | ".join(map(_ranges, gpu_lists))
        )
    [placed, *_] = placements
    parts = [_ranges([gpu for gpu_node, gpu in placed["places"] if gpu_node == node]) for node in nodes]
    return parts[0] if len(set(parts)) == 1 else " + ".join(parts)


def _work(model: Mapping[str, Any]) -> list[str]:
    tasks = []
    if model["optimizer_steps"]:
        passes = _passes(model, "micro_batches", "micro_batch_size", "micro-batch", "micro-batches")
        tasks.append(
            f"{counted(model['optimizer_steps'], 'optimizer step')} of "
            f"{counted(model['rows_per_mini_batch'], 'sample')}, each in {passes}"
        )
    if model["rows_scored"]:
        passes = _passes(model, "scoring_micro_batches", "scoring_micro_batch_size", "pass", "passes")
        tasks.append(f"scores {counted(model['rows_scored'], 'sample')} in {passes}")
    return [str(model["role"]), str(model["ranks"]), _replicas(model), "; ".join(tasks)]


def _replicas(model: Mapping[str, Any]) -> str:
    """Number of replicas, and the ranks of each: `4`, or `4 x sequence 2` if pairs of ranks share sequences. In
    `4 (expert 2)`, pairs of ranks hold different experts.
    """
    sizes = {name: model[f"{name}_parallel"] for name in ("pipeline", "context", "sequence", "tensor")}
    replicas = " x ".join(
        [str(model["data_parallel"]), *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
    )
    experts = model["expert_parallel"]
    return f"{replicas} (expert {experts})" if experts > 1 else replicas


def _passes(model: Mapping[str, Any], count: str, size: str, noun: str, plural: str) -> str:
    """The number of passes and the samples of each; the token limit if passes are bounded by tokens."""
    tokens = model["tokens_per_micro_batch"]
    if tokens:
        return f"{plural} of at most {counted(tokens, 'token')}"
    return f"{counted(model[count], noun, plural)} of {model[size]}"


def _engines(plan: Plan) -> list[str]:
    engines = plan["engines"]
    if engines is None:
        return ["", "The engines are already running elsewhere."]
    sizes = " x ".join(f"{name} {engines[name]}" for name in ("tensor", "pipeline", "data"))
    batch = plan["batch"]
    return [
        "",
        f"{counted(engines['number'], 'engine')} of {engines['gpus']} ({sizes}); "
        f"{batch['prompts']} prompts x {batch['samples_per_prompt']} = {batch['samples']} samples per training step.",
    ]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as text, with consecutive ones as a range: `0-3, 6`."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and stretches[-1][-1] + 1 == number:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in stretches)
