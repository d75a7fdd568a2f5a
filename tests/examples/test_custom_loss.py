"""The example of a loss of one's own: its setting is a field like any other."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.algorithms.losses import LossInputs
from skyrl.config import ConfigError, compose
from skyrl.training.objective import policy_loss
from tests.nano_run import metrics, overrides, train

ROOT = Path(__file__).parents[2]
FILES = [str(ROOT / "examples/quickstart/grpo.toml"), str(ROOT / "examples/custom_loss/soft_clip.toml")]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def inputs() -> LossInputs:
    """One token whose ratio is e^0.5 = 1.65."""
    ones = torch.ones(1, 1)
    return LossInputs(
        logprobs=-0.5 * ones, old_logprobs=-ones, rollout_logprobs=-ones, advantages=ones, mask=torch.ones(1, 1).bool()
    )


def test_its_setting_comes_from_the_file() -> None:
    loss = policy_loss(compose(FILES).config.trainer.algorithm)
    expected = -0.3 * torch.tanh(torch.tensor((1.6487213 - 1) / 0.3))
    torch.testing.assert_close(loss(inputs()).squeeze(), expected)


def test_its_setting_is_changed_on_the_command_line() -> None:
    loss: Any = policy_loss(compose(FILES, ["trainer.algorithm.policy_loss.width=0.1"]).config.trainer.algorithm)
    assert loss.width == 0.1


def test_a_wrong_type_is_refused_with_file_and_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text('[trainer.algorithm.policy_loss]\nwidth = "wide"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        compose([*FILES, str(broken)])
    [problem] = caught.value.problems
    assert problem.path == "trainer.algorithm.policy_loss.width"
    assert (problem.message, problem.location) == ("'wide' is not a number", f"{broken}:2")


@pytest.mark.parametrize(
    ("argument", "path", "message"),
    [
        ("trainer.algorithm.policy_loss.width=-1", "width", "-1.0 is not positive"),
        ("trainer.algorithm.policy_loss.widht=0.1", "widht", "no such field; did you mean width?"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_argument(argument: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(FILES, [argument])
    [problem] = caught.value.problems
    assert (problem.path, problem.location) == (f"trainer.algorithm.policy_loss.{path}", "argument 1")
    assert problem.message == message


def test_a_setting_of_a_built_in_loss_is_not_looked_for_in_its_table() -> None:
    built_in = "trainer.algorithm.policy_loss_type=regular"
    warnings = compose(FILES, [built_in]).warnings
    assert "trainer.algorithm.policy_loss" in [warning.path for warning in warnings]


def test_it_can_be_sent_to_another_process() -> None:
    loss = policy_loss(compose(FILES).config.trainer.algorithm)
    restored = pickle.loads(pickle.dumps(loss))
    assert torch.equal(restored(inputs()), loss(inputs()))


def test_a_run_trains_with_it_logs_what_it_measures_and_stores_its_setting(nano: Path, tmp_path: Path) -> None:
    loss = f"{ROOT / 'examples/custom_loss/soft_clip.py'}:SoftClip"
    changes = {"trainer__algorithm__policy_loss_type": loss, "trainer__algorithm__policy_loss": {"width": 0.01}}
    sizes = {"trainer__policy_mini_batch_size": 2, "trainer__micro_train_batch_size_per_gpu": 3}
    train(nano, tmp_path, trainer__max_training_steps=2, **sizes, **changes)
    assert [
        0 <= row["policy/faded_ratio"] <= 1 for row in metrics(tmp_path, own={"policy/faded_ratio"}) if row["step"]
    ] == [True, True]
    stored = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert stored["config"]["trainer"]["algorithm"]["policy_loss"] == {"width": 0.01}


def test_an_estimator_of_ones_own_may_be_a_function(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def own(batch):\n    return batch.scores.unsqueeze(1) * batch.loss_mask\n", encoding="utf-8")
    changes = overrides(nano, tmp_path, trainer__algorithm__advantage_estimator=f"{file}:own")
    assert compose([], changes).config.trainer.algorithm.advantage_estimator.endswith("own.py:own")
    with pytest.raises(ConfigError, match="takes no settings"):
        compose([], changes | {"trainer.algorithm.advantage.scale": 2.0})
