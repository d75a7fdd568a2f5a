"""Settings of a class that another field names: read, checked, shown and stored like ours."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cattrs
import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import (
    AdvantageEstimatorRegistry,
    AlgorithmConfig,
    ConfigError,
    PolicyLossRegistry,
    SkyRLTrainConfig,
    compose,
    load,
    register_advantage_estimator,
    register_policy_loss,
)
from skyrl.config.loading.stored import stored_form
from skyrl.config.settings.registry import Registry
from skyrl.tree import differences, fingerprint, frozen
from tests.config.leaves import RUNNABLE

OWN = '''
from skyrl.tree import field, frozen
from skyrl.tree.validators import positive


@frozen
class Fade:
    """Where the fading begins."""

    start: int = 3
    """In tokens."""


@frozen
class Mine:
    """A loss."""

    width: float = field(default=0.2, validator=positive)
    """How wide."""

    label: str = "plain"
    """What it is called."""

    cap: float | None = None
    """Where it ends. None: nowhere."""

    fade: Fade = Fade()
    """A table of its own."""

    def __call__(self, inputs):
        return inputs.logprobs * self.width


def plain(inputs):
    return inputs.logprobs
'''
ALGORITHM = "trainer.algorithm."


@pytest.fixture
def losses(tmp_path: Path) -> str:
    file = tmp_path / "losses.py"
    file.write_text(OWN, encoding="utf-8")
    return f"{file}:Mine"


def words(name: str, *more: str) -> list[str]:
    """The command line of a run with this loss."""
    return [*(f"{path}={value}" for path, value in RUNNABLE.items()), f"{ALGORITHM}policy_loss_type={name}", *more]


def complete(width: float = 0.2, label: str = "plain", start: int = 3) -> dict[str, Any]:
    return {"width": width, "label": label, "cap": None, "fade": {"start": start}}


def test_what_is_not_written_is_stored_too(losses: str) -> None:
    run = compose([], words(losses, f"{ALGORITHM}policy_loss.fade.start=5")).config
    stored = cattrs.unstructure(run)["trainer"]["algorithm"]["policy_loss"]
    assert stored == complete(start=5)


def test_the_class_decides_what_a_word_of_the_command_line_means(losses: str) -> None:
    run = compose(
        [], words(losses, f"{ALGORITHM}policy_loss.label=10", f'{ALGORITHM}policy_loss={{"width": 1}}')
    ).config
    stored = cattrs.unstructure(run)["trainer"]["algorithm"]["policy_loss"]
    assert json.dumps(stored) == json.dumps(complete(width=1.0, label="10"))


def test_settings_may_be_written_before_the_name(losses: str) -> None:
    before = load([], [f"{ALGORITHM}policy_loss.width=0.5", f"{ALGORITHM}policy_loss_type={losses}"])
    assert before.config.trainer.algorithm.policy_loss.width == 0.5  # type: ignore[attr-defined]  # of a class of one's own
    assert before.origins[f"{ALGORITHM}policy_loss.width"][-1].location == "argument 1"


def test_every_mistake_is_told_with_its_place_at_once(losses: str) -> None:
    mistakes = ("width=-1", "labl=x", "fade.start=soon")
    with pytest.raises(ConfigError) as caught:
        compose([], words(losses, *(f"{ALGORITHM}policy_loss.{name}" for name in mistakes)))
    messages = {
        problem.path.removeprefix(f"{ALGORITHM}policy_loss."): problem.message for problem in caught.value.problems
    }
    assert messages == {
        "width": "-1.0 is not positive",
        "labl": "no such field; did you mean label?",
        "fade.start": "'soon' is not a whole number",
    }
    assert all(problem.location.startswith("argument") for problem in caught.value.problems)


def test_a_value_can_be_taken_back(losses: str) -> None:
    run = compose([], words(losses, f"{ALGORITHM}policy_loss.width=0.5", f"~{ALGORITHM}policy_loss.width")).config
    assert cattrs.unstructure(run.trainer.algorithm.policy_loss) == complete()


def test_a_stored_tree_is_read_without_importing_and_is_the_same_run(losses: str, tmp_path: Path) -> None:
    run = compose([], words(losses, f"{ALGORITHM}policy_loss.width=0.5")).config
    restored = cattrs.structure(json.loads(json.dumps(cattrs.unstructure(run))), SkyRLTrainConfig)
    assert not hasattr(restored.trainer.algorithm.policy_loss, "width")
    assert differences(run, restored) == {}
    assert fingerprint(run) == fingerprint(restored)
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)), encoding="utf-8")
    again_by_hand = f"{ALGORITHM}policy_loss_type={run.trainer.algorithm.policy_loss_type}"
    reread = compose([tmp_path], [again_by_hand, f"{ALGORITHM}policy_loss.label=other"]).config
    assert cattrs.unstructure(reread.trainer.algorithm.policy_loss) == complete(width=0.5, label="other")


def test_another_setting_is_another_run(losses: str) -> None:
    one, other = (compose([], words(losses, f"{ALGORITHM}policy_loss.width={width}")).config for width in (0.5, 0.6))
    assert differences(one, other) == {f"{ALGORITHM}policy_loss.width": (0.5, 0.6)}
    assert fingerprint(one) != fingerprint(other)


def test_the_tree_goes_to_another_process_with_it(losses: str) -> None:
    algorithm = compose([], words(losses, f"{ALGORITHM}policy_loss.width=0.5")).config.trainer.algorithm
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).policy_loss.width)"
    result = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(algorithm), capture_output=True, check=True
    )
    assert result.stdout.strip() == b"0.5"


def test_an_instance_may_stand_there() -> None:
    @frozen
    class Own:
        width: float = 0.1

    algorithm = AlgorithmConfig(policy_loss=Own(width=0.7))  # type: ignore[arg-type]  # of a class of one's own
    assert cattrs.unstructure(algorithm)["policy_loss"] == {"width": 0.7}


def test_it_is_shown_explained_and_documented(losses: str) -> None:
    arguments = words(losses, f"{ALGORITHM}policy_loss.width=0.5")
    printed = {
        name: CliRunner().invoke(cli, ["config", *command, *arguments], catch_exceptions=False).output
        for name, command in {
            "show": ["show"],
            "origins": ["show", "--origins"],
            "sparse": ["show", "--sparse"],
            "explain": ["explain", f"{ALGORITHM}policy_loss.width"],
            "docs": ["docs"],
            "schema": ["schema"],
        }.items()
    }
    for name in ("show", "sparse"):  # what only shows a file does not import the loss, so that defaults are not there
        assert json.loads(printed[name])["trainer"]["algorithm"]["policy_loss"] == {"width": 0.5}
    assert f"{ALGORITHM}policy_loss.width = 0.5" in printed["origins"]
    assert "argument" in printed["explain"]
    assert "## trainer.algorithm.policy_loss.fade" in printed["docs"] and "How wide." in printed["docs"]
    schema = json.loads(printed["schema"])["$defs"]
    assert schema["AlgorithmConfig"]["properties"]["policy_loss"]["$ref"] == "#/$defs/Mine"
    assert schema["Mine"]["properties"]["width"]["anyOf"][0]["exclusiveMinimum"] == 0


def test_it_is_written_as_toml_and_read_back(losses: str, tmp_path: Path) -> None:
    arguments = words(losses, f"{ALGORITHM}policy_loss.cap=2", f"{ALGORITHM}policy_loss.fade.start=4")
    printed = CliRunner().invoke(cli, ["config", "show", "--format", "toml", *arguments], catch_exceptions=False)
    file = tmp_path / "run.toml"
    file.write_text(printed.output, encoding="utf-8")
    assert load([file]).config.trainer.algorithm == compose([], arguments).config.trainer.algorithm


def test_a_function_takes_no_settings(losses: str) -> None:
    plain = losses.replace(":Mine", ":plain")
    assert compose([], words(plain)).config
    with pytest.raises(ConfigError, match="takes no settings"):
        compose([], words(plain, f"{ALGORITHM}policy_loss.width=0.5"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from skyrl.tree import frozen\n\n@frozen\nclass Mine:\n    width: float = 0.1\n", "has no __call__"),
        ("class Mine:\n    def __init__(self, width): ...\n    def __call__(self, inputs): ...\n", "without arguments"),
        ("Mine = 3\n", "is not a class or function"),
        ("Other = 3\n", "has no 'Mine'"),
        ("class Leaky: ...\ndef clip(inputs): ...\n", "has no 'Mine'; it defines Leaky, clip"),
        ("raise RuntimeError('no luck')\n", "RuntimeError: no luck"),
    ],
)
def test_what_cannot_be_a_loss_is_told_at_the_name(code: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        compose([], words(f"{file}:Mine"))
    [problem] = caught.value.problems
    assert problem.path == f"{ALGORITHM}policy_loss_type"
    assert message in problem.message


def test_a_file_that_cannot_be_imported_is_told_at_the_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([], words(f"{tmp_path / 'gone.py'}:Mine", f"{ALGORITHM}policy_loss.width=1"))
    [problem] = caught.value.problems
    assert problem.path == f"{ALGORITHM}policy_loss_type"
    assert "there is no file" in problem.message


# By name


@pytest.fixture
def registries() -> Iterator[None]:
    """Nothing is registered, before and after."""
    yield
    for registry in (PolicyLossRegistry, AdvantageEstimatorRegistry):
        registry._own.clear()


def test_a_registered_name_stands_for_its_class(registries: None) -> None:
    @register_policy_loss("mine")
    @frozen
    class Own:
        width: float = 0.1

        def __call__(self, inputs: Any) -> Any:
            return self.width

    run = compose([], words("mine", f"{ALGORITHM}policy_loss.width=0.3")).config
    loss: Any = run.trainer.algorithm.policy_loss
    assert loss == Own(width=0.3)
    assert PolicyLossRegistry.object("mine", loss)(None) == 0.3
    with pytest.raises(ConfigError, match="no such field; did you mean width"):
        compose([], words("mine", f"{ALGORITHM}policy_loss.widht=0.3"))


def test_a_registered_function_is_an_estimator(registries: None) -> None:
    @register_advantage_estimator("no_op")
    def nothing(batch: Any) -> Any:
        return batch

    run = compose([], words("regular", f"{ALGORITHM}advantage_estimator=no_op")).config
    assert AdvantageEstimatorRegistry.object("no_op", run.trainer.algorithm.advantage) is nothing


def test_a_name_that_is_not_registered_is_told_what_there_is(registries: None) -> None:
    register_policy_loss("mine")(lambda inputs: inputs)
    with pytest.raises(ConfigError, match=r"did you mean mine\?"):
        compose([], words("mien"))


@pytest.mark.parametrize("name", ["regular", "file.py:Mine", ""])
def test_a_name_that_is_taken_or_is_a_path_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match="already|not a valid"):
        PolicyLossRegistry.register(name, print)


def test_a_name_is_given_once() -> None:
    registry = Registry(kind="loss", field="f", table="t", built_in=())
    registry.register("mine", print)
    registry.register("mine", print)
    with pytest.raises(ValueError, match="the loss 'mine' is already registered"):
        registry.register("mine", len)
