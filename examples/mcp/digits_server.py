"""An MCP server with one tool: it looks up the digit of a pair of letters.

Any MCP client starts it with `python examples/mcp/digits_server.py`, and speaks to it over standard input and output.
"""

from __future__ import annotations

from hashlib import sha256

from mcp.server.mcpserver import MCPServer

app = MCPServer("digits")


def digit(pair: str) -> str:
    """The digit of a pair of letters, which nothing in the pair tells."""
    return str(sha256(pair.encode()).digest()[0] % 10)


@app.tool()
def look(key: str) -> str:
    """Look up the digit of a pair of letters.

    Args:
        key: the pair, such as "qx"
    """
    return digit(key)


if __name__ == "__main__":
    app.run()
