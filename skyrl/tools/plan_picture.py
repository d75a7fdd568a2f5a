"""Draws a plan as SVG: the processes on the GPUs of each node, and the memory of one GPU in each phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from skyrl.tools.run_plan import Plan, placement_text, plan_in

WIDTH = 960
NODES_SHOWN = 16
_LINE, _EDGE, _LABEL = 18, 24, 190
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288", "#882255", "#44aa99")
"""Colours that colour-blind readers can distinguish (Paul Tol's bright scheme, and three of his muted one)."""


def pictures_in(folders: Iterable[Path]) -> tuple[dict[Path, str], dict[Path, int]]:
    """SVG of the layout of each run, and the number of its GPUs, by folder, for a report; runs without engines are left
    out.
    """
    plans = {folder: plan for folder in folders if (plan := plan_in(folder))}
    gpus = {folder: plan["gpus"] for folder, plan in plans.items()}
    return {folder: picture(plan) for folder, plan in plans.items()}, gpus


def picture(plan: Plan) -> str:
    """The SVG document of a plan."""
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": str(WIDTH), "font-size": "13"})
    root.set("font-family", "system-ui, sans-serif")
    SubElement(root, "title").text = placement_text(plan)
    SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    below = _draw_memory(root, plan, _draw_nodes(root, plan, _EDGE))
    root.set("height", str(below + _EDGE))
    root.set("viewBox", f"0 0 {WIDTH} {below + _EDGE}")
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _draw_nodes(root: Element, plan: Plan, top: int) -> int:
    """Draw one row of GPUs or slots for each node, with their processes. Returns the y below."""
    slot = "GPU" if plan["gpus"] else "slot"
    processes_by_gpu: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for seat in plan["seats"]:
        for node, gpu in seat["places"]:
            processes_by_gpu.setdefault((node, gpu), []).append((seat["role"], seat["rank"]))
    placement = placement_text(plan) if not plan["gpus"] and plan["executor"] == "in_process" else ""
    roles = list(dict.fromkeys(seat["role"] for seat in plan["seats"]))
    width = min(200, (WIDTH - _EDGE - 90) // plan["slots_per_node"])
    for node in range(min(plan["nodes"], NODES_SHOWN)):
        on_node = [processes_by_gpu.get((node, gpu), []) for gpu in range(plan["slots_per_node"])]
        height = _LINE * (1 + max(map(len, on_node))) + 8
        _write(root, _EDGE, top + 20, f"node {node}", bold=True)
        for gpu, processes in enumerate(on_node):
            left = 90 + gpu * width
            _box(root, left, top, width - 6, height, "white", stroke="#888888")
            _write(root, left + 6, top + 15, placement or f"{slot} {gpu}", color="#555555")
            for index, (role, rank) in enumerate(processes):
                y = top + _LINE * (1 + index) + 3
                _box(root, left + 4, y, width - 14, _LINE - 3, _COLORS[roles.index(role) % len(_COLORS)])
                _write(root, left + 8, y + 12, f"{role} {rank}", color="white", size=min(12, width // 6))
        top += height + 10
    if plan["nodes"] > NODES_SHOWN:
        _write(root, _EDGE, top + 14, f"and {plan['nodes'] - NODES_SHOWN} more nodes like these")
        top += 24
    return top


def _draw_memory(root: Element, plan: Plan, top: int) -> int:
    """Draw one bar for each phase, divided by use of the memory. Returns the y below."""
    memory = plan["memory"]
    phases = memory["phases"]
    if phases is None:
        _write(root, _EDGE, top + 24, f"memory: {memory['why']}")
        return top + 24
    unit = "GPU" if plan["gpus"] else "process"
    _write(root, _EDGE, top + 24, f"estimated memory of one {unit} in each phase", bold=True)
    top += 36
    parts = list(dict.fromkeys(part for phase in phases for part in phase["parts"]))
    limit = memory["usable_bytes"]
    room = WIDTH - _LABEL - 110
    scale = room / max([limit or 1, *(phase["bytes"] for phase in phases)])
    for phase in phases:
        _write(root, _EDGE, top + 13, f"{phase['name']} ({phase['role']})")
        left = 0.0
        for name, size in phase["parts"].items():
            if size > 0:
                color = _COLORS[parts.index(name) % len(_COLORS)]
                bar = _box(root, _LABEL + left, top, size * scale, _LINE - 2, color)
                SubElement(bar, "title").text = f"{name}: {_size(size)}"
                left += size * scale
        _write(root, _LABEL + room + 12, top + 13, _size(phase["bytes"]))
        top += _LINE + 4
    if limit is not None:
        x = str(round(_LABEL + limit * scale, 1))
        line = {"x1": x, "x2": x, "y1": str(top - len(phases) * (_LINE + 4) - 4), "y2": str(top), "stroke": "#cc0000"}
        SubElement(root, "line", line)
        _write(root, _LABEL, top + 14, f"red: limit, {_size(limit)} of a {memory['gpu_kind']}", color="#cc0000")
        top += 22
    return _legend(root, parts, top + 8)


def _legend(root: Element, parts: Sequence[str], top: int) -> int:
    columns = 4
    for number, name in enumerate(parts):
        row, column = divmod(number, columns)
        x, y = _EDGE + column * (WIDTH - 2 * _EDGE) // columns, top + row * 20
        _box(root, x, y, 12, 12, _COLORS[number % len(_COLORS)])
        _write(root, x + 18, y + 11, name)
    return top + 20 * -(-len(parts) // columns)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _box(root: Element, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> Element:
    sizes = {"x": x, "y": y, "width": max(0, width), "height": height}
    rounded = {name: str(round(value, 1)) for name, value in sizes.items()}
    return SubElement(root, "rect", {**rounded, "fill": fill, "stroke": stroke})


def _write(
    root: Element, x: float, y: float, text: str, *, bold: bool = False, color: str = "#222222", size: int = 13
) -> None:
    style = {"x": str(round(x, 1)), "y": str(round(y, 1)), "fill": color, "font-size": str(size)}
    SubElement(root, "text", style | ({"font-weight": "bold"} if bold else {})).text = text
