"""`python -m skyrl`: the command."""

from skyrl.cli import start

if __name__ == "__main__":
    start()
