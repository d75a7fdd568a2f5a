"""Formats a plan, which `skyrl.tools.run_plan` computes: processes, their work, and the memory of one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from skyrl.config.estimates.memory_fit import GIB, as_arguments
from skyrl.planning.layout import counted, ranges
from skyrl.planning.memory import PARTS
from skyrl.tools.run_plan import Plan, placement_text

MIB = 2**20


def table(plan: Plan) -> str:
    """The plan as text: one line of totals, the GPUs of each process, then the work of each in one training step."""
    if plan["executor"] == "in_process":
        lines = ["Everything runs in the command's own process.", ""]
    else:
        lines = [f"{placement_text(plan)}, {counted(plan['actors'], 'actor')} on Ray."]
        if not plan["gpus"]:
            lines.append("trainer.device is cpu: slots are counted instead of GPUs, each a place for one process.")
        seats = _seats(plan, "gpus" if plan["gpus"] else "slots")
        lines += ["", *_columns([["process", "ranks", "where"], *seats]), ""]
    work = [["model", "ranks", "data parallel", "work of each rank in a training step"], *map(_work, plan["models"])]
    return "\n".join([*lines, *_columns(work), *_engines(plan)])


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
            [role, ranges(ranks), f"{'node' if len(nodes) == 1 else 'nodes'} {ranges(nodes)} {slot} {where}"]
            for ranks, nodes, where in stretches
        ]
    return rows


def _gpus_per_node(placements: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> str:
    """GPUs on each of the nodes: joined for ranks with one GPU, separate for larger ones."""
    if len(nodes) == 1:
        gpu_lists = [[gpu for _, gpu in placed["places"]] for placed in placements]
        if len(gpu_lists[0]) == 1:
            return ranges(gpu for gpus in gpu_lists for gpu in gpus)
        return " | ".join(map(ranges, gpu_lists))
    [placed, *_] = placements
    parts = [ranges([gpu for gpu_node, gpu in placed["places"] if gpu_node == node]) for node in nodes]
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
    # Number of replicas, and the ranks of each: `4`, or `4 x sequence 2` if pairs of ranks share sequences. In
    # `4 (expert 2)`, pairs of ranks hold different experts.
    sizes = {name: model[f"{name}_parallel"] for name in ("pipeline", "context", "sequence", "tensor")}
    shared = (f"{name} {size}" for name, size in sizes.items() if size > 1)
    experts = f" (expert {model['expert_parallel']})" if model["expert_parallel"] > 1 else ""
    replicas = " x ".join([str(model["data_parallel"]), *shared]) + experts
    return [str(model["role"]), str(model["ranks"]), replicas, "; ".join(tasks)]


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


def memory_lines(plan: Mapping[str, Any]) -> list[str]:
    """The estimate as text: a row for each phase, then the verdict."""
    memory = plan["memory"]
    if memory["phases"] is None:
        return ["", f"Memory is not estimated: {memory['why']}"]
    largest = max(phase["bytes"] for phase in memory["phases"])
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    on_cuda = plan["device"] == "cuda"
    rows = _memory_rows(memory["phases"], unit, f"{name} per {'GPU' if on_cuda else 'process'}")
    estimated = ", ".join(memory["estimated"])
    guessed = [f"{estimated}: layers of a kind that is not counted; taken for those of a Llama or Mixtral."] * bool(
        estimated
    )
    unpacked = [f"{path}: packed rows would see each other, so rows are padded." for path in memory["unpacked"]]
    return ["", *rows, *guessed, *unpacked, *(_verdict(memory) if on_cuda else [])]


def _memory_rows(phases: Sequence[Mapping[str, Any]], unit: int, title: str) -> list[str]:
    parts = [part for part in PARTS if any(phase["parts"].get(part) for phase in phases)]
    head = [title, "model", "total", *parts, "on the host"]
    rows = [
        [
            phase["name"],
            phase["role"],
            *(f"{size / unit:.1f}" for size in (phase["bytes"], *(phase["parts"].get(part, 0) for part in parts))),
            f"{phase['host'] / unit:.1f}",
        ]
        for phase in phases
    ]
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _verdict(memory: Mapping[str, Any]) -> list[str]:
    kind = memory["gpu_kind"]
    if memory["fits"] is None:
        return [] if kind else ["Set trainer.placement.gpu_kind to see whether it fits."]
    usable, sequences = memory["usable_bytes"] / GIB, memory["sequences_in_cache"]
    cache = "" if sequences is None else f" An engine's cache holds {sequences} full-length sequences at once."
    if memory["fits"]:
        return [f"It fits {kind}, of which {usable:.1f} GiB may be used.{cache}"]
    lines = [f"It does not fit {kind}, of which {usable:.1f} GiB may be used: {memory['why']}."]
    if memory["binding"]:
        lines.append(f"Deciding settings: {', '.join(memory['binding'])}.")
    nearest = memory["nearest"]
    return [
        *lines,
        f"Closest change that fits: {as_arguments(nearest)}"
        if nearest
        else "No change of one or two settings makes it fit.",
    ]
