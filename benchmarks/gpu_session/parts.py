"""Carries packages, models and data to a machine that reaches no package index, in parts of a given size.

    python -m benchmarks.gpu_session collect torch==2.13.0 vllm==0.32.0 --into carry --have names.txt
    python -m benchmarks.gpu_session pack carry --add smollm2 --part-mb 40      writes carry/part-00-of-07 and so on
    python3 benchmarks/gpu_session/parts.py FOLDER PART ...                     there: unpacks into FOLDER
    source FOLDER/environment                                                   there: sets PYTHONPATH and more

Wheels are for Linux on x86-64. Packing needs the program `zstd`, unpacking the package `pyarrow` and nothing else.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

GLIBC = (39, 35, 34, 31, 28, 27, 24, 18, 17)
"""Minor versions of glibc 2 whose wheels are taken, newest first."""

MACHINE_CODE = ("libtorch_cuda*.so", "libtorch_nvshmem.so", "libnccl.so*", "*_C_stable_libtorch*.so", "_vllm_fa3_C*")
"""Libraries that hold code for many GPUs."""

NOT_NEEDED = ("torch/include/*", "torch/test/*", "torch/bin/protoc*", "triton/backends/amd/lib/*")
"""Files of wheels that a run does not read. Without `torch/include`, nothing is compiled in C++ there."""

ENVIRONMENT = """export PYTHONPATH={site}:$PWD${{PYTHONPATH:+:$PYTHONPATH}}
export LD_LIBRARY_PATH={site}/nvidia/nccl/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 VLLM_USE_FLASHINFER_SAMPLER=0
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
"""


def collect(
    requirements: Sequence[str], wheels: Path, *, have: Iterable[str], skip: Iterable[str], python: str
) -> list[str]:
    """Downloads wheels of the requirements and of what they require; returns what was not found, with the reason.

    `have` and `skip` name packages that are not followed, unless a requirement names them. Extras are not followed.
    What lies in `wheels` is not downloaded again, so that an interrupted call continues.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    left_out = {canonical(name) for name in (*have, *skip)} - {
        canonical(_name(requirement)) for requirement in requirements
    }
    waiting, done, failed = list(requirements), set(left_out), list[str]()
    while waiting:
        requirement = waiting.pop(0)
        if canonical(_name(requirement)) in done:
            continue
        done.add(canonical(_name(requirement)))
        try:
            metadata = _metadata(requirement, python)
            exact = f"{metadata['name']}=={metadata['version']}"
            if not any(_is_of(wheel, metadata) for wheel in wheels.glob("*.whl")):
                _pip("download", "--no-deps", *_target(python), "-d", str(wheels), exact)
        except subprocess.CalledProcessError as error:
            failed.append(
                f"{requirement}: {error.stderr.strip().splitlines()[-1] if error.stderr.strip() else 'no reason'}"
            )
            continue
        print(exact, flush=True)
        waiting += wanted(metadata.get("requires_dist") or [], python)
    return failed


def wanted(requires: Iterable[str], python: str) -> Iterator[str]:
    """Requirements that hold on Linux with this Python and without extras."""
    from packaging.requirements import Requirement

    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    machine |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    machine |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            yield f"{requirement.name}{requirement.specifier}"


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ \[;]", requirement)[0]


def _is_of(wheel: Path, metadata: dict[str, Any]) -> bool:
    name, version, *_ = wheel.name.split("-")
    return (canonical(name), version) == (canonical(metadata["name"]), metadata["version"])


def _target(python: str) -> list[str]:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    named = [word for platform in platforms for word in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *named]


def _metadata(requirement: str, python: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        dry = ["--dry-run", "--no-deps", "--ignore-installed", "--target", folder, "--report", str(report)]
        _pip("install", *dry, *_target(python), requirement)
        metadata: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
        return metadata


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *words], check=True, capture_output=True, text=True)


def pack(carry: Path, folders: Sequence[Path], *, part_bytes: int, architecture: int) -> list[Path]:
    """Packs the wheels in `carry/wheels` and other folders into `carry/part-NN-of-NN`; returns these files.

    Raises ValueError if two versions of a package are among the wheels.
    """
    from benchmarks.gpu_session.machine_code import keep_only

    wheels = sorted((carry / "wheels").glob("*.whl"))
    names = [canonical(wheel.name.partition("-")[0]) for wheel in wheels]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two versions of {', '.join(doubled)} among the wheels: remove one of each")
    for old in carry.glob("part-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=carry) as scratch:
        site, packs = Path(scratch, "site"), Path(scratch, "packs")
        site.mkdir()
        packs.mkdir()
        for wheel in wheels:
            _unpack_wheel(wheel, site)
        for library in site.rglob("*.so*"):
            if any(fnmatch.fnmatch(library.name, pattern) for pattern in MACHINE_CODE):
                keep_only(library, architecture)
        # Packs are unpacked side by side, so that the largest packages get one each.
        large = sorted(path.name for path in site.iterdir() if _size(path) > 2**26)
        rest = sorted(path.name for path in site.iterdir() if path.name not in large)
        for number, members in enumerate([*([name] for name in large), *([rest] if rest else [])]):
            _compress(site, members, packs / f"site.{number}.tar.zst")
        for folder in folders:
            _compress(folder, ["."], packs / f"{folder.resolve().name}.tar.zst")
        with subprocess.Popen(["tar", "-cf", "-", "-C", str(packs), "."], stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            return _cut(tar.stdout, carry, part_bytes)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _cut(stream: IO[bytes], carry: Path, part_bytes: int) -> list[Path]:
    """Files of at most so many bytes, whose names say how many there are."""
    parts = list[Path]()
    while piece := stream.read(part_bytes):
        parts.append(carry / f"part-{len(parts):02d}")
        parts[-1].write_bytes(piece)
    return [part.rename(carry / f"{part.name}-of-{len(parts):02d}") for part in parts]


def _unpack_wheel(wheel: Path, site: Path) -> None:
    """Unpacks a wheel as pip does, its programs executable."""
    with zipfile.ZipFile(wheel) as packed:
        for member in packed.infolist():
            name = member.filename
            first, _, inside = name.partition("/")
            if first.endswith(".data"):
                kind, _, name = inside.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            if member.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in NOT_NEEDED):
                continue
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with packed.open(member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            if (member.external_attr >> 16) & 0o111:
                path.chmod(0o755)


def _compress(folder: Path, members: Sequence[str], to: Path) -> None:
    words = ["tar", "-cf", "-", "-C", str(folder), *members]
    with to.open("wb") as target, subprocess.Popen(words, stdout=subprocess.PIPE) as tar:
        subprocess.run(["zstd", "-q", "-9", "-T0"], stdin=tar.stdout, stdout=target, check=True)
    if tar.returncode:
        raise OSError(f"tar of {folder} failed")


def join(parts: Sequence[Path], into: Path) -> None:
    """Unpacks the parts: wheels into `into/site`, each other folder into `into/NAME`; writes `into/environment`.

    Raises ValueError if a part is missing, and OSError if one is damaged.
    """
    names = {part.name for part in parts}
    total = max(int(name.rpartition("-")[2]) for name in names)
    if missing := {f"part-{number:02d}-of-{total:02d}" for number in range(total)} - names:
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        with _untar(Path(scratch)) as stream:
            for part in sorted(parts, key=lambda part: part.name):
                stream.write(part.read_bytes())
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda pack: _decompress(pack, into), sorted(Path(scratch).glob("*.tar.zst"))))
    _link_libraries(into / "site" / "nvidia")
    (into / "environment").write_text(ENVIRONMENT.format(site=into.resolve() / "site"), encoding="utf-8")


def _decompress(pack: Path, into: Path) -> None:
    import pyarrow

    name = pack.name.removesuffix(".tar.zst")
    folder = into / ("site" if name.startswith("site.") else name)
    folder.mkdir(exist_ok=True)
    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(pack)), "zstd") as packed, _untar(folder) as stream:
        shutil.copyfileobj(packed, stream, 2**20)


@contextmanager
def _untar(folder: Path) -> Iterator[IO[bytes]]:
    """A stream that is unpacked into the folder. Raises OSError if it is no whole archive."""
    with subprocess.Popen(["tar", "-xf", "-", "-C", str(folder)], stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        yield tar.stdin
    if tar.returncode:
        raise OSError(f"what belongs to {folder} is damaged")


def _link_libraries(ours: Path) -> None:
    """Links NVIDIA's libraries that are installed there, where the carried packages look for them."""
    installed = importlib.util.find_spec("nvidia")
    for folder in (installed and installed.submodule_search_locations) or ():
        ours.mkdir(parents=True, exist_ok=True)
        for library in Path(folder).iterdir():
            if not (ours / library.name).exists():
                (ours / library.name).symlink_to(library)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python3 parts.py FOLDER PART ...")
    try:
        join([Path(word) for word in sys.argv[2:]], Path(sys.argv[1]))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(str(error))
