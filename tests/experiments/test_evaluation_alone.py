"""`skyrl eval` and `skyrl generate`: what a run's own evaluation found is found again, from each of its forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from skyrl.cli.main import cli
from skyrl.config import SkyRLTrainConfig, compose
from skyrl.config.loading.stored import stored_form
from skyrl.errors import ConfigError, ResumeError, UserError
from skyrl.tools.sampling_alone import new_warnings
from skyrl.tools.sampling_target import compose_sampling
from tests.nano_run import all_metrics, as_words, overrides, train


def skyrl(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def found(*words: str) -> dict[str, Any]:
    """The results that the command prints as JSON."""
    result = skyrl("eval", *words, "--json")
    if result.exception is not None:
        raise result.exception
    printed: dict[str, Any] = json.loads(result.stdout)["result"]
    return printed


def of_training(out: Path, step: int) -> dict[str, float]:
    """What the run itself measured after this step."""
    [record] = [record for record in all_metrics(out) if record["step"] == step and "eval/all/accuracy" in record]
    return {name: value for name, value in record.items() if name.startswith("eval/")}


@pytest.fixture(scope="module")
def trained(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder around a run of six steps that was evaluated before and after every third of them."""
    out = tmp_path_factory.mktemp("trained")
    train(nano, out, generator__eval_n_samples_per_prompt=3, trainer__ckpt_interval=3)
    return out


def words(nano: Path, out: Path, **changes: Any) -> list[str]:
    return as_words(overrides(nano, out, **{"generator__eval_n_samples_per_prompt": 3, **changes}))


@pytest.mark.long
def test_each_form_of_a_model_gives_exactly_the_scores_of_the_runs_own_evaluation(
    nano: Path, trained: Path, tmp_path: Path
) -> None:
    run, reward = str(trained / "run"), f"environment.env_class={nano / 'reward.py'}:in_ascii"
    assert found(run, reward)["metrics"] == of_training(trained, 6)
    assert found(run, reward, "--step", "3")["metrics"] == of_training(trained, 3)
    checkpoint = str(trained / "checkpoints" / "global_step_3")
    assert found(checkpoint, *words(nano, tmp_path))["metrics"] == of_training(trained, 3)
    before = found(str(nano / "model"), *words(nano, tmp_path))
    assert before["metrics"] == of_training(trained, 0)
    assert of_training(trained, 0) != of_training(trained, 6), "the comparison would notice nothing"


@pytest.mark.long
def test_results_and_samples_are_in_a_new_folder_and_the_model_of_a_checkpoint_is_not(
    nano: Path, trained: Path, tmp_path: Path
) -> None:
    result = skyrl("eval", str(trained / "checkpoints" / "global_step_6"), *words(nano, tmp_path))
    assert result.exception is None
    folder = tmp_path / "run" / "evaluations" / "step_6"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "results.json", "samples"]
    assert len((folder / "samples" / "letters.jsonl").read_text().splitlines()) == 6 * 3
    assert "pass_at_2" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"{folder}")
    skyrl("eval", str(nano / "model"), *words(nano, tmp_path), "--to", str(tmp_path / "mine"))
    assert json.loads((tmp_path / "mine" / "results.json").read_text())["prompts"] == {"letters": 6, "all": 6}
    rerun = skyrl("eval", str(trained / "checkpoints" / "global_step_6"), *words(nano, tmp_path))
    assert rerun.stdout.splitlines()[-1].endswith("step_6-2"), "earlier results are kept"


@pytest.mark.long
def test_answers_of_a_run_need_no_word_for_the_code_that_only_its_configuration_names(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # of somebody who has not made the run
    run = str(trained / "run")
    with pytest.raises(ConfigError, match="environment.env_class"):
        found(run)
    result = skyrl("generate", run)
    assert result.exception is None, result.exception
    assert result.stdout.startswith("18 answers in ")


@pytest.mark.long
def test_a_run_is_served_without_the_code_that_only_its_configuration_names(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, served = str(trained / "run"), list[SkyRLTrainConfig]()
    monkeypatch.setattr("skyrl.tools.serving._serve", lambda run, *others: served.append(run))
    for words in ([run], [run, "--step", "3"], [str(trained / "checkpoints" / "global_step_3")]):
        result = skyrl("serve", *words)
        assert (result.exception, result.output) == (None, "The endpoint has stopped.\n")
    assert [config.environment.env_class for config in served] == [None] * 3


def test_an_evaluation_warns_about_the_users_words_and_not_about_what_the_run_has_written(
    nano: Path, tmp_path: Path
) -> None:
    isolated = "environment.skyrl_gym.isolate_user_env=true"
    task = f"environment.env_class={nano / 'reward.py'}:in_ascii"
    run = compose([], [*as_words(overrides(nano, tmp_path)), task, isolated]).config
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored_form(run)))
    folder = str(tmp_path / "run")
    composed = compose_sampling([folder], ["environment.env_class=gsm8k"])
    assert "environment.skyrl_gym.isolate_user_env" in {problem.path for problem in composed.warnings}
    assert new_warnings(composed, [folder]) == []
    written = compose_sampling([folder], ["environment.env_class=gsm8k", isolated])
    [problem] = new_warnings(written, [folder])
    assert problem.path == "environment.skyrl_gym.isolate_user_env"


def test_what_cannot_be_served_is_refused_before_a_checkpoint_is_written_as_a_model(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.tools.exporting.export", lambda *_, **__: pytest.fail("weights were written"))
    result = skyrl("serve", str(trained / "run"), "generator.max_turns=none", "--step", "3")
    assert isinstance(result.exception, ConfigError)


def test_answers_to_prompts_of_a_file_are_written_without_an_environment(nano: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": letter}]} for letter in "ab"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = words(nano, tmp_path, environment__env_class="nowhere.py:never")
    result = skyrl("generate", str(nano / "model"), *run, "--prompts", str(prompts), "--to", str(tmp_path / "out"))
    assert result.exception is None
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    samples = [(line["prompt"][0]["content"], line["sample"]) for line in lines]
    assert samples == [(letter, number) for letter in "ab" for number in range(3)]
    assert all(line["response_ids"] and line["logprob"] < 0 for line in lines)


@pytest.mark.long
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("engines", [1, 2])
def test_greedy_answers_of_engines_on_ray_are_those_of_this_process(nano: Path, tmp_path: Path, engines: int) -> None:
    greedy = {"generator__eval_sampling_params__temperature": 0.0, "generator__eval_n_samples_per_prompt": 1}
    ray = {
        "trainer__placement__executor": "ray",
        "trainer__placement__colocate_all": False,
        "generator__inference_engine__num_engines": engines,
    }
    local = found(str(nano / "model"), *words(nano, tmp_path / "here", **greedy))
    remote = found(str(nano / "model"), *words(nano, tmp_path / "there", **greedy, **ray))
    assert remote["metrics"] == local["metrics"]


def test_what_cannot_be_evaluated_is_refused_with_what_to_do(
    nano: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # of somebody who has not made the run
    model = str(nano / "model")
    with pytest.raises(UserError, match="is a model: also give a configuration"):
        found(model)
    with pytest.raises(
        UserError, match="nobody/nothing is not a local folder, so it is taken as a model on the hub: also"
    ):
        found("nobody/nothing")
    with pytest.raises(ConfigError, match="is code that only the stored run names"):
        found(str(trained / "run"))
    with pytest.raises(ResumeError, match="no checkpoint of step 4"):
        found(str(trained / "run"), "--step", "4")
    with pytest.raises(UserError, match="is not the folder of a run"):
        found(model, *words(nano, tmp_path), "--step", "4")
    with pytest.raises(ConfigError, match="data.val_data"):
        found(model, *words(nano, tmp_path, data__val_data=[]))
    with pytest.raises(ConfigError, match="no file"):
        found(model, *words(nano, tmp_path / "not" / "made", data__val_data=["nowhere.jsonl"]))
    assert not (tmp_path / "not").exists()
    assert not (tmp_path / "run" / "evaluations" / "step_0").exists(), "a refused command leaves no folder"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "runs/mien",
            "there is no folder runs/mien (did you mean runs/mine?). If it is a model on the hub, also give a config",
        ),
        (
            "runs/else",
            "there is no folder runs/else (runs contains mine). If it is a model on the hub, also give a configuration",
        ),
        ("./runs/mien", "there is no folder ./runs/mien (did you mean runs/mine?), and names on the hub have the form"),
        (
            "runs/mine/modell",
            "there is no folder runs/mine/modell (did you mean runs/mine/model?), and names on the hub",
        ),
        ("nope", "there is no folder nope (. contains run.toml, runs), and names on the hub have the form owner/name"),
        ("run.toml", "run.toml is a file, not a model, run or checkpoint"),
    ],
)
def test_a_mistyped_folder_is_named_before_the_hub_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "runs" / "mine" / "model").mkdir(parents=True)
    (tmp_path / "run.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        found(name)
    assert str(refused.value).startswith(message)


def test_the_length_of_training_answers_does_not_matter_to_an_evaluation(nano: Path, tmp_path: Path) -> None:
    lengths = {"sampling_params": 5000, "eval_sampling_params": 3}  # the model has 64 positions
    changes = {f"generator__{table}__max_generate_length": length for table, length in lengths.items()}
    assert found(str(nano / "model"), *words(nano, tmp_path, **changes))["prompts"] == {"letters": 6, "all": 6}
    changes["generator__eval_sampling_params__max_generate_length"] = 64
    with pytest.raises(ConfigError, match=r"generator\.eval_sampling_params\.max_generate_length"):
        found(str(nano / "model"), *words(nano, tmp_path, **changes))
