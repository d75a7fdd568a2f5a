"""Tables of docs/coming-from are what the converters say, and no value of any setting ends in a traceback."""

from __future__ import annotations

import pytest

from tests.interop.settings_pages import OTHERS, TABLES
from tests.interop.test_wrong_values import WRONG


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("system", "kind"), TABLES)
def test_every_setting_of_a_tree_takes_values_of_every_kind(system: str, kind: str) -> None:
    tables, defaults = TABLES[system, kind]()
    assert len(defaults) > 30
    for key, default in defaults.items():
        for value in (default, None, *OTHERS, *WRONG):
            tables.translated(key, value, {**defaults, key: value})
