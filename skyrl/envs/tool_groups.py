"""Tools that come with skyrl, to be combined: `tools = (python_tool(sandbox), search_tool(settings))`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.config.settings.environment import SearchEnvConfig
from skyrl.envs.http_json import ATTEMPTS, PATIENCE
from skyrl.envs.search import TOKEN_VARIABLE, ask_retriever
from skyrl.envs.text2sql import SHOWN_ROWS, TOOL_SECONDS, ask_database, result_text
from skyrl.envs.tools import Tool
from skyrl.errors import TaskError
from skyrl.processes.credentials import api_key
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox


def python_tool(sandbox: Sandbox, limits: ResourceLimits | None = None) -> Tool:
    """`python(code)`: runs a program in a new process in the sandbox, and shows its output."""
    limits = limits or ResourceLimits()

    def python(code: str) -> str:
        ran = sandbox.run(code, limits=limits)
        if ran.ended != "exit":
            return "Error: the program " + ("took too long" if ran.ended == "timeout" else "printed too much")
        printed = ran.stdout.decode(errors="replace")
        failed = ran.stderr.decode(errors="replace")[-2000:]
        return printed if ran.code == 0 else f"{printed}\nError: exit code {ran.code}\n{failed}"

    return Tool(
        name="python",
        description="Run a Python program. What it prints is shown; nothing is kept from one program to the next.",
        parameters=_texts(code="The program."),
        run=python,
        seconds=limits.seconds + 5.0,
    )


def sql_tool(db: Path, sandbox: Sandbox) -> Tool:
    """`sql(query)`: a read-only query on one SQLite file. Raises `TaskError`."""
    if not db.is_file() or not sandbox.may_open(db):
        raise TaskError(
            f"the sql tool cannot open {db} in a sandbox of the tier {sandbox.tier!r}: it has to be a file below one "
            "of Sandbox(readable=[...]), and in the tier `process`, if root started the run, one that everybody may "
            "read"
        )
    return Tool(
        name="sql",
        description=f"Run a query of SQLite that reads. Shows at most {SHOWN_ROWS} rows.",
        parameters=_texts(query="The query."),
        run=lambda query: result_text(ask_database(sandbox, db, query, TOOL_SECONDS, SHOWN_ROWS)),
        seconds=TOOL_SECONDS + 5.0,
    )


def search_tool(settings: SearchEnvConfig) -> Tool:
    """`search(query)`: asks the retriever of `environment.skyrl_gym.search`. A retriever that does not answer is a
    failure.
    """
    token = api_key(TOKEN_VARIABLE)
    return Tool(
        name="search",
        description=f"Search documents. Shows the {settings.topk} best.",
        parameters=_texts(query="Words to look for."),
        run=lambda query: ask_retriever(settings, token, query).value,
        # Longer than the request: a missed deadline would be the policy's, not the service's.
        seconds=(settings.timeout + 2.0) * ATTEMPTS + PATIENCE,
    )


def _texts(**described: str) -> dict[str, Any]:
    """A JSON schema of required text arguments, by name and description."""
    properties = {name: {"type": "string", "description": description} for name, description in described.items()}
    return {"type": "object", "properties": properties, "required": list(described), "additionalProperties": False}
