"""`python -m skyrl.cli`."""

from skyrl.cli.main import main

main()
