from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from skyrl.models.files.paths import check_model_path, local_folder, tokenizer_failure

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file: the length of its header, and a header that names no tensor."""


def folder_with(folder: Path, files: Iterable[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_bytes(NO_TENSORS if name.endswith(".safetensors") else b"{}")
    return folder


def sharded(folder: Path, *present: str) -> Path:
    """Weights that an index spreads over the files a and b."""
    folder_with(folder, ("config.json", *present))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_with_configuration_and_weights_can_be_a_model(tmp_path: Path) -> None:
    assert check_model_path(str(folder_with(tmp_path, ("config.json", "model.safetensors")))) is None


def test_a_hub_name_passes_because_only_loading_can_tell() -> None:
    assert check_model_path("Qwen/Qwen2.5-1.5B-Instruct") is None


def test_a_local_folder_wins_over_a_hub_name_of_the_same_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_folder("runs/base") is None
    folder_with(tmp_path / "runs" / "base", ())
    assert local_folder("runs/base") == Path("runs/base")
    assert "no config.json" in (check_model_path("runs/base") or "")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_with(tmp_path / "model", ("config.json", "model.safetensors"))
    assert check_model_path("~/model") is None
    assert "no model folder ~/other" in (check_model_path("~/other") or "")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.touch()
    assert (check_model_path(str(file)) or "").startswith(f"{file} is a file, but a model is a folder")


@pytest.mark.parametrize("path", ["/nowhere/model", "runs/quickstart-base/model", "gpt2", ""])
def test_what_is_neither_a_folder_nor_a_hub_name_is_told(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_model_path(path) is not None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "contains no config.json"),
        (("model.safetensors",), "contains no config.json"),
        (("config.json",), "contains no weights in safetensors"),
        (("config.json", "pytorch_model.bin"), "contains no weights in safetensors"),
    ],
)
def test_a_folder_that_lacks_something_says_what(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    assert message in (check_model_path(str(folder_with(tmp_path, files))) or "")


def test_every_file_that_the_index_of_the_weights_names_has_to_be_there(tmp_path: Path) -> None:
    folder = sharded(tmp_path, "a.safetensors")
    assert "lacks 1 of its 2 weight files, such as b.safetensors" in (check_model_path(str(folder)) or "")
    assert check_model_path(str(sharded(tmp_path, "b.safetensors"))) is None


def test_a_damaged_index_is_told(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "is damaged" in (check_model_path(str(tmp_path)) or "")


def test_checking_a_path_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from skyrl.models.files.paths import check_model_path; check_model_path('/nowhere');"
        "print(*{'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == ""


UNBOUNDED: dict[str, Callable[[Path], object]] = {
    "config.json": os.mkfifo,
    "generation_config.json": lambda file: file.symlink_to("/dev/zero"),
    "chat_template.jinja": lambda file: file.symlink_to("/dev/urandom"),
    "weights.bin": os.mkfifo,
    "tokenizer.json": lambda file: large(file),
    "vocab.txt": lambda file: large(file),
    "model.safetensors.index.json": lambda file: large(file),
    "template.jinja": lambda file: large(file),
}


def large(file: Path) -> None:
    """A file of a terabyte with nothing in it."""
    file.touch()
    os.truncate(file, 1 << 40)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_file_of_a_model_that_never_ends_is_named_and_not_read(name: str, tmp_path: Path) -> None:
    UNBOUNDED[name](tmp_path / name)
    for reason in (
        check_model_path(str(tmp_path)),
        check_model_path(str(tmp_path), weights=False),
        tokenizer_failure(str(tmp_path)),
    ):
        assert f"{tmp_path / name} is " in (reason or "")


def test_weights_may_be_of_any_size(tmp_path: Path) -> None:
    folder_with(tmp_path, ("config.json",))
    large(tmp_path / "model.bin")
    assert check_model_path(str(tmp_path), weights=False) is None
