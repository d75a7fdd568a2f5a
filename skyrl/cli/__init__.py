"""The `skyrl` command: reads arguments, prints results, and turns errors into messages and exit codes."""
