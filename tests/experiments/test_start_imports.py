"""What a run imports only when it needs it."""

from __future__ import annotations

import sys

import pytest

from tests.forkserver import CONTEXT


def exits_if_imported(package: str) -> None:
    from tests.first_use import IMPORTED_BY_A_START  # there it was imported after all that a run imports

    sys.exit(int(package in IMPORTED_BY_A_START))


@pytest.mark.long
@pytest.mark.parametrize(
    "package",
    [
        "httpx",  # of engines that are servers
        "jsonschema",  # of environments with tools
        "peft",  # of adapters; transformers.optimization imports it
        "transformers.optimization",  # of schedules that are transformers' own
        "deepspeed",
        "ray",
        "vllm",
    ],
)
def test_a_run_without_need_of_a_package_starts_without_it(package: str) -> None:
    """The parent of forks has imported all that a run imports before it reads its data."""
    process = CONTEXT.Process(target=exits_if_imported, args=(package,))
    process.start()
    process.join()
    assert process.exitcode == 0
