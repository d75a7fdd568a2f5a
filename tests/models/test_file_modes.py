"""Every file with tensors that skyrl writes has the mode that the umask gives it; safetensors gives 0600."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyrl
from skyrl.config import SkyRLLoraConfig
from skyrl.inference.adapters import shared, write_adapter
from skyrl.models.files.loading import load_causal_lm, load_tokenizer
from skyrl.models.files.naming import named_weights
from skyrl.models.saving.storing import AdapterExport, Export
from skyrl.starter import tiny_chat
from skyrl.tracking.recording import BatchDump, Computed, Recording
from skyrl.weight_sync.senders import DeltaSender, FolderSender

PEFT = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = [(f"{PEFT}.lora_A.weight", torch.ones(2, 32)), (f"{PEFT}.lora_B.weight", torch.ones(32, 2))]
COMPUTED = Computed(step=1, tensors={"rewards": torch.ones(1, 2)}, updates=(), weights={})


def export(like: Path, out: Path) -> None:
    model = load_causal_lm(str(like), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    Export(like=str(like), folder=out / "export")(iter(named_weights(model)))


def adapter(like: Path, out: Path) -> None:
    lora = SkyRLLoraConfig(rank=2, target_modules=("q_proj",))
    AdapterExport(like=str(like), lora=lora, folder=out / "adapter")(iter(ADAPTER))


def adapter_of_an_engine(like: Path, out: Path) -> None:
    write_adapter(shared(ADAPTER, rank=2, alpha=2.0), out / "adapter")


def bucket(like: Path, out: Path) -> None:
    FolderSender(path=str(out), dtype="float32")(iter([("w", torch.ones(2))]))


def delta(like: Path, out: Path) -> None:
    DeltaSender(path=str(out), dtype="float32", prefix="0", base={})(iter([("w", torch.ones(2))]))


def batch(like: Path, out: Path) -> None:
    BatchDump(out / "dump").write_computed(COMPUTED)


def recording(like: Path, out: Path) -> None:
    kept = Recording(out / "recording")
    kept.begin({"total_steps": 1})
    kept.write_computed(COMPUTED)


def small_model(like: Path, out: Path) -> None:
    model = load_causal_lm(str(like), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    tiny_chat.save(model, load_tokenizer(str(like)), out / "model")


@pytest.fixture(params=[0o022, 0o027, 0o007], ids=oct)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of new files under an umask that is in force for the test."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


@pytest.mark.parametrize("write", [export, adapter, adapter_of_an_engine, bucket, delta, batch, recording, small_model])
def test_files_with_tensors_follow_the_umask(
    write: Callable[[Path, Path], None], mode: int, nano: Path, tmp_path: Path
) -> None:
    write(nano / "model", tmp_path)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".safetensors" for file in files)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {file.name: oct(mode) for file in files}


@pytest.mark.long
def test_no_other_module_writes_tensors() -> None:
    """`save_file` and the models' `save_pretrained` are called where their files are given the umask's mode."""
    root = Path(skyrl.__file__).parent
    callers = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _name(node.func) in ("save_file", "model.save_pretrained")
    }
    assert callers == {"storage/modes.py", "models/saving/storing.py", "starter/tiny_chat.py"}


def _name(function: ast.expr) -> str:
    return ast.unparse(function)
