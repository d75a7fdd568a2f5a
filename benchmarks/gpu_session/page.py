"""Stores results, and makes the section Measurements of docs/gpu.md from all that are stored.

One file for each card and stage, below `results/`: a newer one replaces it. Logs are not stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.gpu_session.cuda_paths import table as table_of_paths
from benchmarks.gpu_session.runner import Record, title, write
from benchmarks.gpu_session.stages import STAGES

HEADING = "## Measurements\n"
RESULTS = Path(__file__).parent / "results"
OPERATORS = 10
"""Operators of a profile that the page shows."""

GROUPS: Mapping[str, tuple[str, str]] = {
    "facts": ("The device", ""),
    "smollm2": (
        "Steps of SmolLM2-135M",
        "Sums of two numbers; 32 prompts x 8 answers of at most 24 tokens (`smollm2`), and 16 x 8 x 256 "
        "(`smollm2-long`); learning rate 1e-5, no KL term, activations kept in both trainers.",
    ),
    "tests_vllm": ("Tests with vLLM", ""),
    "tests": ("Tests", ""),
    "long_rows": (
        "Long rows",
        "The shape of Qwen3-0.6B with random weights; every token but the first is learned. MFU as prime-rl counts it "
        "divides by 989 TFLOP/s; its published figures are of one H100.",
    ),
    "learner": (
        "Updates of short answers",
        "Random weights; 16 prompts of 256 tokens with 8 answers each, of up to 256 tokens; activations recomputed "
        "where they are not kept. `packed` repeats a prompt for each answer, `padded` and the plain loop in "
        "transformers take 8 rows at a time.",
    ),
    "step": (
        "Steps of random models",
        "Shapes of Qwen2.5; the batch of the updates, sampled to its greatest length; activations recomputed.",
    ),
    "generation": ("Generation", "128 answers of 256 tokens to 16 prompts of 256 tokens; the shape of Qwen2.5-0.5B."),
    "strategies": ("Strategies on one GPU", "Runs on Ray with one rank and the embedded engine."),
}
"""Title and setting of each comparison, in the order of the page."""


def merge(outs: Sequence[Path], results: Path, page: Path) -> int:
    """Stores what the folders hold and rewrites the page; 1 if a folder holds no results."""
    code = 0
    for out in outs:
        files = [file for file in sorted(out.rglob("*.json")) if is_record(file)]
        if not files:
            print(f"{out} holds no results of `run`")
            code = 1
        for file in files:
            _store(json.loads(file.read_text(encoding="utf-8")), results)
    page.write_text(with_measurements(page.read_text(encoding="utf-8"), markdown(stored(results))), encoding="utf-8")
    return code


def is_record(file: Path) -> bool:
    """Whether the file is one that `run` wrote."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(record, dict) and {"stage", "shape", "parts"} <= record.keys()


def _store(record: Record, results: Path) -> None:
    """Keeps a record of a GPU, unless it measured nothing or a newer one is there."""
    if record.get("device", "CPU") == "CPU" or not (record["parts"] or record.get("failed")):
        return
    file = results / slug(record["device"]) / f"{name_of(record)}.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8"))["date"] > record["date"]:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in record.items() if name != "log"}
    write(file, json.loads(re.sub(r"(?<![\w.])(/[\w.-]+){2,}/", "", json.dumps(kept))))


def name_of(record: Record) -> str:
    """Name of a record's files."""
    return title(record["stage"], record["shape"], record.get("changes", ()))


def slug(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def stored(results: Path = RESULTS) -> list[Record]:
    """All records, in the order of the stages."""
    order = [stage.name for stage in STAGES]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.rglob("*.json"))]
    return sorted(
        records,
        key=lambda record: (
            order.index(record["stage"]),
            record["shape"],
            record.get("changes", []),
            record["device"],
        ),
    )


def with_measurements(page: str, text: str) -> str:
    """The page with its section Measurements replaced. Raises ValueError if it has none."""
    before, heading, _ = page.partition(HEADING)
    if not heading:
        raise ValueError("the page has no section Measurements")
    return f"{before}{heading}\n{text}"


def markdown(records: Sequence[Record]) -> str:
    """The section: a table of each comparison on each card, then what has run on a GPU at all."""
    lines: list[str] = []
    for group, (heading, setting) in GROUPS.items():
        of_group = [record for record in records if record["stage"].partition(".")[0] == group]
        if of_group:
            lines += [f"### {heading}", "", *([*_wrapped(setting), ""] if setting else [])]
            for _, alike in groupby(sorted(of_group, key=_circumstances), _circumstances):
                lines += [*_table(list(alike)), ""]
    lines += ["### What has run on a GPU", ""]
    lines += [*_wrapped(PATHS_INTRODUCTION), "", *table_of_paths(records), ""]
    return "\n".join(lines).rstrip() + "\n"


PATHS_INTRODUCTION = (
    "Each row is code that needs CUDA: the newest stored result that used it, or the tests that try it on a CPU as far "
    "as one can."
)


def _circumstances(record: Record) -> tuple[str, str, str, str]:
    """What the records of one table have in common."""
    return (
        record["device"],
        record["date"].partition(" ")[0],
        record["commit"],
        record["versions"].get("torch", "unknown"),
    )


SHOWN = ("torch", "transformers", "vllm", "trl", "deepspeed", "megatron-core", "flash-attn", "liger-kernel")
"""Packages whose versions the page names."""


def _table(records: Sequence[Record]) -> Iterator[str]:
    device, date, commit, _ = _circumstances(records[0])
    versions = {name: record["versions"][name] for record in records for name in SHOWN if name in record["versions"]}
    used = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    yield from _wrapped(f"{device}, {date}, commit {commit}; {used}.")
    yield ""
    rows = [(record, name, part) for record in records for name, part in record["parts"].items()]
    cells = {header: [cell(part) for _, _, part in rows] for header, cell in COLUMNS.items()}
    cells = {header: column for header, column in cells.items() if any(column)}
    shapes = [", ".join([record["shape"], *record.get("changes", [])]) for record, _, _ in rows]
    heads = [*(["shape"] if any(shapes) else []), "measurement", *cells]
    yield _row(heads)
    yield "|" + "---|" * len(heads)
    for number, (_, name, _) in enumerate(rows):
        first = [shapes[number]] if any(shapes) else []
        yield _row([*first, name, *(column[number] for column in cells.values())])
    for record in records:
        for name, part in record["parts"].items():
            yield from _profile(name_of(record), name, part)
        yield from _remarks(record)


def _remarks(record: Record) -> Iterator[str]:
    """What the table does not show: notes, and what failed."""
    failed = [f"{name} failed: {reason}" for name, reason in record.get("failed", {}).items()]
    if record.get("state") == "limit":
        failed.append(f"{name_of(record)} {record['error']}")
    for text in [*record.get("notes", []), *failed]:
        yield ""
        yield from _wrapped(text if text.endswith(".") else f"{text}.")


def _profile(stage: str, name: str, part: Record) -> Iterator[str]:
    if part.get("profile"):
        yield from [
            "",
            f"One update of `{stage}`, {name}, by operator:",
            "",
            "| operator | ms | calls |",
            "|---|---|---|",
        ]
        for event in part["profile"][:OPERATORS]:
            yield f"| `{event['name']}` | {event['ms']:.2f} | {event['calls']} |"


def _number(name: str, form: str, scale: float = 1.0) -> Callable[[Record], str]:
    return lambda part: "" if part.get(name) is None else form.format(part[name] * scale)


def _phase(name: str) -> Callable[[Record], str]:
    return lambda part: f"{part['phases'][name] * 1000:,.0f}" if name in part.get("phases", {}) else ""


def _published(part: Record) -> str:
    if "published_mfu" not in part:
        return ""
    return f"{part['published_tokens_per_second']:,} tokens/s, {part['published_mfu']:.1%}"


def _reward(part: Record) -> str:
    return f"{part['reward_first']:.2f} to {part['reward_last']:.2f}" if "reward_first" in part else ""


def _kernels(part: Record) -> str:
    if "kernels" not in part:
        return ""
    return f"{part['kernels']:,} in {part['kernel_seconds'] * 1000:,.0f} ms"


COLUMNS: Mapping[str, Callable[[Record], str]] = {
    "result": lambda part: part.get("summary", ""),
    "tokens/s": _number("tokens_per_second", "{:,.0f}"),
    "seconds": _number("seconds", "{:.3f}"),
    "sampling, ms": _phase("generate"),
    "update, ms": _phase("policy_train"),
    "weight transfer, ms": _phase("sync_weights"),
    "until the first step, s": _number("start_seconds", "{:.0f}"),
    "reward, first to last step": _reward,
    "ms for each token": _number("step_ms", "{:.1f}"),
    "MFU": _number("mfu", "{:.2f}"),
    "MFU as prime-rl counts": _number("mfu_as_prime_rl", "{:.1%}"),
    "prime-rl, one H100": _published,
    "kernels": _kernels,
    "GPU busy": _number("gpu_busy", "{:.0%}"),
    "peak of tensors, GB": _number("peak_bytes", "{:.1f}", 1e-9),
    "peak of the GPU, GB": _number("device_bytes", "{:.1f}", 1e-9),
    "`skyrl plan`, GB": _number("plan_bytes", "{:.1f}", 1e-9),
}
"""Headers and cells of all tables; a table shows those with a number. MFU: see docs/gpu.md."""


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _wrapped(text: str, width: int = 130) -> list[str]:
    """Lines of a paragraph."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
