"""The picture of a plan: every process on its GPU, and bars as long as what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest
from click.testing import CliRunner

from skyrl.cli.planning.plan import plan
from skyrl.errors import UserError
from skyrl.tools.plan_picture import NODES_SHOWN, picture
from tests.cli.test_plan import ENGINE, PLACEMENT, gpus, planned

SVG = "{http://www.w3.org/2000/svg}"
MODEL = {"trainer.policy.model.path": "Qwen/Qwen2.5-7B-Instruct", f"{PLACEMENT}gpu_kind": "H100-80"}
SHARED = {**gpus(4, "policy", "ref", nodes=2), f"{ENGINE}num_engines": 4, f"{ENGINE}tensor_parallel_size": 2}


def drawn(values: dict[str, Any]) -> Element:
    return fromstring(picture(planned(values)))


def words(root: Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_every_process_is_drawn_on_each_of_its_gpus() -> None:
    texts = words(drawn({**MODEL, **SHARED}))
    assert [word for word in texts if word.startswith("node")] == ["node 0", "node 1"]
    assert texts.count("GPU 3") == 2
    for process in ("policy 7", "ref 0"):
        assert texts.count(process) == 1
    assert texts.count("engine 3") == 2  # it computes on two GPUs


@pytest.mark.parametrize(
    ("values", "boxes"),
    [
        ({}, ["one process on a CPU"]),
        ({f"{PLACEMENT}executor": "ray"}, ["slot 0"]),
        ({f"{PLACEMENT}executor": "ray", **gpus(2, "policy", "ref"), f"{ENGINE}num_engines": 2}, ["slot 0", "slot 1"]),
        ({"trainer.device": "cuda"}, ["GPU 0"]),  # in one process, which uses one of them
        ({"trainer.device": "cuda", f"{PLACEMENT}executor": "ray"}, [f"GPU {number}" for number in range(8)]),
    ],
)
def test_a_gpu_is_drawn_only_where_there_is_one_for_the_run(values: dict[str, Any], boxes: list[str]) -> None:
    plan = planned({"trainer.device": "cpu", f"{ENGINE}backend": "torch", **values})
    on_cuda = values.get("trainer.device") == "cuda"
    assert (plan["gpus"], plan["gpus_per_node"]) == ((1, len(boxes)) if on_cuda else (0, 0))
    assert plan["slots_per_node"] == len(boxes)
    texts = words(fromstring(picture(plan)))
    assert [word for word in texts if word.startswith(("GPU", "slot", "one process"))] == boxes
    assert ("GPU" in " ".join(texts)) is on_cuda


def test_bars_are_proportional_to_bytes() -> None:
    values = {**MODEL, **SHARED}
    bars = [element for element in drawn(values).iter(f"{SVG}rect") if element.find(f"{SVG}title") is not None]
    sizes = [size for phase in planned(values)["memory"]["phases"] for size in phase["parts"].values() if size > 0]
    assert len(bars) == len(sizes)
    scale = sum(float(bar.attrib["width"]) for bar in bars) / sum(sizes)
    for bar, size in zip(bars, sizes, strict=True):
        assert float(bar.attrib["width"]) == pytest.approx(size * scale, abs=0.1)


def test_further_nodes_are_counted_and_models_of_unknown_size_are_named() -> None:
    nodes = NODES_SHOWN + 4
    root = drawn(
        {
            "trainer.policy.model.path": "my/own",
            **gpus(8, "policy", "ref", nodes=nodes),
            f"{ENGINE}num_engines": 8 * nodes,
        }
    )
    assert "and 4 more nodes like these" in words(root)
    assert any(word.startswith("memory: ") for word in words(root))
    inside = [
        float(element.attrib["x"]) + float(element.attrib.get("width", "0").rstrip("%"))
        for element in root.iter(f"{SVG}rect")
        if "x" in element.attrib
    ]
    assert max(inside) <= float(root.attrib["width"])


def test_the_command_writes_the_file_and_prints_the_plan(tmp_path: Path) -> None:
    words = ["trainer.device=cpu", "trainer.logger=console", 'data.train_data=["rows"]', f"{ENGINE}backend=torch"]
    words += ["trainer.policy.model.path=m", "--svg", str(tmp_path / "plan.svg")]
    result = CliRunner().invoke(plan, words)
    assert result.exit_code == 0, result.output
    assert "policy" in result.output
    assert fromstring((tmp_path / "plan.svg").read_text(encoding="utf-8")).tag == f"{SVG}svg"
    nowhere = CliRunner().invoke(plan, [*words[:-1], str(tmp_path / "missing" / "plan.svg")])
    assert str(nowhere.exception).endswith("plan.svg cannot be written: No such file or directory")
    refused = CliRunner().invoke(plan, [*words, "--fit", "8"])
    assert isinstance(refused.exception, UserError)
