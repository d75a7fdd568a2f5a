"""docs/coming-from.md counts what becomes of published scripts and files, and gives every reason for a refusal."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from skyrl.config import ConfigError
from skyrl.config.load import compose
from skyrl.errors import Problem
from skyrl.interop.report import Conversion, Line
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import RECORDED, Converted, areal_files, hydra_scripts, scripts_of_2026, total

PAGE = (RECORDED.parents[1] / "docs" / "coming-from.md").read_text()
WORDS = " ".join(PAGE.split())

_SHELL = "values that are not in the script, but in its author's shell"

REASONS = {
    r"implemented(?: it)? yet: (.+)": r"not implemented yet: \1",
    r"the prefix cache of vllm would hand": "not implemented yet: a prefix cache kept while weights change",
    r"no such field of|did you mean trainer": "fields that the script's own code adds",
    r"a variable of its is empty|is set outside of the file|only a shell can evaluate": _SHELL,
    r"the run starts no engines, and no address": _SHELL,
    r"Hydra is not used": "settings of Hydra itself",
    r"^'(simple_baseline|no_op|loop)' is unknown": "an estimator that the script's own code registers",
    r"do not divide the policy's mini-batch|cannot be dealt out evenly": "batches that the GPUs cannot share evenly",
    r"does not reach engines that run already": "weights sent to servers that run already, by NCCL or as differences",
    r"one call of the engine has one turn": "several turns in one call of the engine (`batched`)",
}
"""Pattern of what is said -> the reason as the page has it."""


@pytest.fixture(scope="module")
def scripts() -> tuple[Converted, ...]:
    """SkyRL's 75 scripts of the Hydra era and its 59 of August 2026."""
    return (*hydra_scripts(RECORDED), *scripts_of_2026(RECORDED, "rl"))


def reasons(conversion: Conversion) -> frozenset[str]:
    """Every reason why a script is not accepted as it is."""
    lines = [_reason(line.why) for line in conversion.lines if line.is_refused]
    errors = [_reason(problem.message) for problem in conversion.problems if problem.severity == "error"]
    return frozenset([*lines, *errors])


def _reason(said: str) -> str:
    for pattern, reason in REASONS.items():
        if found := re.search(pattern, said):
            return found.expand(reason)
    pytest.fail(f"a reason that the page does not give: {said}")


def test_the_page_lists_every_reason_for_which_a_script_is_not_accepted(scripts: tuple[Converted, ...]) -> None:
    counts = Counter(reason for script in scripts for reason in reasons(script.conversion))
    as_they_are = sum(not reasons(script.conversion) for script in scripts)
    rows = [f"| {reason} | {count} |" for reason, count in sorted(counts.items(), key=lambda row: (-row[1], row[0]))]
    shown = re.findall(r"^\| .+ \| \d+ \|$", PAGE, re.MULTILINE)
    assert "\n".join(shown) == "\n".join(rows)
    assert f"Of SkyRL's {len(scripts)} scripts {as_they_are} are accepted as they are" in WORDS


def test_check_says_of_a_converted_file_what_the_conversion_said(
    scripts: tuple[Converted, ...], tmp_path: Path
) -> None:
    one_each = {reasons(script.conversion): script.conversion for script in scripts}
    for conversion in one_each.values():
        file = tmp_path / "converted.toml"
        file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
        assert paths(errors_of(file)) == paths(conversion.problems)


def errors_of(file: Path) -> tuple[Problem, ...]:
    try:
        compose([file], environ={})
    except ConfigError as error:
        return error.problems
    return ()


def paths(problems: tuple[Problem, ...]) -> set[str]:
    return {problem.path for problem in problems if problem.severity == "error"}


def test_no_device_or_tracker_of_this_machine_is_looked_for(scripts: tuple[Converted, ...]) -> None:
    for script in scripts:
        assert script.conversion.tables["trainer"]["device"] == "cuda"
        assert not paths(script.conversion.problems) & {"trainer.logger", "trainer.device"}


def test_the_page_counts_what_becomes_of_settings() -> None:
    skyrl = total(hydra_scripts(RECORDED))
    kept = skyrl["kept"] + skyrl["derived"]
    assert f"of {skyrl.total()} in its Hydra-era scripts {kept} are kept or derived" in WORDS
    assert f"{skyrl['renamed']} renamed and {skyrl['refused']} refused" in WORDS
    sft = total(scripts_of_2026(RECORDED, "sft"))
    written = sft["kept"] + sft["renamed"]
    assert f"of the {sft.total()} in its SFT scripts of August 2026 {written} are kept or renamed" in WORDS
    assert f"{sft['needless'] + sft['derived']} need nothing, and {sft['not yet']} wait for a capability" in WORDS
    assert sft["refused"] == 0


@pytest.mark.parametrize(
    ("corpus", "era"),
    [("areal_yaml_keys.json", "AReaL's examples of 2025"), ("areal_yaml_keys_2026_05.json", "May 2026")],
)
def test_the_page_counts_what_becomes_of_areals_settings(corpus: str, era: str) -> None:
    files = areal_files(RECORDED, corpus)
    areal = total(files)
    written = areal["kept"] + areal["renamed"]
    assert f"f the {areal.total()} settings in {len(files)} of {era} {written} are kept or renamed" in WORDS
    assert f"{areal['derived'] + areal['needless']} need nothing" in WORDS
    assert f"{areal['not yet']} wait for a capability" in WORDS
    refused = [line for each in files for line in each.conversion.lines if line.outcome == "refused"]
    assert all(is_unknown(line) for line in refused)
    assert not refused or f"and {len(refused)} are refused, which no class" in WORDS


def is_unknown(line: Line) -> bool:
    return line.why.startswith("not known to this converter")
