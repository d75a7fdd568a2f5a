"""Checkpoints that somebody made up, digests included: a `ResumeError` with the path, and never a traceback."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl.checkpoint.shards import StoredTensors
from skyrl.checkpoint.store import CheckpointStore, load_checkpoint
from skyrl.errors import ResumeError
from skyrl.storage.disk import Disk, digest_of
from tests.checkpoint.faulty import checkpoint

Body = dict[str, Any]
ZEROS = "0" * 32
DEEP = json.loads("[" * 200 + "]" * 200)
ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "", "x", "../x", [], [1], {}, {"x": 1}, {"": None}, DEEP)
"""Values that stand where something else belongs."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good checkpoint."""
    CheckpointStore(tmp_path).save(checkpoint(3))
    return tmp_path / "global_step_3"


def make_up(folder: Path, change: Callable[[Body], Any]) -> None:
    """Change the manifest, and give it the digest of what it then says."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["digest"]
    body = change(body) or body
    text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    body["digest"] = digest_of([text.encode()])
    (folder / "manifest.json").write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def write_header(file: Path, header: Any, *, length: int | None = None, data: bytes = b"") -> None:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def header(**changes: Any) -> Body:
    """Of a file with one tensor of two float32."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return {"__metadata__": {"pieces": json.dumps({"w": [[2], 0]})}, "w": entry}


def without(body: Body, key: str) -> None:
    del body[key]


def a_file(name: str = "other", **of: object) -> Callable[[Body], Any]:
    """One more file in the manifest, or another entry for one that is there."""
    return lambda body: body["files"].update({name: {"size": 7, "xxh3_128": ZEROS} | of})


def with_(**members: object) -> Callable[[Body], Any]:
    return lambda body: body.update(members)


MANIFESTS: dict[str, tuple[Callable[[Body], Any], str]] = {
    **{
        f"no {key}": (partial(without, key=key), f"is not what a run writes: it has no '{key}'")
        for key in ("step", "files", "config", "format", "fingerprint", "derived", "metrics", "schema_version")
    },
    "another step": (with_(step=4), "belongs to step 4: the folder was renamed"),
    "a step that is none": (with_(step=-1), "its step is not a non-negative integer"),
    "a step that is true": (with_(step=True), "its step is not a non-negative integer"),
    "a later format": (with_(format=99), "has format 99, but this version reads only up to 1"),
    "a format that is none": (with_(format="1"), "its format is not a non-negative integer"),
    "a schema version that is none": (with_(schema_version=1.5), "its schema_version is not a non-negative integer"),
    "a fingerprint that is none": (with_(fingerprint=7), "its fingerprint is not a string"),
    "a configuration that is none": (with_(config=[]), "its config is not a table"),
    "derived paths that are a text": (with_(derived="abc"), "its derived is not a list of paths"),
    "derived paths that are numbers": (with_(derived=["trainer.seed", 7]), "its derived is not a list of paths"),
    "versions that are numbers": (with_(versions={"python": 3}), "its versions are not strings"),
    "metrics that are none": (with_(metrics={"loss": "low"}), "its metrics are not finite numbers"),
    "metrics that are true": (with_(metrics={"loss": True}), "its metrics are not finite numbers"),
    "metrics in a list": (with_(metrics=[0.5]), "its metrics are not finite numbers"),
    "ranks that are none": (with_(world_size={"policy": 0}), "its world_size is not a table of positive integers"),
    "ranks that are halves": (with_(world_size={"policy": 1.5}), "its world_size is not a table of positive integers"),
    "files in a list": (with_(files=[]), "its files are not a table"),
    "a file above": (a_file("../outside"), "'../outside' is not the name of a file in the checkpoint"),
    "a file inside and above": (a_file("policy/../../x"), "'policy/../../x' is not the name of a file"),
    "a file beside": (a_file("./x"), "'./x' is not the name of a file"),
    "an absolute file": (a_file("/outside"), "'/outside' is not the name of a file"),
    "a file of Windows": (a_file("policy\\x"), "is not the name of a file"),
    "a file that is itself": (a_file("manifest.json"), "'manifest.json' is not the name of a file"),
    "a file that is a text": (
        lambda body: body["files"].update(other="x"),
        "the size of other is not a non-negative integer",
    ),
    "a negative size": (a_file("state.json", size=-1), "the size of state.json is not a non-negative integer"),
    "a digest that is none": (a_file(xxh3_128=7), "the digest of other is not an xxh3-128 digest"),
    "a digest that is short": (a_file(xxh3_128=ZEROS[1:]), "the digest of other is not an xxh3-128 digest"),
    "a digest that is no number": (a_file(xxh3_128="g" + ZEROS[1:]), "the digest of other is not an xxh3-128 digest"),
    "a digest of another file": (a_file("state.json", size=40), "state.json is damaged"),
    "no state": (lambda body: body["files"].pop("state.json") and None, "state.json is not in the manifest"),
}
HEADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a header of 18 GB": (b"{}", {"length": 18 * 10**9}),
    "a header of all bytes there are": (b"{}", {"length": 2**64 - 1}),
    "a header of nothing": (b"", {}),
    "a header that is no JSON": (b"\xff{", {}),
    "a header nested deep": (b"[" * 100_000, {}),
    "a header that is a list": ([], {}),
    "no index": ({"w": {}}, {}),
    "an index that is a list": ({"__metadata__": {"pieces": "[]"}}, {}),
    "an index of something else": ({"__metadata__": {"pieces": '{"v": [[2], 0]}'}, "w": {}}, {}),
    "an unknown type": (header(dtype="F99"), {"data": bytes(8)}),
    "a shape below zero": (header(shape=[-2]), {"data": bytes(8)}),
    "a shape of two numbers below zero": (header(shape=[-1, -2]), {"data": bytes(8)}),
    "a shape that is a text": (header(shape="2"), {"data": bytes(8)}),
    "offsets beyond the file": (header(data_offsets=[800, 808]), {"data": bytes(8)}),
    "offsets right behind the file": (header(data_offsets=[8, 16]), {"data": bytes(8)}),
    "offsets backwards": (header(data_offsets=[8, 0]), {"data": bytes(8)}),
    "three offsets": (header(data_offsets=[0, 4, 8]), {"data": bytes(8)}),
    "fewer bytes than numbers": (header(data_offsets=[0, 4]), {"data": bytes(8)}),
    "a tensor of a petabyte": (
        header() | {"__metadata__": {"pieces": '{"w": [[100000000000000], 0]}'}},
        {"data": bytes(8)},
    ),
    "a start beyond the tensor": (header() | {"__metadata__": {"pieces": '{"w": [[2], 7]}'}}, {"data": bytes(8)}),
    "a piece that ends beyond the tensor": (
        header() | {"__metadata__": {"pieces": '{"w": [[2], 1]}'}},
        {"data": bytes(8)},
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_somebody_made_up_is_refused_by_its_path(name: str, saved: Path) -> None:
    change, message = MANIFESTS[name]
    make_up(saved, change)
    with pytest.raises(ResumeError, match=f"^{re.escape(str(saved))}/.*{re.escape(message)}"):
        load_checkpoint(saved)


def test_a_manifest_of_gigabytes_is_not_read(saved: Path) -> None:
    with (saved / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ResumeError, match="no manifest is larger"):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_somebody_made_up_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    content, more = HEADERS[name]
    write_header(tmp_path / "f.safetensors", content, **more)
    with pytest.raises(ResumeError, match=f"{tmp_path}.*"):
        dict(StoredTensors(Disk(tmp_path.parent), tmp_path.name, ("f.safetensors",)))


def test_two_exchanged_checkpoints_and_a_renamed_one_are_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (8, 12):
        store.save(checkpoint(step))
    (tmp_path / "global_step_8").rename(tmp_path / "aside")
    (tmp_path / "global_step_12").rename(tmp_path / "global_step_8")
    (tmp_path / "aside").rename(tmp_path / "global_step_12")
    assert [bool(store.verify(step)) for step in (8, 12)] == [True, True]
    with pytest.raises(ResumeError, match=r"global_step_12/manifest.json belongs to step 8: the folder was renamed"):
        store.latest()
    (tmp_path / "global_step_8").rename(tmp_path / "global_step_99")
    with pytest.raises(ResumeError, match="belongs to step 12"):
        store.latest()


def test_a_linked_checkpoint_can_be_forgotten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    store.save(checkpoint(1))
    (tmp_path / "run" / "global_step_1").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "global_step_1").symlink_to(tmp_path / "elsewhere")
    store.save(checkpoint(1))
    assert not (tmp_path / "run" / "global_step_1").is_symlink()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["global_step_1"]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def refusal(read: Callable[[], Any], *, otherwise: str) -> str:
    """What the `ResumeError` says, if there is one."""
    try:
        read()
    except ResumeError as error:
        return str(error)
    return otherwise


def put(tree: Any, rng: random.Random) -> None:
    """Something odd at a place of the tree."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], dict | list) and rng.random() < 0.7:
            tree = tree[key]
            continue
        tree[key] = rng.choice(ODD)
        return


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 5_000), marks=pytest.mark.long)], ids=len)
def test_manifests_with_something_odd_at_any_place_are_read_or_refused(saved: Path, seeds: range) -> None:
    manifest = (saved / "manifest.json").read_text()
    for seed in seeds:
        (saved / "manifest.json").write_text(manifest)
        make_up(saved, partial(put, rng=random.Random(seed)))
        assert str(saved) in refusal(partial(load_checkpoint, saved), otherwise=str(saved)), seed


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 5_000), marks=pytest.mark.long)], ids=len)
def test_headers_with_something_odd_at_any_place_are_read_or_refused(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        rng, body = random.Random(seed), header()
        index = json.loads(body["__metadata__"]["pieces"])
        put(rng.choice([body, index]), rng)
        if isinstance(body.get("__metadata__"), dict):
            body["__metadata__"]["pieces"] = json.dumps(index)
        write_header(tmp_path / "f", body, data=bytes(8))
        tensors = StoredTensors(Disk(tmp_path.parent), tmp_path.name, ("f",))
        assert str(tmp_path) in refusal(partial(dict, tensors), otherwise=str(tmp_path)), seed
