"""Harbor's trials as episodes, with stand-ins for the two names of Harbor that are used."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import openai
import pytest

from skyrl.config.settings.environment import AgentConfig
from skyrl.data.sources import iterate_rows
from skyrl.errors import RewardError, UserError
from skyrl.rollout.harbor import play, reward_of, trial_settings
from tests.rollout.agent_episodes import scripted

ROW = {"harbor_task": "/tasks/one", "messages": [{"role": "user", "content": "1+2?"}]}
WAY = ("http://127.0.0.1:1/v1", "key", "tiny")


def result(rewards: dict[str, float] | None = None, failed: str = "") -> Any:
    """A `TrialResult`."""
    problem = SimpleNamespace(exception_type=failed, exception_message="it did") if failed else None
    verdict = None if rewards is None else SimpleNamespace(rewards=rewards)
    return SimpleNamespace(exception_info=problem, verifier_result=verdict)


class TrialConfig(SimpleNamespace):
    """Harbor's settings of a trial, of which two are looked at."""

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> TrialConfig:
        if values.get("trials_dir", "") == 3:
            raise ValueError("trials_dir is a folder")
        return cls(**values)


class Trial:
    """A trial whose agent asks the model once, and whose verifier pays for an answer of `3`."""

    given: ClassVar[list[TrialConfig]] = []

    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self.given.append(config)

    async def run(self) -> Any:
        agent = self.config.agent
        key = agent["kwargs"]["llm_call_kwargs"]["api_key"]
        async with openai.AsyncOpenAI(base_url=agent["kwargs"]["api_base"], api_key=key, max_retries=0) as client:
            model = agent["model_name"].removeprefix("hosted_vllm/")
            response = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "1+2?"}])
        return result({"reward": float(response.choices[0].message.content == "3")})


@pytest.fixture
def harbor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of Harbor's with nothing but these."""
    for name, thing in (("models.trial.config", TrialConfig), ("trial.trial", Trial)):
        module = ModuleType(f"harbor.{name}")
        setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, f"harbor.{name}", module)
    for name in ("harbor", "harbor.models", "harbor.models.trial", "harbor.trial"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["harbor.trial"], "trial", sys.modules["harbor.trial.trial"], raising=False)
    monkeypatch.setattr(Trial, "given", [])


async def test_a_trial_is_played_by_the_policy_and_paid_by_its_verifier(
    harbor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"trials_dir": "trials", "agent": {"kwargs": {"max_turns": 4}}}
    config = AgentConfig(function="skyrl.rollout.harbor:play", reward="returned", kwargs=kwargs)
    monkeypatch.setattr("skyrl.rollout.harbor.TASK", "messages")  # the rows of these episodes have no other column
    trajectory, script = await scripted(["3"], config)
    assert (trajectory.reward, trajectory.failures) == (1.0, ())
    assert script.tokenizer.decode(trajectory.response_ids).startswith("3")
    [trial_config] = Trial.given
    assert trial_config.trials_dir == "trials"
    assert trial_config.agent["kwargs"]["max_turns"] == 4
    assert trial_config.agent["model_name"] == "hosted_vllm/tiny"


def test_terminus_gets_the_way_to_the_policy_among_its_arguments() -> None:
    config = {"agent": {"kwargs": {"llm_call_kwargs": {"timeout": 9}}}, "trials_dir": "there"}
    assert trial_settings(ROW, *WAY, config) == {
        "trials_dir": "there",
        "task": {"path": "/tasks/one"},
        "agent": {
            "name": "terminus-2",
            "model_name": "hosted_vllm/tiny",
            "kwargs": {
                "api_base": "http://127.0.0.1:1/v1",
                "session_id": "key",
                "llm_call_kwargs": {"timeout": 9, "api_key": "key"},
            },
        },
    }


def test_other_agents_get_it_in_their_environment() -> None:
    agent = trial_settings(ROW, *WAY, {"agent": {"name": "aider", "env": {"A": "b"}}})["agent"]
    assert agent["env"] == {"A": "b", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "key"}


def test_a_dialogue_that_grew_too_long_is_worth_nothing() -> None:
    assert reward_of(result(failed="ContextLengthExceededError")) == 0.0


def test_the_verdict_counts_whatever_it_is_called() -> None:
    assert reward_of(result({"reward": 0.5, "speed": 3.0})) == 0.5
    assert reward_of(result({"score": 0.25})) == 0.25


@pytest.mark.parametrize(
    ("rewards", "failed", "message"),
    [
        (None, "AgentTimeoutError", "ended with AgentTimeoutError: it did"),
        (None, "", "its verifier gave no reward"),
        ({"a": 1.0, "b": 2.0}, "", "several rewards and none named reward: a, b"),
    ],
)
def test_a_trial_without_a_verdict_has_failed(rewards: dict[str, float] | None, failed: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        reward_of(result(rewards, failed))


async def test_what_is_missing_is_said(harbor: None) -> None:
    with pytest.raises(UserError, match="names no Harbor task"):
        await play({}, *WAY)
    with pytest.raises(UserError, match="does not take environment.agent.kwargs: trials_dir is a folder"):
        await play(ROW, *WAY, trials_dir=3)


async def test_without_harbor_its_installation_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harbor", None)
    with pytest.raises(UserError, match="pip install harbor"):
        await play(ROW, *WAY)


def test_a_folder_of_tasks_is_a_source_of_prompts(tmp_path: Path) -> None:
    for name in ("b", "a", "no task"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instruction.md").write_text(f"Do {name}.")
    for name in ("a", "b"):
        (tmp_path / name / "task.toml").write_text("")
    assert list(iterate_rows(str(tmp_path))) == [
        {
            "prompt": [{"role": "user", "content": f"Do {name}."}],
            "harbor_task": str(tmp_path / name),
            "data_source": tmp_path.name,
        }
        for name in ("a", "b")
    ]
