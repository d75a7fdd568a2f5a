"""Recognises the system that a file or a script is of, by the settings that it has."""

from __future__ import annotations

import re

from skyrl.config.loading.recognition import is_prime_rl, refuse_other_sources, refuse_other_tables
from skyrl.interop import not_converted
from skyrl.interop.peer_trees import settings_by_system
from skyrl.interop.values import flat, is_script
from skyrl.tree.files import read_file, read_text

NAMES = {"areal": "AReaL", "prime-rl": "prime-rl", "skyrl": "SkyRL", "trl": "TRL", "verl": "verl"}
"""Name of a system in `skyrl config convert --from` -> its own name."""


def recognised_system(name: str) -> str:
    """The system that has more of the file's settings than any other; for a script without settings, the only system
    that it mentions. Raises `ConfigError` if there is none.
    """
    refuse_other_sources(name, of=None)
    tables = None if is_script(name) else read_file(name)[-1].value
    if is_prime_rl(tables):
        return "prime-rl"
    refuse_other_tables(name, tables, of=None)
    if is_script(name):
        keys = set(filter(None, map(_setting_in, read_text(name).split())))
    else:
        keys = {key for key, _ in flat(tables)} if isinstance(tables, dict) else set()
    known = {system: len(keys & settings) for system, settings in settings_by_system().items()}
    most = max(known.values())
    systems = [system for system, count in known.items() if count == most > 0]
    if not keys and is_script(name):
        systems = [system for system in NAMES if re.search(rf"(?i)\b{system}", read_text(name))]
    if len(systems) == 1:
        return systems[0]
    of = " or ".join(NAMES[system] for system in sorted(systems))
    message = f"may be of {of}" if systems else f"is not recognised as a file of {', '.join(NAMES.values())}"
    hint = f"name the system with --from ({', '.join(sorted(systems) or NAMES)})"
    raise not_converted(name, message, hint)


def _setting_in(word: str) -> str:
    """The name of the setting in a word of a command, such as `trainer.epochs=3`, `+data.seed=1` or
    `--learning_rate`; empty if there is none.
    """
    name, equals, _ = word.strip("'\"").partition("=")
    if name.startswith("--"):
        return name[2:]
    name = name.lstrip("+~")
    return name if equals and "." in name and all(part.isidentifier() for part in name.split(".")) else ""
