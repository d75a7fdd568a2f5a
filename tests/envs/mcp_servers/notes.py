"""A server of the package mcp that keeps notes: over standard streams, or over HTTP at the port of its argument."""

import os
import socket
import sys
import time

from mcp.server.mcpserver import MCPServer

app = MCPServer("notes")
notes: list[str] = []


@app.tool()
def note(text: str, times: int = 1) -> str:
    """Keep a note, and show all of them.

    Args:
        text: what to keep
        times: how often
    """
    notes.extend([text] * times)
    return ", ".join(notes)


@app.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("no such note")


@app.tool()
def die() -> str:
    """End the server."""
    print("out of ink", file=sys.stderr, flush=True)
    os._exit(3)


@app.tool()
def hang() -> str:
    """Answer never."""
    time.sleep(3600)
    return ""


@app.tool()
def fill(size: int) -> str:
    """Answer at length."""
    return "x" * size


@app.tool()
def surroundings() -> dict[str, object]:
    """What the server sees."""
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
        network = "none listens"
    except OSError as error:
        network = type(error).__name__ + str(error.errno)
    return {"variables": sorted(os.environ), "network": network, "files": os.listdir("."), "user": os.getuid()}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run("streamable-http", port=int(sys.argv[1]))
    else:
        app.run()
