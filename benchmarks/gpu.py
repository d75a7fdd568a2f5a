"""Speed on one GPU: GRPO steps, updates and generation of random models, beside plain loops. JSON and Markdown.

    make gpu                                                the tests marked gpu, then this, in at most 8 minutes
    python -m benchmarks.gpu --out runs/gpu                 this alone
    python -m benchmarks.gpu --device cpu --shape tiny --out runs/gpu

Models have the shapes of Qwen2.5-0.5B and -1.5B and random weights, so that nothing is downloaded. Each section runs in
a process of its own, and one that fails or finds no time is named in the result, as is one that needs a package that
is not installed. MFU is the arithmetic that the batch needs over the rate that the same device reaches in one large
matrix product; what is computed again in backward does not count as work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).parents[1]
RESULT = "RESULT "
"""Before the line of a section's process that holds its numbers."""

TESTS_SECONDS = 180
"""Longest time of the tests."""


@frozen
class Section:
    """A function of `gpu_sides.py`, and what it needs."""

    name: str
    packages: tuple[str, ...] = ()
    on_cuda_only: bool = False

    def why_not(self, device: str) -> str | None:
        """Why it is left out on this machine."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        return "needs CUDA" if self.on_cuda_only and device != "cuda" else None


SECTIONS = (
    Section("model"),
    Section("learner"),
    Section("plain"),
    Section("step"),
    Section("step_trl", ("trl", "datasets")),
    Section("generation"),
    Section("step_vllm", ("vllm", "ray"), on_cuda_only=True),
)
"""In order of importance; the first one writes the model that the others load."""


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes `gpu.json` and `gpu.md`, and returns an exit code: 1 if a test or a section failed."""
    options = _options(words)
    begun = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "gpu.log"
    log.write_text("", encoding="utf-8")
    result: dict[str, Any] = {"benchmark": "gpu", "device": options.device, "shapes": {}, "left_out": {}, "failed": {}}
    if importlib.util.find_spec("flash_attn") is None:
        result["left_out"]["attention flash_attention_2"] = "not installed: flash_attn"
    if options.tests:
        _run_tests(result, log)
    for name in options.shape:
        with tempfile.TemporaryDirectory(prefix="skyrl-gpu-") as folder:
            result["shapes"][name] = {}
            for section in SECTIONS:
                left = options.seconds - (time.monotonic() - begun)
                _measure(section, name, Path(folder), options, left, result)
    result["seconds"] = round(time.monotonic() - begun)
    (options.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(markdown(result)) + "\n"
    (options.out / "gpu.md").write_text(text, encoding="utf-8")
    if options.page is not None and result["device"] == "cuda":
        options.page.write_text(with_measurements(options.page.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text)
    return 1 if result["failed"] else 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    shapes = ("tiny", "0.5b", "1.5b")
    parser.add_argument("--shape", action="append", choices=shapes, help="may be repeated (0.5b and 1.5b)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json, gpu.md and gpu.log")
    parser.add_argument("--page", type=Path, help="page whose section Measurements is replaced, after a run on CUDA")
    parser.add_argument("--seconds", type=float, default=460.0, help="time for everything; what finds none is left out")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu first")
    parser.add_argument("--one-process", action="store_true", help="run all sections in this process")
    options = parser.parse_args(words)
    if options.device == "cuda" and not _sees_cuda():
        parser.error("this torch sees no CUDA device; --device cpu --shape tiny runs the same sections without one")
    options.shape = options.shape or ["0.5b", "1.5b"]
    return options


def _sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure(
    section: Section, shape: str, folder: Path, options: argparse.Namespace, left: float, result: dict[str, Any]
) -> None:
    """Runs one section; its numbers go to the shape, the reason why it has none to `left_out` or `failed`."""
    title = f"{section.name} {shape}"
    why = section.why_not(options.device) or ("no time was left" if left < 10 else None)
    if why is None and section.name != "model" and "model" not in result["shapes"][shape]:
        why = "there is no model"
    if why is not None:
        result["left_out"][title] = why
        return
    print(f"{title} ... ({left:.0f} s are left)", file=sys.stderr, flush=True)
    if options.one_process:
        result["shapes"][shape][section.name] = _in_here(section.name, shape, folder, options.device)
        return
    found, error = _in_a_process(section.name, shape, folder, options.device, left, options.out / "gpu.log")
    if found is None:
        result["failed"][title] = error
    else:
        result["shapes"][shape][section.name] = found


def _in_here(section: str, shape: str, folder: Path, device: str) -> dict[str, Any]:
    import torch

    from benchmarks import gpu_sides
    from benchmarks.gpu_shapes import SHAPES

    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    found: dict[str, Any] = getattr(gpu_sides, section)(SHAPES[shape], folder, place)
    return found


def _in_a_process(
    section: str, shape: str, folder: Path, device: str, seconds: float, log: Path
) -> tuple[dict[str, Any] | None, str]:
    """What the section found, or None and the last line of its complaint, which is whole in the log."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", section, shape, str(folder), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None, f"took more than the {seconds:.0f} s that were left"
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1].removeprefix(RESULT)), ""
    _tell(log, f"{section} {shape}", done.stderr)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return None, said[-1][:300] if said else f"ended with exit code {done.returncode}"


def _tell(log: Path, title: str, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"== {title}\n{text}\n")


def _run_tests(result: dict[str, Any], log: Path) -> None:
    """The tests marked gpu, as far as what they need is installed."""
    missing = [name for name in ("pytest", "pytest_asyncio") if importlib.util.find_spec(name) is None]
    if missing:
        result["left_out"]["tests"] = f"not installed: {', '.join(missing)}"
        return
    files = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.gpu" not in text:
            continue
        lacks = [
            name for name in ("vllm", "ray", "deepspeed") if name in text and importlib.util.find_spec(name) is None
        ]
        if lacks:
            result["left_out"][f"tests/{file.name}"] = f"not installed: {', '.join(lacks)}"
        else:
            files.append(str(file.relative_to(ROOT)))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--import-mode=importlib", *files]
    print(f"tests marked gpu in {len(files)} files ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TESTS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        result["failed"]["tests"] = f"took more than {TESTS_SECONDS} s"
        return
    _tell(log, "tests", done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["pytest said nothing"]
    result["tests"] = lines[-1]
    if done.returncode != 0:
        broken = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        result["failed"]["tests"] = "; ".join(broken)[:2000] or lines[-1]


def markdown(result: dict[str, Any]) -> Iterator[str]:
    """The result as tables."""
    shapes = result["shapes"]
    machine: dict[str, Any] = next((each["model"] for each in shapes.values() if "model" in each), {})
    rate = machine.get("matmul_flops", 0.0)
    yield f"{machine.get('device', result['device'])}, torch {machine.get('torch', 'unknown')}; "
    yield f"one matrix product reaches {rate / 1e12:.2f} TFLOP/s. {result['seconds']} s in all."
    if "tests" in result:
        yield f"\nTests marked gpu: {result['tests']}"
    yield "\n| shape | what | tokens/s | MFU | seconds | peak memory, GB |\n|---|---|---|---|---|---|"
    for shape, sections in shapes.items():
        for section in ("learner", "plain", "generation", "step", "step_vllm", "step_trl"):
            for name, found in sections.get(section, {}).items():
                yield _row(shape, f"{section}: {name}", found, rate)
    for shape, sections in shapes.items():
        yield from _profile_table(shape, sections.get("learner", {}).get("shared_prompts", {}).get("profile", []))
    for title in ("left_out", "failed"):
        if result[title]:
            yield f"\n{title.replace('_', ' ').capitalize()}:\n"
            yield from (f"- {name}: {why}" for name, why in result[title].items())


def _row(shape: str, what: str, found: dict[str, Any], rate: float) -> str:
    tokens = f"{found['tokens_per_second']:,.0f}" if "tokens_per_second" in found else ""
    mfu = f"{found['flops'] / rate:.2f}" if "flops" in found and rate else ""
    memory = f"{found['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in found else ""
    return f"| {shape} | {what} | {tokens} | {mfu} | {found['seconds']:.3f} | {memory} |"


def _profile_table(shape: str, events: list[dict[str, Any]]) -> Iterator[str]:
    if events:
        yield f"\nOne update of {shape}, shared prompts, by operator:\n\n| operator | ms | calls |\n|---|---|---|"
        yield from (f"| `{event['name']}` | {event['ms']:.2f} | {event['calls']} |" for event in events)


def with_measurements(page: str, text: str) -> str:
    """The page with its section Measurements replaced, and without the sentence that it was not measured."""
    before, found, _ = page.partition("## Measurements\n")
    if not found:
        raise ValueError("the page has no section Measurements")
    return f"{before}{found}\n{text}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--section"]:
        name, of, where, device_name = sys.argv[2:6]
        print(RESULT + json.dumps(_in_here(name, of, Path(where), device_name)), flush=True)
    else:
        sys.exit(main())
