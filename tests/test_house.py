"""Rules that no linter knows: where code may lie, and what it may never do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.config.loading.kinds import KINDS
from skyrl.config.settings.strategies import STRATEGIES
from tests.syntax import nodes_of, tree_of

pytestmark = pytest.mark.xdist_group("house")

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "skyrl" / "starter" / "templates"  # files that `skyrl init` copies
MODULES = sorted(file for file in (ROOT / "skyrl").rglob("*.py") if TEMPLATES not in file.parents)
TESTS = [ROOT / "conftest.py", *(ROOT / "tests").rglob("*.py"), *(ROOT / "property_tests").rglob("*.py")]

SAYS_NOTHING = {"base", "common", "core", "helper", "helpers", "misc", "util", "utils"}
RUNS_WHAT_IT_READS = {"cloudpickle", "dill", "marshal", "pickle"}
OPENS_A_DOOR = {("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False)}
SEE_THE_WHOLE_TREE = {"autotune", "cli", "config", "experiments", "interop", "runs", "tools"}

TEXTS_OF_OTHERS = {"skyrl/inference/servers/vllm_server.py", "skyrl/launchers/slurm.py", "skyrl/storage/bucket.py"}
"""Modules that search in messages of other systems, which give nothing else: `Problem.code` says it for our own."""

SKIPS = {"importorskip", "skip", "skipif", "xfail"}

WITHOUT_REASON = re.compile(r"# (type: ignore\[[\w, -]+\]|noqa: [A-Z0-9, ]+)\s*$")

FOLDERS = "home|opt|root|tmp|work|Users"
ABSOLUTE_PATH = re.compile(rf"(?<![\w.~}}-])/(?:{FOLDERS})/[\w./-]+")
DEFAULTS_OF_THE_TREE = {"/tmp/skyrl-logs", "/tmp/skyrl_lora_sync", "/home/ray/default/sql_data"}


def nodes(files: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of every file, with its place."""
    for file in files:
        name = file.relative_to(ROOT)
        for node in nodes_of(file):
            yield f"{name}:{getattr(node, 'lineno', 1)}", node


def texts() -> Iterator[tuple[str, str]]:
    """Every line that the project publishes, with its place. The reference cases and the trees of other systems are
    facts, and not ours to edit.
    """
    suffixes = {".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
    folders = (".ci", "benchmarks", "docs", "examples", "property_tests", "schemas", "skyrl", "tests")
    files = [
        *(file for file in ROOT.iterdir() if file.name != ".git"),
        *(file for folder in folders for file in (ROOT / folder).rglob("*")),
    ]
    for file in files:
        if (
            file.is_file()
            and file.name != ".git"
            and file.suffix in suffixes
            and not {ROOT / "tests" / "reference", ROOT / "skyrl" / "interop" / "trees"} & {*file.parents}
        ):
            name = file.relative_to(ROOT)
            for number, line in enumerate(file.read_text().splitlines(), start=1):
                yield f"{name}:{number}", line


def imported(node: ast.AST) -> set[str]:
    """Top-level names of what an import statement imports."""
    match node:
        case ast.Import(names=names):
            return {alias.name.partition(".")[0] for alias in names}
        case ast.ImportFrom(module=str(module)):
            return {module.partition(".")[0]}
    return set()


def test_modules_lie_in_a_package_or_in_one_of_its_sublayers() -> None:
    relative = [module.relative_to(ROOT / "skyrl") for module in MODULES]
    assert [str(path) for path in relative if len(path.parts) > 3] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [str(module) for module in MODULES if SAYS_NOTHING & {module.stem, module.parent.name}] == []


def test_every_package_says_what_it_is() -> None:
    folders = {module.parent for module in MODULES}
    faces = [folder / "__init__.py" for folder in sorted(folders)]
    assert [str(face) for face in faces if not face.exists() or not ast.get_docstring(tree_of(face))] == []


def test_a_component_takes_its_own_part_of_the_configuration() -> None:
    below = [module for module in MODULES if module.relative_to(ROOT / "skyrl").parts[0] not in SEE_THE_WHOLE_TREE]
    imports = ((location, node) for location, node in nodes(below) if isinstance(node, ast.ImportFrom))
    assert [location for location, node in imports if "SkyRLTrainConfig" in {alias.name for alias in node.names}] == []


def containing(pattern: str) -> list[Path]:
    """Modules with a text of this form."""
    return [file for file in MODULES if re.search(pattern, file.read_text())]


def names_a_strategy(node: ast.AST) -> bool:
    """Whether the node is the field `strategy`, or a strategy's name among constants."""
    if isinstance(node, ast.Call):
        return any(map(names_a_strategy, node.args))
    match node:
        case ast.Attribute(attr="strategy") | ast.Name(id="strategy"):
            return True
        case ast.Subscript(slice=inside):
            return names_a_strategy(inside)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return any(map(names_a_strategy, items))
    return isinstance(node, ast.Constant) and node.value in ("strategy", *STRATEGIES)


def tells_strategies_apart(node: ast.AST) -> bool:
    """Whether the node compares the name of a strategy."""
    compared = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    return any(map(names_a_strategy, compared)) or (isinstance(node, ast.Match) and names_a_strategy(node.subject))


def test_strategies_are_told_apart_by_their_facts_alone() -> None:
    facts = ROOT / "skyrl" / "config" / "strategies.py"
    others = [file for file in containing("|".join(("strategy", *STRATEGIES))) if file != facts]
    assert [location for location, node in nodes(others) if tells_strategies_apart(node)] == []


@pytest.mark.parametrize(
    "line",
    [
        'run.trainer.strategy == "megatron"',
        'trainer.strategy not in ("fsdp", "fsdp2")',
        "strategy != name",
        'values["strategy"] == name',
        'part.learner == "megatron"',
        'values.get("strategy", "fsdp") in ["deepspeed"]',
    ],
)
def test_a_comparison_of_strategies_is_seen(line: str) -> None:
    assert any(map(tells_strategies_apart, ast.walk(ast.parse(line))))


def tells_kinds_apart(node: ast.AST) -> bool:
    """Whether the node asks for the class of a run's tree, or compares its kind with a constant."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            names = {part.id for part in ast.walk(classes) if isinstance(part, ast.Name)}
            return not names.isdisjoint(
                {"SkyRLTrainConfig", "SupervisedConfig", "SFTConfig", "RewardModelConfig", "PreferenceConfig"}
            )
        case ast.Compare(left=left, comparators=others):
            compared = {part.attr for part in (left, *others) if isinstance(part, ast.Attribute)}
            names = {part.id for part in (left, *others) if isinstance(part, ast.Name)}
            constants = {part.value for part in (left, *others) if isinstance(part, ast.Constant)}
            return "RL" in names or ("kind" in compared | names and not constants.isdisjoint(KINDS))
        case ast.Match(subject=ast.Attribute(attr="kind") | ast.Name(id="kind"), cases=cases):
            constants = {
                part.value for case in cases for part in ast.walk(case.pattern) if isinstance(part, ast.Constant)
            }
            return not constants.isdisjoint(KINDS)
    return False


def test_kinds_of_run_are_told_apart_by_their_facts_alone() -> None:
    others = [file for file in containing(r"\bkind\b|Config\b|\bRL\b") if "config" not in file.relative_to(ROOT).parts]
    assert [location for location, node in nodes(others) if tells_kinds_apart(node)] == []


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(run, SkyRLTrainConfig)",
        "isinstance(run, SFTConfig | RewardModelConfig)",
        'run.kind == "rl"',
        '(kind := stored.kind) and kind != "sft"',
        "kind is RL",
        'match run.kind:\n    case "rl": pass',
    ],
)
def test_a_comparison_of_kinds_is_seen(line: str) -> None:
    assert any(map(tells_kinds_apart, ast.walk(ast.parse(line))))


def test_nothing_is_unpickled() -> None:
    assert [location for location, node in nodes(MODULES) if imported(node) & RUNS_WHAT_IT_READS] == []


def test_no_library_is_told_to_run_what_it_reads() -> None:
    """A flag of the user's configuration may say so; a constant in our code may not."""
    keywords = ((location, node.arg, node.value) for location, node in nodes(MODULES) if isinstance(node, ast.keyword))
    constant = (
        (location, (name, value.value)) for location, name, value in keywords if isinstance(value, ast.Constant)
    )
    assert [location for location, flag in constant if flag in OPENS_A_DOOR] == []


def test_no_string_is_run_as_code() -> None:
    calls = ((location, node.func) for location, node in nodes(MODULES) if isinstance(node, ast.Call))
    assert [location for location, name in calls if isinstance(name, ast.Name) and name.id in {"eval", "exec"}] == []


def test_no_behaviour_depends_on_the_text_of_a_message() -> None:
    files = {location.partition(":")[0] for location, node in nodes(MODULES) if _asks_a_message(node)}
    assert files == TEXTS_OF_OTHERS


def _asks_a_message(node: ast.AST) -> bool:
    """Whether the node searches for a text in a problem's message or hint, or in that of an exception."""
    match node:
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]):
            return _is_message(right) and isinstance(left, ast.Constant | ast.Name)
        case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "endswith" | "find" | "partition")):
            return _is_message(value) and ast.unparse(node.args[0]) != r"'\n'"  # the first line, whatever it says
        case _:
            return False


def _is_message(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="message" | "hint"):
            return True
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id="error" | "exception" | "problem" | "warning")]):
            return True
        case _:
            return False


def test_no_test_skips_itself() -> None:
    """`gpu` is the one reason not to run, and conftest.py decides it."""
    mentions = [file for file in TESTS if any(name in file.read_text() for name in SKIPS)]
    names = (
        (location, node) for location, node in nodes(mentions) if isinstance(node, ast.Attribute) and node.attr in SKIPS
    )
    on_pytest = [location for location, node in names if ast.unparse(node).startswith("pytest.")]
    assert [location for location in on_pytest if not location.startswith("conftest.py")] == []


def test_every_exemption_from_a_check_has_its_reason_beside_it() -> None:
    assert [location for location, line in texts() if WITHOUT_REASON.search(line)] == []


def test_nothing_names_a_folder_of_one_machine() -> None:
    mentions = [(location, path) for location, line in texts() for path in ABSOLUTE_PATH.findall(line)]
    assert [(location, path) for location, path in mentions if path.rstrip(".") not in DEFAULTS_OF_THE_TREE] == []


_NO_NAME = re.compile(
    r"_(of|by|at|while|where|who|how|why|what|beside|elsewhere|there|here|together|alone|same|once|again|under|over)(_|$)"
    r"|_(found|said|asked|told|shown|given|made|drawn|called|begun|started|ended|held|kept|within|late|left|next|one)$"
)
"""Names that say neither what a function does nor what it returns."""


def test_private_functions_are_named_by_what_they_do_or_return() -> None:
    names = {
        f"{module.relative_to(ROOT)}:{node.lineno} {node.name}"
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _NO_NAME.match(node.name)
    }
    assert names == set()


def test_what_is_looped_over_has_a_name() -> None:
    loops = {
        f"{module.relative_to(ROOT)}:{node.target.lineno}"
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name) and name.id == "each"
    }
    assert loops == set()
