"""Tools of MCP servers: one of the package mcp, over standard streams and over HTTP, and one that does mischief."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl.config.settings.environment import McpEnvConfig, McpServerConfig, SkyRLGymConfig
from skyrl.envs import Env, EnvStep, find_env
from skyrl.envs.coroutines import awaited
from skyrl.envs.env import Message
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.mcp.servers import McpConnection, McpServer, shared_connection
from skyrl.errors import TaskError
from skyrl.sandbox.sandbox import why_unavailable
from skyrl.sandbox.tiers import TIERS, Tier
from skyrl.tree import Secret

pytestmark = pytest.mark.xdist_group("mcp")  # some tests look at the processes of all servers

SERVERS = Path(__file__).parent / "mcp_servers"
NOTES = McpServerConfig(command=(sys.executable, str(SERVERS / "notes.py")))
VARIABLES = {"PATH", "LANG", "VIRTUAL_ENV", "PYTHONPATH", "HOME", "TMPDIR", "LC_CTYPE"}
HERE = [tier for tier in TIERS if not why_unavailable(tier)]


def lines(mischief: str, **changes: Any) -> McpServerConfig:
    return McpServerConfig(command=(sys.executable, str(SERVERS / "lines.py"), mischief), **changes)


class IsFour(Env):
    """Judges like an environment of one turn that adds to the prompt."""

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return (*prompt, {"role": "user", "content": "Only the number."}), {}

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=float(action == "4"), done=True, answer=action)

    def get_metrics(self) -> dict[str, float]:
        return {"judged": 1.0}


def task(*servers: McpServerConfig, **changes: Any) -> McpTask:
    return McpTask(settings=McpEnvConfig(servers=servers, **changes), tier="auto", reward=IsFour)


@contextmanager
def playing(mcp_task: McpTask) -> Iterator[Env]:
    env = mcp_task({})
    try:
        yield env
    finally:
        env.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def told(env: Env, name: str, **arguments: Any) -> str:
    (message,) = env.step(call(name, **arguments)).observations
    assert message["role"] == "tool"
    return message["content"]


def counted(env: Env) -> Mapping[str, float]:
    return {name: count for name, count in env.get_metrics().items() if count and name != "judged"}


def test_the_tools_of_a_server_are_shown_and_called_and_the_answer_is_judged() -> None:
    mcp_task = task(NOTES)
    with playing(mcp_task) as env, playing(mcp_task) as other:
        assert env.init(({"role": "user", "content": "2+2?"},))[0][-1]["content"] == "Only the number."
        tools = {schema["function"]["name"]: schema["function"] for schema in env.tool_schemas()}
        assert list(tools) == ["note", "fail", "die", "hang", "fill", "surroundings"]
        assert tools["note"]["description"].startswith("Keep a note")
        assert tools["note"]["parameters"]["required"] == ["text"]
        assert told(env, "note", text="one", times=2) == "one, one"
        assert told(env, "note", text="two") == "one, one, two"
        assert told(other, "note", text="of another episode") == "of another episode"
        assert told(env, "note", text=3) == "Error: the arguments of note do not fit: 3 is not of type 'string'"
        assert told(env, "fail").startswith("Error: Error executing tool fail")
        assert told(env, "fill", size=10_005) == "x" * 10_000 + "\n... cut at 10000 characters"
        seen = json.loads(told(env, "surroundings"))
        assert {*seen["variables"]} <= VARIABLES
        assert (seen["network"], seen["files"]) == ("OSError97", [])
        lost = "Error: the server of die was lost (its process ended with exit code 3: out of ink)"
        assert told(env, "die") == f"{lost}; the next call starts it anew, without what it kept"
        assert env.step("4") == EnvStep(reward=1.0, done=True, answer="4")
        assert counted(env) == {"tool_calls": 7, "malformed_calls": 1, "tool_errors": 2, "servers_lost": 1}
        assert env.get_metrics()["judged"] == 1.0


@pytest.mark.long
@pytest.mark.parametrize("tier", HERE[:-1])  # the test above is in the last
def test_a_program_runs_in_each_tier_without_a_network_or_the_runs_variables(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = McpServer(config=NOTES, config_path="here", tier=tier, start_seconds=60, call_seconds=30)
    connection = McpConnection(server)
    try:
        seen = json.loads(awaited(connection.call("surroundings", {})))
    finally:
        awaited(connection.close())
    assert {*seen["variables"]} <= VARIABLES
    assert seen["network"] == "OSError97"
    assert seen["files"] == []
    assert seen["user"] != 0 or os.getuid() != 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("mischief", "message"),
    [
        ("flood", "was lost (it sent more than 4194304 bytes at once)"),
        ("line", "was lost (it sent more than 4194304 bytes at once)"),
    ],
)
def test_a_server_that_sends_too_much_is_ended(mischief: str, message: str) -> None:
    with playing(task(lines(mischief))) as env:
        assert message in told(env, "one")
        assert counted(env) == {"tool_calls": 1, "tool_errors": 1, "servers_lost": 1}


def test_a_server_that_died_is_started_anew() -> None:
    with playing(task(lines("die"))) as env:
        first = told(env, "one")
        assert told(env, "two").startswith("Error: the server of two was lost (its process ended with exit code 7")
        assert told(env, "one") == first == "done"
        assert counted(env) == {"tool_calls": 3, "tool_errors": 1, "servers_lost": 1}


def test_a_server_that_hangs_costs_one_deadline_and_starts_anew() -> None:
    with playing(task(lines("hang"), call_timeout_seconds=0.3)) as env:
        late = "Error: two gave nothing within 0.3 s and its server was ended"
        assert told(env, "two") == f"{late}; the next call starts it anew, without what it kept"
        assert counted(env) == {"tool_calls": 1, "tool_timeouts": 1, "servers_lost": 1}


def test_lines_that_are_no_messages_are_passed_over_and_what_is_no_text_is_named() -> None:
    with playing(task(lines("chatter"))) as env:
        assert told(env, "one") == "done"
    with playing(task(lines("image"))) as env:
        assert told(env, "one") == "see\n[image]"


def test_processes_end_with_their_episode() -> None:
    mcp_task = task(lines("chatter"))
    mcp_task.offered()
    before = processes()
    with playing(mcp_task) as env:
        assert processes() == before  # only a call starts a server
        told(env, "one")
        assert processes() > before
    assert processes() == before


def processes() -> set[int]:
    """Processes whose command names the server: its own, and those of its sandbox."""
    result = subprocess.run(["pgrep", "-f", str(SERVERS / "lines.py")], capture_output=True, text=True, check=False)
    return {*map(int, result.stdout.split())}


def test_one_server_may_be_shared_by_all_episodes() -> None:
    config = lines("hang", scope="run")
    mcp_task = task(config, call_timeout_seconds=5)
    with playing(mcp_task) as env, playing(mcp_task) as other:
        assert told(env, "one") == "done"
        shared = processes()
        assert told(other, "one") == "done"
        assert processes() == shared
    assert processes() == shared  # until the run ends
    awaited(shared_connection(mcp_task.offered()[0].server).close())


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ((lines("broken"),), "broken does not start (environment.skyrl_gym.mcp.servers[0]): its process ended with "
         "exit code 1: ModuleNotFoundError: No module named 'ink'"),
        ((lines("mute"),), "does not start .*: it gave no answer within 0.5 s"),
        ((lines("none"),), "offers no tools"),
        ((lines("schema"),), "the tool one: its parameters are not a JSON schema"),
        ((lines("reference"),), "the tool one: its parameters refer to 'http://127.0.0.1:9/schema', outside of them"),
        ((lines("x", tools=("three",)),), "servers[0].tools names 'three', which .* not offer. It offers one, two"),
        ((lines("x"), lines("y")), "the tool one is offered by the MCP servers .* x and .* y: leave it out of "
         "environment.skyrl_gym.mcp.servers[0].tools or"),
        ((McpServerConfig(command=("no-such-program",)),), "the program no-such-program does not exist"),
        ((lines("x", readable=("/nowhere",)),), "readable names /nowhere, which does not exist"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used_is_one_sentence_at_the_start(
    servers: tuple[McpServerConfig, ...], message: str
) -> None:
    slow = "mute" in str(servers)
    with pytest.raises(TaskError, match=message.replace("[", r"\[").replace("(", r"\(").replace(")", r"\)")) as error:
        task(*servers, start_timeout_seconds=0.5 if slow else 60).offered()
    assert "\n" not in str(error.value)


def test_tools_are_offered_in_the_order_in_which_they_are_named() -> None:
    mcp_task = task(lines("x", tools=("two", "one")))
    assert [tool.name for tool in mcp_task.offered()[0].tools] == ["two", "one"]
    assert mcp_task.digest() != task(lines("x")).digest()


def test_a_list_of_tools_that_never_ends_is_read_for_some_pages() -> None:
    assert [tool.name for tool in task(lines("endless")).offered()[0].tools] == ["one", "two"]


@pytest.fixture
def at_a_port(closed_port: int) -> Iterator[str]:
    """Address of the server of notes, over HTTP."""
    with http_server(closed_port) as url:
        yield url


@contextmanager
def http_server(port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}/mcp"
    server = subprocess.Popen([*NOTES.command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_a_server_at_an_address_is_called_and_waited_for(at_a_port: str, closed_port: int) -> None:
    mcp_task = task(McpServerConfig(url=at_a_port, tools=("note", "fill", "hang", "die")), call_timeout_seconds=3)
    with playing(mcp_task) as env:
        assert told(env, "note", text="one") == "one"
        assert "the answer has more than 4194304 bytes" in told(env, "fill", size=5_000_000)
        assert told(env, "die").startswith("Error: the server of die was lost")
        with http_server(closed_port):
            assert told(env, "note", text="two") == "two"
            assert told(env, "hang").startswith("Error: hang gave nothing within 3 s")
        assert counted(env)["servers_lost"] == 2


def test_a_server_that_cannot_be_reached_fails_the_sample_and_not_the_policy(closed_port: int) -> None:
    server = McpServerConfig(url=f"http://127.0.0.1:{closed_port}/mcp")
    with pytest.raises(TaskError, match=r"cannot be used \(environment.skyrl_gym.mcp.servers\[0\]\): "):
        task(server, start_timeout_seconds=0.3).offered()


def test_headers_come_from_variables_and_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    config = McpServerConfig(url="http://127.0.0.1:9/mcp", token=Secret("A_TOKEN"), headers={"X-Key": Secret("A_KEY")})
    server = McpServer(config=config, config_path="here", tier="auto", start_seconds=0.1, call_seconds=1)
    monkeypatch.delenv("A_TOKEN", raising=False)
    monkeypatch.setenv("A_KEY", "canary-key")
    with pytest.raises(TaskError, match="the variable A_TOKEN is not set, from which here takes its token"):
        awaited(server.opened())
    monkeypatch.setenv("A_TOKEN", "canary\x01token")
    with pytest.raises(TaskError, match="the variable A_TOKEN holds characters that no header may have"):
        awaited(server.opened())
    monkeypatch.setenv("A_TOKEN", "canary-token\n")
    assert server.headers() == {"Authorization": "Bearer canary-token", "X-Key": "canary-key"}
    with pytest.raises(TaskError) as error:
        awaited(server.opened())
    assert "canary" not in f"{error.value} {config} {server}"


def test_the_registry_finds_the_reward_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def exact(completion, ground_truth, **columns):\n    return completion == ground_truth\n"
    )
    settings = McpEnvConfig(servers=(lines("x"),), reward=f"{tmp_path / 'reward.py'}:exact")
    mcp_task = find_env("mcp", SkyRLGymConfig(mcp=settings))
    assert isinstance(mcp_task, McpTask)
    env = mcp_task({"reward_spec": {"ground_truth": "4"}})
    assert env.step("4").reward == 1.0
    with pytest.raises(TaskError, match="the environment mcp has no reward"):
        find_env("mcp", SkyRLGymConfig())


def test_an_error_of_a_tool_is_told_in_its_words_and_logged_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with playing(task(lines("hang"), call_timeout_seconds=0.2)) as env:
        told(env, "two")
    assert not caplog.records
