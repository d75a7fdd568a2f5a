"""`python -m skyrl.cli`."""

from skyrl.cli import start

start()
