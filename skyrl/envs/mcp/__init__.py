"""Tools of MCP servers as an environment: start at `environment.py`. The package mcp is imported in `transports.py`,
which a connection imports when it opens.
"""
