"""The tests marked gpu, with and without vLLM, in separate stages."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.gpu_session.runner import ROOT
from benchmarks.gpu_session.stages import Job, Parts, Result


def without_vllm(job: Job) -> Parts:
    """All that need neither vLLM nor Ray; on a CPU, pytest skips the tests themselves."""
    return [("tests marked gpu", partial(_pytest, _files(with_vllm=False)))]


def with_vllm(job: Job) -> Parts:
    """Those that start a vLLM engine."""
    return [("tests marked gpu, with vLLM", partial(_pytest, _files(with_vllm=True)))]


def _files(*, with_vllm: bool) -> list[Path]:
    """Files with tests marked gpu, sorted by whether they name vLLM."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    marked = {
        file: text
        for file, text in texts.items()
        if re.search(r"^\s*@?pytest\.mark\.gpu\b|marks=pytest\.mark\.gpu", text, re.M)
    }
    return [file for file, text in marked.items() if ("vllm" in text) == with_vllm]


def _pytest(files: Iterable[Path]) -> Result:
    """Runs the tests. Raises RuntimeError with those that failed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--import-mode=importlib", "--durations=10", *(str(file.relative_to(ROOT)) for file in files)]
    start = time.monotonic()
    process = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(process.stdout)
    lines = [line for line in process.stdout.splitlines() if line.strip()] or ["pytest printed nothing"]
    if process.returncode != 0:
        broken = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join(broken) or lines[-1])
    passed = [match["test"] for line in lines if (match := re.match(r"\d+\.\d+s call +(?P<test>\S+)", line))]
    return {"seconds": time.monotonic() - start, "summary": lines[-1].strip("= "), "slowest": passed}
