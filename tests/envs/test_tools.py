from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from skyrl.chats.tool_calls import Call
from skyrl.config.settings.environment import SearchEnvConfig
from skyrl.envs import EnvStep
from skyrl.envs.http_json import ServiceError
from skyrl.envs.tool_groups import python_tool, search_tool, sql_tool
from skyrl.envs.tools import MOST_CALLS, Tool, ToolEnv
from skyrl.errors import TaskError
from skyrl.sandbox.sandbox import Sandbox
from tests.envs.services import service


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Sums(ToolEnv):
    tools: tuple[Any, ...] = (add,)

    def judge(self, answer: str) -> EnvStep:
        return EnvStep(reward=float(answer == "4"), done=True)


class Scales(Sums):
    def weigh(self, item: str) -> int:
        """Weigh something.

        Args:
            item: what lies on the scales
        """
        return len(item)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def told(env: ToolEnv, action: str) -> list[str]:
    step = env.step(action)
    assert (step.reward, step.done) == (0.0, False)
    assert {message["role"] for message in step.observations} == {"tool"}
    return [message["content"] for message in step.observations]


def with_tool(run: Any, seconds: float = 10.0) -> ToolEnv:
    env = Sums({})
    env.tools = (Tool(name="t", description="", parameters={"type": "object"}, run=run, seconds=seconds),)
    return env


def test_each_call_is_answered_and_a_turn_without_one_is_judged() -> None:
    env = Sums({})
    assert told(env, call("add", a=1, b=2) + call("add", a=5)) == ["3", "6"]
    assert env.step("4") == EnvStep(reward=1.0, done=True)
    assert env.get_metrics() == {"tool_calls": 2, "malformed_calls": 0, "tool_errors": 0, "tool_timeouts": 0}


def test_a_tool_is_made_from_a_functions_annotations_and_docstring() -> None:
    (schema,) = Sums({}).tool_schemas()
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert schema["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("<tool_call>add 1 2</tool_call>", "Error: the call is not JSON"),
        (call("sub", a=1), "Error: there is no tool 'sub'; there are add"),
        (call("add", a="1"), "Error: the arguments of add do not fit: '1' is not of type 'integer'"),
        (call("add", b=1), "Error: the arguments of add do not fit: 'a' is a required property"),
        (call("add", a=1, c=1), "Error: the arguments of add do not fit: Additional properties"),
    ],
)
def test_a_malformed_call_is_answered_with_what_is_wrong_and_counted(action: str, message: str) -> None:
    env = Sums({})
    assert told(env, action)[0].startswith(message)
    assert env.get_metrics()["malformed_calls"] == 1


def test_what_a_tool_raises_is_told_and_counted_and_its_author_reads_the_line_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = with_tool(lambda: 1 / 0)
    assert told(env, call("t") + call("t")) == ["Error: ZeroDivisionError: division by zero"] * 2
    (record,) = caplog.records
    assert "the tool t raised ZeroDivisionError: division by zero (" in record.getMessage()
    assert "test_tools.py:" in record.getMessage()
    assert env.get_metrics()["tool_errors"] == 2


def test_a_tool_that_hangs_is_left_behind_at_its_deadline() -> None:
    release = Event()
    env = with_tool(release.wait, seconds=0.05)
    assert told(env, call("t")) == ["Error: t gave nothing within 0.05 s"]
    assert env.get_metrics()["tool_timeouts"] == 1
    release.set()


def test_a_tool_that_ends_the_process_is_an_error_of_the_tool() -> None:
    assert told(with_tool(lambda: exit(3)), call("t")) == ["Error: SystemExit: 3"]


@pytest.mark.parametrize("error", [ServiceError("no retriever"), TaskError("no database")])
def test_a_service_that_fails_is_the_environments_failure_and_not_the_models(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        with_tool(fail).step(call("t"))


def test_results_are_shown_as_json_and_cut() -> None:
    assert told(with_tool(lambda: {"a": [1, None]}), call("t")) == ['{"a": [1, null]}']
    assert told(with_tool(lambda: "x" * 20_000), call("t"))[0].endswith("xx\n... cut at 10000 characters")


def test_calls_beyond_the_most_in_a_turn_are_not_made() -> None:
    calls: list[int] = []
    env = with_tool(lambda: calls.append(1))
    answers = told(env, call("t") * 100)
    assert (len(calls), len(answers)) == (MOST_CALLS, MOST_CALLS + 1)
    assert answers[-1] == "Error: 84 calls were left out: 16 in a turn at most"


def test_a_model_that_writes_calls_in_another_form_brings_its_parser() -> None:
    class Slashes(Sums):
        @staticmethod
        def parse(answer: str) -> tuple[Call, ...]:
            return (Call(name="add", arguments={"a": int(answer[1:])}),) if answer.startswith("/") else ()

    assert told(Slashes({}), "/6") == ["7"]


def test_parameters_that_are_no_schema_are_refused() -> None:
    with pytest.raises(TaskError, match="tool t: its parameters are not a JSON schema"):
        Tool(name="t", description="", parameters={"type": "objekt"}, run=print)


def test_functions_and_methods_may_stand_beside_tools() -> None:
    env = Scales({})
    env.tools = (env.weigh, Tool.from_function(add))
    assert [schema["function"]["name"] for schema in env.tool_schemas()] == ["weigh", "add"]
    assert told(env, call("weigh", item="fig") + call("add", a=1)) == ["3", "2"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (Tool.from_function(add), r"Scales.tools is a Tool, not a tuple: write \(tool,\) in place of tool"),
        (add, "Scales.tools is a function, not a tuple"),
        (None, "Scales.tools is a NoneType, not a tuple"),
        (("add",), r"a tool is a function or a Tool\(name=..., run=...\), not 'add'"),
        (({"name": "add"},), r"a tool is a function or a Tool\(name=..., run=...\), not {'name': 'add'}"),
        ((Scales.weigh,), r"the tool weigh is a method: set self.tools = \(self.weigh,\) in __init__"),
    ],
)
def test_what_is_no_tool_is_refused_with_what_to_write(tools: Any, message: str) -> None:
    env = Scales({})
    env.tools = tools
    with pytest.raises(TaskError, match=message):
        env.tool_schemas()


def test_a_function_that_says_too_little_is_no_tool() -> None:
    def silent(a: int) -> int:
        return a

    with pytest.raises(TaskError, match="silent"):
        Tool.from_function(silent)


def test_programs_run_in_a_sandbox() -> None:
    tool = python_tool(Sandbox("process"))
    assert tool.run(code="print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in tool.run(code="1 / 0")


def test_queries_only_read(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS n")
    connection.close()
    tmp_path.chmod(0o755)  # a run of root's: its queries are another user's
    tool = sql_tool(tmp_path / "a.sqlite", Sandbox(readable=[tmp_path]))
    assert tool.run(query="SELECT n FROM t") == "n\n7"
    assert "not authorized" in tool.run(query="DROP TABLE t")


def test_a_database_that_queries_could_not_open_is_refused_before_the_first(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(TaskError, match=r"cannot open .*gone.sqlite in a sandbox"):
        sql_tool(tmp_path / "gone.sqlite", Sandbox(readable=[tmp_path]))


def test_searches_ask_the_retriever() -> None:
    reply: Mapping[str, Any] = {"result": [[{"document": {"contents": "Rome"}, "score": 1.0}]]}
    with service(lambda *_: (200, reply)) as url:
        assert search_tool(SearchEnvConfig(search_url=url)).run(query="capital") == "Doc 1: Rome"


class Bare(ToolEnv):
    def __init__(self, extras: Any) -> None:
        """Without a call of the base class's."""

    def judge(self, answer: str) -> EnvStep:
        return EnvStep(reward=float(answer == self.extras["truth"]), done=True)


def test_an_environment_that_does_not_call_the_init_of_its_base_learns_the_remedy() -> None:
    env = Bare({"truth": "4"})
    assert env.tool_schemas() == ()
    assert env.get_metrics()["tool_calls"] == 0
    with pytest.raises(AttributeError, match=r"'Bare' .* 'extras': call super\(\).__init__\(extras\) in its __init__$"):
        env.step("4")
    with pytest.raises(AttributeError, match=r"has no attribute 'other'$"):
        _ = env.other  # type: ignore[attr-defined]  # there is none
