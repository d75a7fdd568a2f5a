"""Formats the memory part of a plan: bytes on one GPU in each phase, whether they fit, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
MIB = 2**20


def memory_lines(plan: Mapping[str, Any]) -> list[str]:
    """The estimate as text: a row for each phase, then the verdict."""
    memory = plan["memory"]
    if memory["phases"] is None:
        return ["", f"Memory is not estimated: {memory['why']}"]
    largest = max(phase["bytes"] for phase in memory["phases"])
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    on_cuda = plan["device"] == "cuda"
    rows = _rows(memory["phases"], unit, f"{name} per {'GPU' if on_cuda else 'process'}")
    estimated = ", ".join(memory["estimated"])
    guessed = [f"{estimated}: layers of a kind that is not counted; taken for those of a Llama or Mixtral."] * bool(
        estimated
    )
    unpacked = [f"{path}: packed rows would see each other, so rows are padded." for path in memory["unpacked"]]
    return ["", *rows, *guessed, *unpacked, *(_verdict(memory) if on_cuda else [])]


def _rows(phases: Sequence[Mapping[str, Any]], unit: int, title: str) -> list[str]:
    from skyrl.planning.memory import PARTS

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
    from skyrl.config.estimates.memory_fit import as_arguments

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
