"""`skyrl serve` whose torch engine asks a gate of the tests before each step."""

from __future__ import annotations

import os
from multiprocessing.connection import Client
from typing import Any
from unittest.mock import patch

from skyrl.cli.main import main
from skyrl.inference.torch.engine import TorchEngine
from tests.inference.steps import PORT


def ask_the_gate() -> None:
    """Every engine that is made from now on asks, on the thread that it computes on."""
    make = TorchEngine.__init__

    def made(engine: TorchEngine, model: Any, *args: Any, **options: Any) -> None:
        gate = Client(("127.0.0.1", int(os.environ[PORT])))

        def ask(*_: Any) -> None:
            gate.send("a step")
            gate.recv()

        model.get_input_embeddings().register_forward_pre_hook(ask)
        make(engine, model, *args, **options)

    patch.object(TorchEngine, "__init__", made).start()


if __name__ == "__main__":
    ask_the_gate()
    main()
