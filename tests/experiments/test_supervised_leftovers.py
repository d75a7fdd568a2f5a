"""What a supervised run left, through the commands that look at runs: checkpoints, exports, comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from skyrl.cli.main import cli
from skyrl.models.saving.reward_model import RewardModel
from tests.long_cases import long_except
from tests.supervised_run import farthest, train

pytestmark = pytest.mark.xdist_group("leftovers")


@pytest.fixture(scope="module")
def left(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("sft", "reward_model")}
    for kind, folder in folders.items():
        train(nano, folder, kind, num_epochs=1, ckpt_interval=2)
    return {kind: folder / "run" for kind, folder in folders.items()}


def said(*words: Any) -> str:
    result = CliRunner().invoke(cli, list(map(str, words)))
    return result.output if result.exception is None else f"{type(result.exception).__name__}: {result.exception}"


@pytest.mark.parametrize("kind", long_except(["sft", "reward_model"], "reward_model"))
def test_the_model_of_a_checkpoint_is_the_one_that_the_run_left(
    left: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    assert said("export", left[kind], "--to", tmp_path / "model").startswith("step 4: model in ")
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, left[kind]))
    assert one.keys() == other.keys() and farthest(one, other) == 0.0
    assert said("export", left[kind], "--step", 2).endswith(f"{left[kind] / 'exports' / 'global_step_2' / 'model'}\n")
    if kind == "reward_model":
        chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "xyz"}]
        assert RewardModel(str(tmp_path / "model")).scores([chat]) == RewardModel(str(left[kind] / "model")).scores(
            [chat]
        )


def test_the_folder_of_a_run_leads_to_its_checkpoints(left: dict[str, Path]) -> None:
    assert said("ckpt", "verify", left["sft"]).split() == ["2", "good", "4", "good"]
    assert "critic" in said("ckpt", "list", left["reward_model"])


def test_runs_are_compared_by_their_metrics_and_kinds_are_not(left: dict[str, Path]) -> None:
    assert "are equal in 5 steps, 0 to 4" in said("bisect", left["sft"], left["sft"])
    assert "kind = sft, " in said("bisect", left["sft"], left["reward_model"])
    assert said("replay", left["sft"], "--step", 2).startswith(
        f"UserError: {left['sft']} is a run of kind = sft, which samples nothing"
    )
    assert "model.lora.rank = 0" in said("export", left["sft"], "--adapter")
