"""`skyrl doctor` looks inside models, data, rewards and folders, and names each broken set-up without loading torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from skyrl.cli.preparing.doctor import UNCALLED, machine_facts
from skyrl.config import compose
from skyrl.config.derive.run_kind import RunKind
from skyrl.errors import ConfigError, Problem, ResumeError, UserError
from skyrl.experiments import counted_rows
from skyrl.experiments.first_rows import TriedTask, supervised_rows_can_be_used, tried_tasks
from skyrl.experiments.folder_checks import folders_can_be_written
from skyrl.runs.run_lock import RunLock, config_text
from skyrl.runs.run_owner import sign
from skyrl.tracking.services.run_files import stored_configuration
from tests import supervised_run
from tests.nano_run import as_words, config, overrides, train


def problems(nano: Path, out: Path, changes: Mapping[str, Any] = {}, *, run: bool = False) -> list[Problem]:
    """Everything that `doctor` says about the nano run; with `run`, what `skyrl run` says before it imports torch."""
    also = RunKind.preflight_checks if run else RunKind.doctor_checks
    try:
        return list(compose([], overrides(nano, out) | dict(changes), also=also).warnings)
    except ConfigError as error:
        return list(error.problems)


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": None}))


def without_tokenizer(model: Path) -> None:
    for file in model.iterdir():
        if file.name.startswith(("tokenizer", "vocab", "merges", "chat_template")):
            file.unlink()


def with_a_missing_shard(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def copied_in_part(model: Path) -> None:
    os.truncate(model / "model.safetensors", 20_000)


def pointing_to_lfs(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def with_a_damaged_configuration(model: Path) -> None:
    (model / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without_template, "has no chat template, so prompts cannot be written"),
        (without_tokenizer, "contains no tokenizer: copy tokenizer.json"),
        (with_a_missing_shard, "lacks 1 of its 2 weight files, such as model-2.safetensors"),
        (copied_in_part, "are damaged or incomplete (model.safetensors has 20000 of its"),
        (pointing_to_lfs, "model.safetensors is a Git LFS pointer"),
        (with_a_damaged_configuration, "config.json in "),
    ],
)
def test_a_model_that_is_not_whole_is_named(
    nano: Path, tmp_path: Path, broken: Callable[[Path], None], message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(nano / "model", model)
    broken(model)
    (problem,) = problems(nano, tmp_path, {"trainer.policy.model.path": str(model)})
    assert problem.path == "trainer.policy.model.path"
    assert message in problem.message


def test_a_mistyped_model_folder_is_named_with_the_one_beside_it(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nano.parent)
    (problem,) = problems(nano, tmp_path, {"trainer.policy.model.path": f"{nano.name}/modle"})
    assert f"there is no such folder here (did you mean {nano.name}/model?)" in problem.message


def empty_parquet(file: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "prompt,answer\nhello,world\n", "row 0: prompt is 'hello', not a list of messages"),
        ("x.csv", "prompt,answer\nhello,world\n", "rename the column, and set data.prompt_column"),
        ("x.parquet", "no parquet", "cannot be read as parquet"),
        ("x.parquet", empty_parquet, "contains no rows"),
        ("x.jsonl", "", "contains no rows"),
        ("x.jsonl", '{"question": "a"}\n', "has no column 'prompt'; its columns are question"),
        ("x.jsonl", "[1]\n", "x.jsonl:1 is [1], not an object"),
        ("x.json", "{", "is not JSON"),
    ],
)
def test_the_first_row_of_each_source_is_read(
    nano: Path, tmp_path: Path, name: str, content: str | Callable[[Path], None], message: str
) -> None:
    file = tmp_path / name
    content(file) if callable(content) else file.write_text(content, encoding="utf-8")
    for run in (False, True):
        (problem,) = problems(nano, tmp_path, {"data.train_data": [str(file)]}, run=run)
        assert problem.path == "data.train_data"
        assert message in problem.message


def test_a_mistyped_file_is_named_with_the_one_beside_it(nano: Path, tmp_path: Path) -> None:
    (problem,) = problems(nano, tmp_path, {"data.train_data": [str(nano / "trian.jsonl")]})
    assert f"(did you mean {nano / 'train.jsonl'}?)" in problem.message


REWARDS = """\
def wrong(text): return 1.0
def scored(completion, ground_truth, **others):
    return parsed(completion)
def parsed(text):
    return float(text)
async def awaited(completion, ground_truth, **others):
    return parsed(completion)
def nothing(completion, **others): return None
def skips(completion, **others):
    from skyrl.envs import SkipSample
    raise SkipSample("an empty answer")
async def fine(completion, **others): return 1.0
def written(completion, **others): return "1.0" if completion else 0.0
def fails(completion, ground_truth, **others): return 1.0 / (completion != ground_truth)
def boxed(completion, **others): return float(__import__("re").search("<a>(.*)</a>", completion).group(1))
def misnames(completion, **row): return row["reward_spce"]
def unsaid(completion, **others):
    if not completion:
        return 0.0
def grouped(completions, **columns): return [1.0, 2.0]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "rewards.py:1 wrong(text) cannot be called with row 0 of"),
        ("scored", "raised ValueError: could not convert string to float: '' ({file}:5, in parsed)"),
        ("awaited", "raised ValueError: could not convert string to float: '' ({file}:5, in parsed)"),
        ("nothing", "gave the reward None, which is not a finite number\nreturn one finite number for each answer"),
        ("written", "gave the reward '1.0', which is a text, not a finite number\nreturn one finite number"),
        ("fails", "to row 0 of {rows}, raised ZeroDivisionError: float division by zero ({file}:14, in fails)"),
        ("fails", "return a reward for every answer, or raise skyrl.envs.SkipSample"),
        ("scored", "a model may give an empty answer: return a reward for it, or raise skyrl.envs.SkipSample"),
        (
            "misnames",
            "\nrow 0 has data_source, reward_spec.method, reward_spec.ground_truth; did you mean reward_spec?",
        ),
        ("unsaid", "gave the reward None, which is not a finite number\nreturn one finite number for each answer"),
        ("grouped", "a TRL reward function gives a list with one number for each completion"),
    ],
)
def test_a_reward_function_is_called_on_an_empty_answer_and_on_the_ground_truth(
    nano: Path, tmp_path: Path, name: str, message: str
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    (problem,) = problems(nano, tmp_path, {"environment.env_class": f"{file}:{name}"})
    assert problem.path == "environment.env_class"
    message = message.replace("{file}", str(file)).replace("{rows}", str(nano / "train.jsonl"))
    assert message in f"{problem.message}\n{problem.hint}"


@pytest.mark.parametrize("name", ["fien", "PI"])
def test_what_is_wrong_with_the_task_of_the_configuration_is_told_once(nano: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"{REWARDS}\nPI = 3\n", encoding="utf-8")
    (problem,) = problems(nano, tmp_path, {"environment.env_class": f"{file}:{name}"})
    messages = {"fien": f"{file} has no 'fien'; did you mean fine?", "PI": f"{file}:PI is neither a subclass of"}
    assert problem.message.startswith(messages[name])


@pytest.mark.parametrize("name", ["skips", "fine"])
def test_a_reward_function_that_takes_an_empty_answer_is_no_problem(nano: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    assert problems(nano, tmp_path, {"environment.env_class": f"{file}:{name}"}) == []


def test_a_run_looks_at_the_signature_alone_and_calls_nothing(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    (problem,) = problems(nano, tmp_path, {"environment.env_class": f"{file}:wrong"}, run=True)
    assert "wrong(text) cannot be called" in problem.message
    assert problems(nano, tmp_path, {"environment.env_class": f"{file}:scored"}, run=True) == []


def test_an_isolated_reward_is_called_in_its_sandbox_and_named_with_its_line(nano: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    isolated = {"environment.skyrl_gym.isolate_user_env": True, "environment.env_class": f"{file}:scored"}
    (problem,) = problems(nano, tmp_path, isolated)
    assert "rewards.py:5, in parsed" in problem.message


def test_a_ground_truth_that_the_reward_asks_for_and_no_row_has_is_named(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n' * 4, encoding="utf-8")
    (problem,) = problems(nano, tmp_path, {"data.train_data": [str(file)]}, run=True)
    assert (problem.path, problem.severity) == ("data.train_data", "error")
    assert f"{file}, row 0 has no ground_truth, which" in problem.message
    assert "in_ascii(completion" in problem.message
    assert problem.hint.startswith("row 0 has prompt, answer; data.answer_column names")
    assert problems(nano, tmp_path, {"data.train_data": [str(file)], "data.answer_column": "answer"}) == []


def rows_of_which_two_have_no_ground_truth(tmp_path: Path) -> Path:
    file = tmp_path / "x.jsonl"
    truths: list[Any] = [{"ground_truth": "b"}, {"ground_truth": None}, None, {"ground_truth": "b"}]
    rows = [{"prompt": [{"role": "user", "content": "a"}], "reward_spec": truth} for truth in truths]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_doctor_counts_the_rows_that_lack_what_the_reward_asks_for(nano: Path, tmp_path: Path) -> None:
    changes = {"data.train_data": [str(rows_of_which_two_have_no_ground_truth(tmp_path))]}
    (problem,) = problems(nano, tmp_path, changes)
    assert problem.severity == "error"
    assert problem.message.startswith(f"2 of 4 rows of {tmp_path}/x.jsonl lack what their reward needs (row 1, row 2)")
    assert "row 1 has no ground_truth, which" in problem.message
    (skipped,) = problems(nano, tmp_path, changes | {"data.bad_rows": "skip"})
    assert (skipped.severity, skipped.message) == ("warning", problem.message)
    assert problems(nano, tmp_path, changes, run=True) == []  # the run reads them all, and says so then


def test_a_file_of_texts_and_numbers_as_ground_truths_is_named(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    rows = [{"prompt": [{"role": "user", "content": "a"}], "reward_spec": {"ground_truth": truth}} for truth in "ab"]
    rows[1]["reward_spec"] = {"ground_truth": 18}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 2), encoding="utf-8")
    (problem,) = problems(nano, tmp_path, {"data.train_data": [str(file)]})
    assert (problem.path, problem.severity) == ("data.train_data", "warning")
    assert problem.message == f"the ground truths of {file} are texts and numbers, such as 'a' (row 0) and 18 (row 1)"


ASKING = """\
def optional(completion, ground_truth=None, **others): return 1.0
def others_alone(completion, **others): return 1.0
def reference(completion, reference, **others): return 1.0
def needs(completion, ground_truth, **others): return 1.0
"""


@pytest.mark.parametrize("name", ["optional", "others_alone"])
def test_a_function_with_a_default_asks_rows_for_nothing(nano: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "asking.py").write_text(ASKING, encoding="utf-8")
    rows = str(rows_of_which_two_have_no_ground_truth(tmp_path))
    changes = {"data.train_data": [rows], "environment.env_class": f"{tmp_path}/asking.py:{name}"}
    assert problems(nano, tmp_path, changes) == []


def test_any_column_may_be_asked_for(nano: Path, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING, encoding="utf-8")
    findings = problems(nano, tmp_path, {"environment.env_class": f"{tmp_path}/asking.py:reference"}, run=True)
    assert {problem.path for problem in findings} == {"data.train_data", "data.val_data"}
    for problem in findings:
        assert "row 0 has no reference, which " in problem.message
        assert "asking.py:3 reference(completion, reference, **others) needs" in problem.message


def test_what_an_isolated_reward_asks_for_is_known(nano: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "asking.py").write_text(ASKING, encoding="utf-8")
    rows = str(rows_of_which_two_have_no_ground_truth(tmp_path))
    isolated = {"environment.skyrl_gym.isolate_user_env": True, "data.train_data": [rows]}
    (problem,) = problems(nano, tmp_path, isolated | {"environment.env_class": f"{tmp_path}/asking.py:needs"})
    assert "(row 1, row 2): row 1 has no ground_truth, which" in problem.message
    assert "asking.py:needs needs" in problem.message


@pytest.mark.parametrize("run", [False, True])
def test_a_role_that_the_template_does_not_name_is_a_warning(run: bool, nano: Path, tmp_path: Path) -> None:
    roles = [["user"], ["system", "usr"], ["usr"], ["critic"]]
    rows = [
        {"prompt": [{"role": role, "content": "a"} for role in chat], "reward_spec": {"ground_truth": "b"}}
        for chat in roles
    ]
    source = supervised_run.write(tmp_path / "rows.jsonl", rows * 4)
    warnings = {item.hint: item.message for item in problems(nano, tmp_path, {"data.train_data": [source]}, run=run)}
    assert warnings == {
        "did you mean user?": f"{source}, row 1 has a message of the role 'usr', unknown to the chat template",
        "usual roles are system, developer, user, assistant, tool, function, ipython": (
            f"{source}, row 3 has a message of the role 'critic', unknown to the chat template"
        ),
    }
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ {'usr': 'U', 'critic': 'C'}.get(m.role, m.role) + m.content }}{% endfor %}"
    )
    changes = {"generator.chat_template.source": "file", "generator.chat_template.name_or_path": str(template)}
    assert problems(nano, tmp_path, {"data.train_data": [source], **changes}, run=run) == []


def test_a_role_of_a_supervised_chat_that_the_template_does_not_name_is_a_warning(nano: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "usr", "content": "a"}, {"role": "assistant", "content": "b"}]}
    source = supervised_run.write(tmp_path / "rows.jsonl", [row] * 8)
    run: Any = compose([], supervised_run.settings(nano, tmp_path, "sft", train_datasets=(source,))).config
    (problem,) = supervised_rows_can_be_used(all_rows=True)(run)
    assert (problem.path, problem.severity, problem.hint) == ("train_datasets", "warning", "did you mean user?")


def test_empty_ground_truths_are_counted(nano: Path, tmp_path: Path) -> None:
    rows = [{**PROMPT, "reward_spec": {"ground_truth": truth}} for truth in ("b", "", "", "c")]
    source = supervised_run.write(tmp_path / "rows.jsonl", rows * 4)
    (problem,) = problems(nano, tmp_path, {"data.train_data": [source]})
    assert (problem.severity, problem.message) == (
        "warning",
        f"8 of 16 ground truths of {source} are empty, the first in row 1",
    )


@pytest.mark.parametrize(("compared", "warnings"), [("ground_truth", 1), ("str(ground_truth)", 0)])
def test_a_number_that_is_compared_with_a_text_is_named(
    compared: str, warnings: int, nano: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        f"def right(completion, ground_truth, **columns):\n    return float(completion == {compared})\n"
    )
    source = supervised_run.write(tmp_path / "rows.jsonl", [{**PROMPT, "reward_spec": {"ground_truth": 4}}] * 16)
    changes = {"data.train_data": [source], "environment.env_class": f"{tmp_path}/own.py:right"}
    messages = [problem.message for problem in problems(nano, tmp_path, changes)]
    message = f"{source} the reward of an empty answer, 0, and the ground truth is the number 4"
    assert [message in item for item in messages] == [True] * warnings


def test_an_environment_of_ours_is_made_from_the_first_row(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "a"}]}\n' * 4, encoding="utf-8")
    changes = {"data.train_data": [str(file)], "data.val_data": [str(file)], "environment.env_class": "gsm8k"}
    findings = problems(nano, tmp_path, changes)
    assert [problem.path for problem in findings] == ["data.train_data", "data.val_data"]
    assert all(
        "4 of 4 rows" in problem.message and "needs the column reward_spec" in problem.message for problem in findings
    )


def test_a_number_of_steps_that_the_rows_do_not_last_for_is_a_warning(nano: Path, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "go"}], "reward_spec": {"ground_truth": "4"}}
    (rows := tmp_path / "x.jsonl").write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    changes = {"data.train_data": [str(rows)], "trainer.max_training_steps": 9, "trainer.epochs": 2}
    [warning] = [item for item in problems(nano, tmp_path, changes) if item.path == "trainer.max_training_steps"]
    assert warning.severity == "warning" and warning.hint == "raise trainer.epochs"
    assert " of the 9 steps: the data ends after trainer.epochs = 2 (4 rows / " in warning.message
    assert not [item for item in problems(nano, tmp_path, changes, run=True) if item.path == warning.path]


PASSES_OVER = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
SHOWS_TOOLS = PASSES_OVER + "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
ADD = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("row", "template", "missing"),
    [
        ({"prompt": [{"role": "human", "content": "2+2?"}]}, PASSES_OVER, "the content of a message of human ('2+2?')"),
        ({"prompt": [{"role": "user", "content": "go", "name": "Ann"}]}, PASSES_OVER, "the name of a message of user"),
        ({"prompt": [{"role": "user", "content": "go"}], "tools": [ADD]}, PASSES_OVER, "the tool add"),
        ({"prompt": [{"role": "user", "content": "go"}], "tools": [ADD]}, SHOWS_TOOLS, ""),
        ({"prompt": [{"role": "assistant", "tool_calls": [CALL]}]}, PASSES_OVER, "the call of add"),
        ({"prompt": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "So"}]}, PASSES_OVER, ""),
    ],
)
def test_what_the_template_drops_of_the_first_row_is_named(
    nano: Path, tmp_path: Path, row: Any, template: str, missing: str
) -> None:
    file, jinja = tmp_path / "x.jsonl", tmp_path / "mine.jinja"
    file.write_text((json.dumps({"reward_spec": {"ground_truth": "4"}, **row}) + "\n") * 4, encoding="utf-8")
    jinja.write_text(template, encoding="utf-8")
    changes = {"generator.chat_template.source": "file", "generator.chat_template.name_or_path": str(jinja)}
    findings = problems(nano, tmp_path, {**changes, "data.train_data": [str(file)]})
    messages = [problem.message for problem in findings if problem.path == "data.train_data"]
    if missing:
        assert len(messages) == 1 and f"x.jsonl, row 0: the chat template leaves out {missing}" in messages[0]
    else:
        assert messages == []


WITH_A_TOOL = """
from skyrl.envs import Env, EnvStep
class Adds(Env):
    def init(self, prompt):
        self.tool = self.extras["tool"]
        return super().init(prompt)
    def step(self, action):
        return EnvStep(reward=0.0, done=True)
    def tool_schemas(self):
        return ({"type": "function", "function": {"name": self.tool}},)
"""


@pytest.mark.parametrize(
    ("template", "columns", "message"),
    [
        (PASSES_OVER, {"tool": "add"}, "row 0: the chat template leaves out the tool add"),
        (SHOWS_TOOLS, {"tool": "add"}, ""),
        (SHOWS_TOOLS, {}, "starting on row 0 of"),
    ],
)
def test_an_environment_whose_tools_the_template_hides_is_named(
    nano: Path, tmp_path: Path, template: str, columns: dict[str, str], message: str
) -> None:
    rows, jinja, code = tmp_path / "x.jsonl", tmp_path / "mine.jinja", tmp_path / "adds.py"
    rows.write_text((json.dumps({"prompt": [{"role": "user", "content": "go"}], **columns}) + "\n") * 4)
    jinja.write_text(template, encoding="utf-8")
    code.write_text(WITH_A_TOOL, encoding="utf-8")
    changes = {
        "generator.chat_template.source": "file",
        "generator.chat_template.name_or_path": str(jinja),
        "data.train_data": [str(rows)],
        "environment.env_class": f"{code}:Adds",
    }
    messages = [item.message for item in problems(nano, tmp_path, changes) if item.path == "environment.env_class"]
    assert [message in item for item in messages] == [True] * bool(message)
    assert not [item for item in problems(nano, tmp_path, changes, run=True) if item.path == "environment.env_class"]
    if not message:
        run = compose([], overrides(nano, tmp_path) | changes).config
        assert [*tried_tasks(run)] == [TriedTask(name=f"{code}:Adds", uncalled=("add",))]
        assert [*tried_tasks(run, call_tools=True)] == [TriedTask(name=f"{code}:Adds", uncalled=("add",))]


TOOLS = """
from skyrl.envs import EnvStep
from skyrl.envs.tools import Tool, ToolEnv, ToolFailed
def schema(**fields):
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
def adds(a, b):
    return a + b
def looks_up(town):
    return {"Rome": 1}[town]
def refuses(town):
    raise ToolFailed(f"there is no {town}")
WHOLE, TEXT = {"type": "integer", "minimum": 3}, {"type": "string"}
class Shop(ToolEnv):
    tools = TOOLS
    def judge(self, answer):
        return EnvStep(reward=0.0, done=True)
"""


@pytest.mark.parametrize(
    ("tools", "called", "uncalled", "failure"),
    [
        ("schema(a=WHOLE, b=WHOLE), run=adds", ("it",), (), ""),
        ("schema(town=TEXT), run=refuses", ("it",), (), ""),
        ("schema(town={**TEXT, 'pattern': '^[A-Z]$'}), run=looks_up", (), ("it",), ""),
        (
            "schema(a=WHOLE, b=TEXT), run=adds",
            ("it",),
            (),
            """called with {"a": 3, "b": "text"}, raised TypeError: unsupported operand type(s) for +: """
            "'int' and 'str' ({code}:7, in adds)",
        ),
        ("schema(town=TEXT), run=looks_up", ("it",), (), "raised KeyError: 'text' ({code}:9, in looks_up)"),
        (
            "schema(a=WHOLE), run=lambda a: __import__('threading').Event().wait(), seconds=0.01",
            ("it",),
            (),
            "returned nothing within 0.01 s",
        ),
    ],
)
def test_doctor_calls_tools_if_it_is_asked_to(
    nano: Path, tmp_path: Path, tools: str, called: tuple[str, ...], uncalled: tuple[str, ...], failure: str
) -> None:
    code, jinja = tmp_path / "shop.py", tmp_path / "mine.jinja"
    jinja.write_text(SHOWS_TOOLS, encoding="utf-8")
    code.write_text(
        TOOLS.replace("TOOLS", f"(Tool(name='it', description='x', parameters={tools}),)"), encoding="utf-8"
    )
    changes = {
        "generator.chat_template.source": "file",
        "generator.chat_template.name_or_path": str(jinja),
        "environment.env_class": f"{code}:Shop",
    }
    run = compose([], overrides(nano, tmp_path) | changes).config
    assert [*tried_tasks(run)] == [TriedTask(name=f"{code}:Shop", uncalled=("it",))]
    tasks = tried_tasks(run, call_tools=True)
    assert next(tasks) == TriedTask(name=f"{code}:Shop", called=called, uncalled=uncalled)
    problems = []
    try:
        assert next(tasks, None) is None
    except ConfigError as error:
        problems = [problem.message for problem in error.problems]
    assert [failure.replace("{code}", str(code)) in message for message in problems] == [True] * bool(failure)


def test_a_tool_that_returns_nothing_is_named(nano: Path, tmp_path: Path) -> None:
    code, jinja = tmp_path / "shop.py", tmp_path / "mine.jinja"
    jinja.write_text(SHOWS_TOOLS, encoding="utf-8")
    tools = "tuple(Tool(name=n, description='x', parameters=schema(a=WHOLE), run=r) for n, r in RUNS)"
    runs = "RUNS = [('prints', lambda a: print(a)), ('refuses', lambda a: refuses(a)), ('doubles', lambda a: 2 * a)]\n"
    code.write_text(TOOLS.replace("TOOLS", tools).replace("class Shop", f"{runs}class Shop"), encoding="utf-8")
    changes = {
        "generator.chat_template.source": "file",
        "generator.chat_template.name_or_path": str(jinja),
        "environment.env_class": f"{code}:Shop",
    }
    run = compose([], overrides(nano, tmp_path) | changes).config
    (task,) = tried_tasks(run, call_tools=True)
    assert task == TriedTask(name=f"{code}:Shop", called=("prints", "refuses", "doubles"), returned_none=("prints",))
    none = "; prints returned None, which the policy reads as null: return what it should read"
    assert dict(machine_facts(run, call_tools=True))["tools"] == f"prints, refuses, doubles called once{none}"
    assert dict(machine_facts(run))[UNCALLED] == "prints, refuses, doubles (--call-tools calls each once)"


PLAYS = """
from skyrl.envs import Env, EnvStep
class Plays(Env):
    def step(self, action):
        return {step}
"""


@pytest.mark.parametrize(
    ("step", "message", "hint"),
    [
        ("EnvStep(reward=1.0, done=True)", "", ""),
        ("EnvStep(reward=None, done=True)", "gave the reward None", "return one finite number for each answer"),
        ("1.0", "returned 1.0 from step() instead of an EnvStep, such as EnvStep(reward=1.0, done=True)", ""),
        ("EnvStep(reward=self.rewrad, done=True)", "has no attribute 'rewrad'", ""),
        ("EnvStep(reward=self.extras['awnser'], done=True)", "KeyError: 'awnser'", "row 0 has data_source, reward_"),
        ("(_ for _ in ()).throw(KeyError)", "raised KeyError", ""),
        ("EnvStep(reward={'c': 1}.get(action[0], 0), done=True)", "IndexError", "a model may give an empty answer"),
    ],
)
def test_an_environment_class_is_played_on_the_first_row(
    nano: Path, tmp_path: Path, step: str, message: str, hint: str
) -> None:
    code = tmp_path / "plays.py"
    code.write_text(PLAYS.format(step=step), encoding="utf-8")
    findings = problems(nano, tmp_path, {"environment.env_class": f"{code}:Plays"})
    assert [message in item.message for item in findings] == [True] * bool(message)
    assert all(item.hint.startswith(hint) and bool(item.hint) == bool(hint) for item in findings)


def test_an_environment_without_tools_to_call_is_named(nano: Path, tmp_path: Path) -> None:
    code = tmp_path / "scales.py"
    code.write_text("from skyrl.envs.tools import ToolEnv\nclass Scales(ToolEnv):\n    def judge(self, answer): ...\n")
    (problem,) = problems(nano, tmp_path, {"environment.env_class": f"{code}:Scales"})
    assert problem.message == f"{code}:Scales has no tools for row 0 of {nano / 'train.jsonl'}"
    assert problem.hint.startswith("tools = (weigh,) in the class")


def test_a_template_that_refuses_the_first_row_is_named(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "strict.jinja"
    file.write_text("{% if messages[0].role == 'user' %}{{ raise_exception('no system message') }}{% endif %}")
    changes = {"generator.chat_template.source": "file", "generator.chat_template.name_or_path": str(file)}
    findings = problems(nano, tmp_path, changes)
    assert {problem.path for problem in findings} == {"data.train_data", "data.val_data"}
    assert all(
        "row 0: the chat template refuses the prompt: no system message" in problem.message for problem in findings
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (4096, "4096 tokens do not fit into the 64 positions of the model"),
        (63, "63 tokens and the 2 of row 0 of"),
    ],
)
def test_a_length_beyond_the_models_positions_is_named(nano: Path, tmp_path: Path, answer: int, message: str) -> None:
    findings = problems(nano, tmp_path, {"generator.sampling_params.max_generate_length": answer})
    assert message in next(problem.message for problem in findings if problem.path.endswith("max_generate_length"))


def test_a_folder_that_cannot_be_written_is_named(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (problem,) = problems(nano, tmp_path, {"trainer.run_path": str(file / "run")})
    assert problem.path == "trainer.run_path"
    assert "cannot be written to: Not a directory" in problem.message


def test_a_folder_inside_one_that_cannot_be_written_is_not_reported_beside_it(nano: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    inside = {f"trainer.{name}": str(file / "run" / name) for name in ("ckpt_path", "export_path")}
    (problem,) = problems(nano, tmp_path, {"trainer.run_path": str(file / "run"), **inside})
    assert problem.path == "trainer.run_path"


@pytest.mark.parametrize("run", [False, True])
def test_a_folder_that_another_run_has_is_named_with_its_owner(nano: Path, tmp_path: Path, run: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with FileLock(folder / ".lock"):
        sign(folder)
        (problem,) = problems(nano, tmp_path, run=run)
        assert problem.path == "trainer.run_path"
        assert f"in use by another run (process {os.getpid()} on " in problem.message
    assert problems(nano, tmp_path, run=run) == []


def test_a_disk_that_holds_no_checkpoint_is_named(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 259 x 32 embeddings, and 2 layers of 2 x 32 x 8 x (4 + 2) in attention and 3 x 32 x 48 behind it: 23,648 weights
    size = 12 * (259 * 32 + 2 * (32 * 8 * 2 * 6 + 3 * 32 * 48))
    usage = type(shutil.disk_usage(tmp_path))
    for free, severity in ((size - 1, "error"), (2 * size - 1, "warning")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(10**9, 0, free))
        (problem,) = problems(nano, tmp_path)
        assert (problem.path, problem.severity) == ("trainer.ckpt_path", severity)
        assert "283.8 kB" in problem.message and f"{free / 1e3:,.1f} kB are free" in problem.message
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 2 * size))
    assert problems(nano, tmp_path) == []


def test_doctor_imports_neither_torch_nor_transformers_and_names_no_strategy_for_one_process(
    nano: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; from skyrl.cli.main import cli\ntry: cli.main(sys.argv[1:], standalone_mode=False)\n"
        "finally: print(*{'torch', 'transformers', 'datasets', 'ray'} & set(sys.modules))"
    )
    words = as_words(overrides(nano, tmp_path))
    process = subprocess.run(
        [sys.executable, "-c", program, "doctor", *words], capture_output=True, text=True, check=True, timeout=240
    )
    *lines, imported = process.stdout.split("\n")[:-1]
    assert imported == ""
    assert lines[1] == f"  model    {nano / 'model'}, trained on cpu in one process"
    assert "fsdp2" not in process.stdout
    assert not (tmp_path / "run").exists()


def asked(**message: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **message}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (asked(), ""),
        (asked(weight=0.5), ""),
        ({**asked(), "tools": [{"type": "function", "function": {"name": "add"}}]}, ""),
        (asked(weight=-1), "row 0: the weight of a message is -1"),
        (asked(weight=0), "row 0: the weight of every assistant message is 0"),
        ({"messages": [{"role": "user", "content": "a"}]}, "row 0: no message is from the assistant"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}, ""),
        ({"instruction": "a", "output": "b"}, ""),
        ({"text": "a"}, ""),
        ({"input_ids": [1, 2]}, ""),
        ({"mesages": []}, "row 0: it has neither messages (messages_key), nor conversations, instruction and output,"),
        ({"prompt": "a", "completion": []}, "row 0: prompt and completion are not both texts, nor both lists"),
    ],
)
def test_a_first_chat_of_which_nothing_can_be_learned_is_named(
    row: dict[str, object], reason: str, nano: Path, tmp_path: Path
) -> None:
    source = supervised_run.write(tmp_path / "rows.jsonl", [row])
    settings = supervised_run.settings(nano, tmp_path, "sft", train_datasets=(source,), batch_size=1)
    run: Any = compose([], settings).config
    messages = [problem.message for problem in supervised_rows_can_be_used(all_rows=False)(run)]
    assert [f"{source}, {reason}" in message for message in messages] == ([True] if reason else [])


@pytest.mark.parametrize("path", ["trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"])
def test_a_problem_that_two_checks_find_is_told_once(path: str, nano: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class LeakyClip:\n    pass\n", encoding="utf-8")
    (problem,) = problems(nano, tmp_path, {path: f"{tmp_path}/own.py:LeekyClip"})
    assert (problem.path, problem.message) == (path, f"{tmp_path}/own.py has no 'LeekyClip'; did you mean LeakyClip?")


BLANK: dict[str, tuple[dict[str, object], dict[str, object], list[str]]] = {
    "pairs": ({"kind": "preference"}, {"prompt": "q", "chosen": "", "rejected": "n"}, ["answers"]),
    "scored pairs": ({"kind": "reward_model"}, {"prompt": " ", "chosen": "y", "rejected": ""}, ["prompts", "answers"]),
    "labelled": (
        {"kind": "preference", "loss_type": ("kto",)},
        {"prompt": "", "completion": "", "label": True},
        ["prompts", "answers"],
    ),
    "chats": ({"kind": "sft"}, {"instruction": "", "output": ""}, ["prompts", "answers"]),
    "texts": ({"kind": "sft"}, {"prompt": "q", "completion": ""}, ["answers"]),
    "asked": ({"kind": "sft"}, {"prompt": "q", "completion": "x"}, []),
}


@pytest.mark.parametrize("form", BLANK)
def test_empty_prompts_and_answers_of_rows_are_a_warning(form: str, nano: Path, tmp_path: Path) -> None:
    settings, row, parts = BLANK[form]
    source = supervised_run.write(tmp_path / "rows.jsonl", [row] * 8)
    changes = {**settings, "model.path": str(nano / "model"), "train_datasets": (source,)}
    run: Any = compose([], changes).config
    found = list(supervised_rows_can_be_used(all_rows=True)(run))
    assert [(item.path, item.severity, item.message.partition(":")[0]) for item in found] == [
        ("train_datasets", "warning", f"8 {part} in the rows of {source} are empty") for part in parts
    ]


def test_empty_prompts_are_a_warning_of_doctor_and_a_notice_of_the_run(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": [{"role": "user", "content": ""}], "reward_spec": {"ground_truth": "1"}}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 8)
    (problem,) = problems(nano, tmp_path, {"data.train_data": [str(file)]})
    assert (problem.severity, problem.message) == (
        "warning",
        f"8 prompts in the rows of {file} are empty: nothing is asked",
    )
    train(nano, tmp_path, data__train_data=[str(file)], trainer__max_training_steps=1)
    assert "8 prompts in training rows are empty: nothing is asked" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["preference", "reward_model"])
def test_a_pair_of_one_answer_is_named_before_a_model_is_loaded(kind: str, nano: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "x", "rejected": other} for other in ("y", "x")]
    source = supervised_run.write(tmp_path / "rows.jsonl", rows)
    run: Any = compose([], supervised_run.settings(nano, tmp_path, kind, train_datasets=(source,), batch_size=1)).config
    [problem] = supervised_rows_can_be_used(all_rows=True)(run)
    assert problem.message == f"{source}, row 1: chosen and rejected are the same"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "completion": "x", "lable": True}, "label is None, not true or false"),
        ({"prompt": "q", "answer": "x", "label": True}, "it has no completion"),
        ({"prompt": "q", "completion": "x", "label": True}, ""),
    ],
)
def test_a_single_answer_is_judged_with_its_label(
    row: dict[str, object], reason: str, nano: Path, tmp_path: Path
) -> None:
    source = supervised_run.write(tmp_path / "rows.jsonl", [row, row])
    settings = supervised_run.settings(nano, tmp_path, "preference", train_datasets=(source,), loss_type="kto")
    run: Any = compose([], settings | {"batch_size": 2}).config
    messages = [problem.message for problem in supervised_rows_can_be_used(all_rows=True)(run)]
    assert [f"{source}, row 0: {reason}" in message for message in messages] == ([True] if reason else [])


@pytest.mark.parametrize("run", [False, True])
def test_a_folder_of_runs_is_no_folder_of_a_run(run: bool, nano: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "b"):
        (runs / name).mkdir(parents=True)
        (runs / name / "progress.json").write_text("{}")
    (problem,) = problems(nano, tmp_path, {"trainer.run_path": f"{runs}/"}, run=run)
    assert (problem.path, problem.message) == (
        "trainer.run_path",
        f"{runs}/ has the folders of other runs inside, a and 1 more: each run has a folder of its own",
    )
    assert problems(nano, tmp_path, {"trainer.run_path": str(runs / "c")}, run=run) == []


def test_a_folder_whose_name_holds_a_nul_is_reported(nano: Path, tmp_path: Path) -> None:
    run = config(nano, tmp_path, trainer__run_path=f"{tmp_path}/a\0b")
    messages = {problem.path: problem.message for problem in folders_can_be_written(run)}
    assert "cannot be written to: embedded null byte" in messages["trainer.run_path"]


PROMPT = {"prompt": [{"role": "user", "content": "a"}], "reward_spec": {"ground_truth": "b"}}


def rows_file(folder: Path, suffix: str, count: int) -> Path:
    """So many good rows."""
    file = folder / f"rows{suffix}"
    rows = [PROMPT] * count
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif suffix == ".csv":
        file.write_text("question,answer\n" + "a,b\n" * count, encoding="utf-8")
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        file.write_text(json.dumps(rows) if suffix == ".json" else lines, encoding="utf-8")
    return file


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_data_that_does_not_fill_a_batch_is_found(suffix: str, run: bool, nano: Path, tmp_path: Path) -> None:
    columns = {"data.prompt_column": "question", "data.answer_column": "answer"} if suffix == ".csv" else {}
    file = rows_file(tmp_path, suffix, 3)
    data = {"data.train_data": [str(file)], "data.val_data": [str(file)], **columns}
    (problem,) = (problem for problem in problems(nano, tmp_path, data, run=run) if problem.severity == "error")
    assert (problem.path, problem.message) == ("trainer.train_batch_size", "4 prompts, but the training data has 3")
    assert problem.hint == "lower it to 3 or less"
    assert problem.location  # where the size is written
    twice = problems(nano, tmp_path, data | {"data.train_data": [str(file), str(file)]}, run=run)
    assert [problem for problem in twice if problem.severity == "error"] == []


def test_rows_that_are_left_out_fill_no_batch(nano: Path, tmp_path: Path) -> None:
    file = rows_file(tmp_path, ".jsonl", 3)
    file.write_text(file.read_text() + "no JSON\n", encoding="utf-8")
    changes: dict[str, Any] = {"data.train_data": [str(file)], "data.bad_rows": "skip"}
    (problem,) = problems(nano, tmp_path, changes)
    assert (problem.path, problem.message) == ("trainer.train_batch_size", "4 prompts, but the training data has 3")
    changes |= {f"trainer.{name}": 3 for name in ("train_batch_size", "policy_mini_batch_size")}
    changes |= {f"trainer.micro_{name}_batch_size_per_gpu": 3 for name in ("train", "forward")}
    (warning,) = problems(nano, tmp_path, changes)
    assert (warning.path, warning.severity) == ("data.train_data", "warning")
    assert f"{file}:4 is not JSON" in warning.message
    assert problems(nano, tmp_path, changes, run=True) == []  # the run itself counts what it leaves out


BAD = {
    '{"prompt": ["x"': "rows.jsonl:3 is not JSON: ",
    "[1, 2]": "rows.jsonl:3 is [1, 2], not an object with columns as keys",
    '{"question": "a"}': "rows.jsonl, row 2: prompt is None, not a list of messages",
    '{"prompt": "a"}': "rows.jsonl, row 2: prompt is 'a', not a list of messages",
    '{"prompt": [{"role": "user"}]}': "rows.jsonl, row 2: the message {'role': 'user'} needs the texts",
    '{"prompt": []}': "rows.jsonl, row 2: prompt is [], not a list of messages",
    '{"a": ' * 500 + "1" + "}" * 500: "rows.jsonl:3 is nested deeper than",
}


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_found_wherever_it_is(line: str, run: bool, nano: Path, tmp_path: Path) -> None:
    file = rows_file(tmp_path, ".jsonl", 6)
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:], line, line]) + "\n", encoding="utf-8")
    findings = problems(nano, tmp_path, {"data.train_data": [str(file)]}, run=run)
    bad_row = next(problem for problem in findings if BAD[line] in problem.message)
    assert (bad_row.path, bad_row.severity) == ("data.train_data", "error")
    assert bad_row.message.endswith("; 1 more is bad")
    assert bad_row.hint == "mend the row, or leave such rows out with data.bad_rows = skip"


def test_a_run_reads_a_large_file_once_and_still_counts_a_parquet_file(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_rows, "QUICK_BYTES", 10)
    bad = rows_file(tmp_path, ".jsonl", 3)
    bad.write_text(bad.read_text() + "no JSON\n", encoding="utf-8")
    table = rows_file(tmp_path, ".parquet", 3)
    assert problems(nano, tmp_path, {"data.train_data": [str(bad)]}, run=True) == []
    assert len(problems(nano, tmp_path, {"data.train_data": [str(bad)]})) == 1
    (problem,) = problems(nano, tmp_path, {"data.train_data": [str(table)]}, run=True)
    assert problem.path == "trainer.train_batch_size"


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("sft", "no JSON", ":33 is not JSON"),
        ("sft", '{"messages": [{"role": "user", "content": "a"}]}', ", row 32: no message is from the assistant"),
        ("sft", '{"messages": 3}', ", row 32: messages is 3"),
        ("sft", '{"messages": [], "images": ["x"]}', ", row 32: "),
        ("sft", '{"input_ids": []}', ", row 32: input_ids are empty"),
        ("sft", '{"input_ids": [5, 99999]}', ", row 32: input_ids go from 5 to 99999, and the tokenizer has 0 to "),
        ("sft", '{"input_ids": [5, 6], "loss_mask": null}', ", row 32: loss_mask is null"),
        ("sft", '{"input_ids": [5, 6], "loss_mask": [1]}', ", row 32: 2 input_ids have 1 loss_mask"),
        ("sft", '{"input_ids": [5, 6], "loss_mask": [0, 0.5]}', ", row 32: loss_mask is [0, 0.5], not a list of whole"),
        ("sft", '{"input_ids": [5, 6], "lossmask": [0, 1]}', ", row 32: the column 'lossmask' is none of labels, "),
        ("sft", '{"input_ids": [5, 6], "loss_mask": [1, 0]}', ", row 32: no token of it is learned"),
        ("sft", '{"mesages": []}', ", row 32: it has neither messages (messages_key), nor conversations, instruction"),
        ("reward_model", '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}', ", row 32: margin is 'x'"),
        ("reward_model", '{"prompt": "a", "chosen": "b"}', ", row 32: it has no rejected"),
        ("preference", '{"prompt": "a", "chosen": "b"}', ", row 32: it has no rejected"),
        ("reward_model", '{"chosen": "a", "rejected": "b"}', ", row 32: chosen is a text and there is no prompt"),
    ],
)
def test_a_bad_row_of_a_supervised_run_is_found(kind: str, line: str, message: str, nano: Path, tmp_path: Path) -> None:
    settings = supervised_run.settings(nano, tmp_path, kind)
    (source,) = settings["train_datasets"]
    with Path(source).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    for also, skip in (
        (RunKind.preflight_checks, False),
        (RunKind.doctor_checks, False),
        (RunKind.doctor_checks, True),
    ):
        findings = config_problems(settings | ({"bad_rows": "skip"} if skip else {}), also)
        assert [
            (problem.path, problem.severity) for problem in findings if f"{source}{message}" in problem.message
        ] == [("train_datasets", "warning" if skip else "error")]


@pytest.mark.parametrize("kind", ["sft", "reward_model", "preference"])
def test_supervised_rows_that_do_not_fill_a_batch_are_found(kind: str, nano: Path, tmp_path: Path) -> None:
    settings = supervised_run.settings(nano, tmp_path, kind, batch_size=33)
    (problem,) = config_problems(settings, RunKind.preflight_checks)
    assert (problem.path, problem.message) == ("batch_size", "33 rows, but the training data has 32")
    assert problem.hint == "lower it to 32 or less, or set epoch_tail = short"
    assert config_problems(settings | {"epoch_tail": "short"}, RunKind.preflight_checks) == []
    assert config_problems(settings | {"num_dummy_steps": 2}, RunKind.preflight_checks) == []


def config_problems(settings: Mapping[str, Any], also: Any) -> list[Problem]:
    try:
        return [
            problem for problem in compose([], dict(settings), also=also).warnings if "no effect" not in problem.message
        ]
    except ConfigError as error:
        return [problem for problem in error.problems if problem.severity == "error" or "row 32" in problem.message]


def stored(folder: Path, run: Any) -> None:
    """The folder of this run."""
    lock = RunLock(folder, "trainer.run_path", run)
    lock.acquire()
    lock.write_config(config_text(run, {}))
    lock.release()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"trainer.seed": 7}, {"trainer.seed": "42 there, 7 here"}),
        ({"trainer.policy.optimizer_config.lr": 0.02}, {"trainer.policy.optimizer_config.lr": "0.01 there, 0.02 here"}),
        ({"generator.n_samples_per_prompt": 6}, {"generator.n_samples_per_prompt": "3 there, 6 here"}),
        (
            {"trainer.policy_mini_batch_size": 2, "trainer.micro_train_batch_size_per_gpu": 2},
            {"trainer.policy_mini_batch_size": "4 there, 2 here"},
        ),
        (
            {"generator.sampling_params.max_generate_length": 6},
            {"generator.sampling_params.max_generate_length": "5 there, 6 here"},
        ),
        (
            {"generator.sampling_params.temperature": 0.9},
            {"generator.sampling_params.temperature": "1.0 there, 0.9 here"},
        ),
    ],
)
def test_a_setting_that_has_changed_in_the_folder_of_a_run_is_found_at_its_place(
    changes: dict[str, Any], listed: dict[str, str], run: bool, nano: Path, tmp_path: Path
) -> None:
    stored(tmp_path / "run", config(nano, tmp_path))
    assert problems(nano, tmp_path, run=run) == []
    *fields, folder = problems(nano, tmp_path, changes, run=run)
    if folder.path != "trainer.run_path":  # they are in the order of their places
        (folder,) = (problem for problem in fields if problem.path == "trainer.run_path")
        fields = [
            problem for problem in problems(nano, tmp_path, changes, run=run) if problem.path != "trainer.run_path"
        ]
    assert {problem.path: problem.message for problem in fields if "micro" not in problem.path} == listed
    assert all(problem.location for problem in fields)
    assert folder.message == f"{tmp_path / 'run'} belongs to a run with another configuration"
    assert folder.hint.startswith("set back what differs")
    assert f"or start a new run: trainer.run_path={tmp_path / 'run'}-2" in folder.hint


@pytest.mark.long
def test_a_checkpoint_of_another_run_is_found_before_it_is_loaded(nano: Path, tmp_path: Path) -> None:
    stored(tmp_path / "other", config(nano, tmp_path))
    (tmp_path / "other" / "config.json").rename(tmp_path / "other" / "manifest.json")
    named = {"trainer.resume_mode": "from_path", "trainer.resume_path": str(tmp_path / "other")}
    assert problems(nano, tmp_path, named) == []
    messages = {problem.path: problem.message for problem in problems(nano, tmp_path, named | {"trainer.seed": 7})}
    assert messages["trainer.seed"] == "42 there, 7 here"
    assert "belongs to a run with another configuration" in messages["trainer.resume_path"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"{}", b"7", b"\0" * 40, b"[" * 100_000])
def test_a_damaged_configuration_of_a_folder_is_named(nano: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes(content)
    (problem,) = problems(nano, tmp_path)
    assert problem.path == "trainer.run_path"
    assert "config.json is damaged" in problem.message
    assert "delete it, since every checkpoint has its own copy" in problem.message
    with pytest.raises(ResumeError, match="delete it"):
        RunLock(tmp_path / "run", "trainer.run_path", config(nano, tmp_path)).acquire()
    with pytest.raises(UserError, match=r"config\.json (cannot be read|contains no configuration)"):
        stored_configuration(tmp_path / "run")


@pytest.mark.long
def test_a_run_whose_damaged_configuration_is_deleted_goes_on(nano: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trainer__eval_interval": -1, "trainer__eval_before_train": False}
    train(nano, tmp_path, **settings, trainer__max_training_steps=2)
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(ResumeError, match="belongs to a run with another configuration"):
        train(nano, tmp_path, **settings, trainer__max_training_steps=4, trainer__seed=7)
    assert train(nano, tmp_path, **settings, trainer__max_training_steps=4).last.metrics


def test_what_has_changed_in_a_supervised_run_is_found(nano: Path, tmp_path: Path) -> None:
    settings = supervised_run.settings(nano, tmp_path, "sft")
    run: Any = compose([], settings).config
    stored(Path(run.run_path), run)
    messages = {
        problem.path: problem.message for problem in config_problems(settings | {"seed": 7}, RunKind.preflight_checks)
    }
    assert messages["seed"].endswith("there, 7 here")
