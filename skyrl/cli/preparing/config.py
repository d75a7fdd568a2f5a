"""`skyrl config ...`: inspect a configuration without starting anything. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skyrl.cli.command_line.arguments import (
    ARGUMENTS,
    STRICT,
    TRUST,
    complete_path,
    compose_arguments,
    load_words,
    reads_code,
    refuse_nothing,
    split_words,
    warn,
)
from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_either, print_result
from skyrl.cli.command_line.messages import say_problems
from skyrl.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from skyrl.config.loading.explain import Explanation
    from skyrl.interop.report import Conversion

_LANGUAGE = click.option(
    "--format", "language", type=click.Choice(["json", "toml", "yaml"]), default="json", show_default=True
)


@click.group(cls=Commands)
def config() -> None:
    """Check, show, explain, compare or convert configurations; nothing is started.

    `check`, `show`, `explain` and `diff` import modules that your files name only as their help says.
    """


@config.command(epilog=examples("skyrl config check run.toml trainer.epochs=2"))
@ARGUMENTS
@STRICT
@TRUST
@json_option
@reads_code("all")
def check(arguments: tuple[str, ...], strict: bool, as_json: bool) -> None:
    """Report all problems of a configuration; nothing is started.

    Modules that your files and arguments name for a `class`, a loss or an estimator are imported, which runs them:
    their fields are checked, too. With --no-code, nothing is imported, and what depends on it is listed as not checked.
    """
    from skyrl.config.loading.code_digests import unimported_code
    from skyrl.tree.imports import follows

    refuse_nothing(arguments, "check")
    also = None if follows("all") else lambda kind: (unimported_code,)
    if as_json:
        from skyrl.config import compose

        composed = compose(*split_words(arguments), strict=strict, also=also, environ=os.environ)
        print_result(None, problems=composed.warnings)
        return
    compose_arguments(arguments, strict=strict, also=also)
    click.echo(
        "The configuration is valid. Files, models and tasks are checked by `skyrl doctor` and before a run starts."
    )


@config.command(epilog=examples("skyrl config show run.toml --format toml"))
@ARGUMENTS
@_LANGUAGE
@click.option("--written", is_flag=True, help="As written, before anything is derived.")
@click.option("--sparse", is_flag=True, help="Only what differs from the defaults and was not derived.")
@click.option(
    "--origins", "with_origins", is_flag=True, help="One line per field, with the place where each value was set."
)
@click.option("--derived", "only_derived", is_flag=True, help="Only what was derived, and from what.")
@reads_code("classes")
def show(
    arguments: tuple[str, ...], language: str, written: bool, sparse: bool, with_origins: bool, only_derived: bool
) -> None:
    """Print a configuration, complete and with all derived values."""
    if only_derived and (written or sparse):
        option = "--written" if written else "--sparse"
        raise UserError(f"--derived prints what {option} leaves out: give one of them")
    if only_derived and with_origins:
        raise UserError("--derived prints what each value was derived from: leave --origins out")
    from skyrl.cli.preparing import show as forms
    from skyrl.config.loading.resolve import resolve_with_origins
    from skyrl.config.loading.standalone_file import kept_tables

    loaded = load_words(arguments)
    warn(loaded.warnings)
    run, origins = loaded.config, loaded.origins
    if sparse:
        kept = kept_tables(run, origins)
        lines = forms.lines_with_origins(run, origins, kept) if with_origins else forms.dump(kept, language, run)
        click.echo(lines)
        return
    if not written:
        run, origins, _ = resolve_with_origins(run, origins)
    if only_derived:
        click.echo(forms.derived_lines(run, origins))
    elif with_origins:
        click.echo(forms.lines_with_origins(run, origins))
    else:
        click.echo(forms.written_text(run, language) if written else forms.full_tree(run, language))


@config.command(epilog=examples("skyrl config explain trainer.train_batch_size run.toml"))
@click.argument("path", shell_complete=complete_path)
@ARGUMENTS
@json_option
@reads_code("classes")
def explain(path: str, arguments: tuple[str, ...], as_json: bool) -> None:
    """Explain what PATH means and where its value is from.

    What is derived from it, and which checks read it, is listed, too.
    """
    import attrs

    from skyrl.config.loading.explain import explain as explain_path
    from skyrl.config.loading.resolve import resolve_with_origins

    if os.path.exists(path) or path.endswith((".toml", ".yaml", ".yml", ".json")):
        hint = f"skyrl config explain trainer.epochs {path}"
        message = "is a file; the path of a field must come first"
        raise ConfigError([Problem(path=path, message=message, hint=hint)], title="There is nothing to explain")
    loaded = load_words(arguments)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    explanation = explain_path(path, run, origins)
    print_either(attrs.asdict(explanation), explanation_text(explanation), as_json=as_json)


def explanation_text(explanation: Explanation) -> str:
    """The explanation as text for a terminal."""
    is_table = explanation.type.startswith("a table (") and isinstance(explanation.value, dict)
    kind = ", ".join(filter(None, (explanation.type, explanation.allowed)))
    lines = [explanation.path if is_table else f"{explanation.path} = {_spelled(explanation.value)}", f"  {kind}"]
    lines += textwrap.wrap(explanation.doc, 100, initial_indent="  ", subsequent_indent="  ")
    if is_table:
        lines += ["", "Its fields (explain one to see where its value comes from and what checks it):"]
        inner = Counter(name.partition(".")[0] for name in explanation.value if "." in name)
        lines += [f"  {name} = {_spelled(value)}" for name, value in explanation.value.items() if "." not in name]
        lines += [f"  {name}  (a table of {number} fields)" for name, number in inner.items()]
    else:
        width = max(len(step.location) for step in explanation.chain)
        lines += ["", "Where it came from, the last one wins:"]
        for step in explanation.chain:
            lines.append(f"  {step.location:<{width}}  {_spelled(step.value)}")
            lines += textwrap.wrap(step.because, 96, initial_indent="      ", subsequent_indent="      ")
            lines += (f"      from {path} = {_spelled(value)}  ({location})" for path, value, location in step.reads)
    if explanation.feeds:
        lines += ["", "What is derived from it:", *(f"  {path}  ({rule})" for path, rule in explanation.feeds)]
    if explanation.acts_when:
        unread = f"not known here, since {' and '.join(explanation.unread_code)} was not imported"
        verdict = {True: "it does here", False: "it does not here", None: unread}[explanation.acts]
        lines += ["", f"It has an effect when {explanation.acts_when}: {verdict}."]
    if explanation.checks and not is_table:
        lines += ["", "Checks that read it:"]
        for name, sentence in explanation.checks:
            lines += textwrap.wrap(f"{name}: {sentence}", 100, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)


def _spelled(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:380]} ..."


@config.command(epilog=examples("skyrl config diff runs/one runs/other"))
@click.argument("before")
@click.argument("after")
@json_option
@click.option("--written", is_flag=True, help="Compare before anything is derived.")
@reads_code("classes")
def diff(before: str, after: str, as_json: bool, written: bool) -> None:
    """Compare two configurations; exit code 1 if they differ.

    Each is a file, the folder of a run, or a preset (preset:NAME).

    Of two runs, the files of their own code (rewards, environments, losses) are compared, too, by digests.
    """
    from skyrl.config.loading.code_digests import changed_code, stored_digests
    from skyrl.config.loading.resolve import resolve_with_origins
    from skyrl.tree.dump import differences, flatten, public_value

    one, other = (load_words([name]) for name in (before, after))
    trees = [one.config, other.config]
    if not written:
        trees = [resolve_with_origins(loaded.config, loaded.origins)[0] for loaded in (one, other)]
    kinds = (trees[0].kind, trees[1].kind)
    flat_trees = [flatten(tree, leaf=public_value) for tree in trees]
    differing = differences(trees[0], trees[1]) if len(set(kinds)) == 1 else ("kind",)  # kinds have different fields
    changes = {path: (flat_trees[0].get(path), flat_trees[1].get(path)) for path in differing}
    changes |= changed_code(stored_digests(before), stored_digests(after))
    if as_json:
        rows = [{"path": path, "before": old, "after": new} for path, (old, new) in changes.items()]
        print_result(rows, ok=not rows)
    else:
        texts = [(path, *(json.dumps(value, ensure_ascii=False) for value in pair)) for path, pair in changes.items()]
        width = max((len(path) for path, _, _ in texts), default=0)
        for path, old, new in texts:
            click.echo(f"{path:<{width}}  {old}  ->  {new}")
    if changes:
        sys.exit(1)


@config.command(epilog=examples("skyrl config convert run_gsm8k.sh --to run.toml"))
@click.argument("source", metavar="FILE|SCRIPT", type=click.Path())
@click.option(
    "--from",
    "house",
    type=click.Choice(["skyrl-hydra", "skyrl", "areal", "verl", "trl", "prime-rl"]),
    help="The system that the file is of; without it, it is recognised by its settings.",
)
@click.option(
    "--to",
    "output",
    type=click.Path(dir_okay=False, allow_dash=True),
    callback=lambda context, option, value: None if value == "-" else value,
    help="Write the TOML to this file instead of standard output (-).",
)
@click.option(
    "--command", "number", type=click.IntRange(min=1), help="Which of a script's training commands to convert."
)
@click.option(
    "--kind",
    type=click.Choice(["grpo", "rloo", "sft", "reward", "dpo", "kto", "distillation", "gkd"]),
    help="Which of TRL's trainers arguments are for, where a file does not tell.",
)
@click.option("--keep-going", is_flag=True, help="Write the other settings even if some are refused.")
@click.option("--keep-engine", is_flag=True, help="Keep SGLang as the engine of an AReaL file, instead of vLLM.")
@click.option("--force", is_flag=True, help="Overwrite existing output files.")
@json_option
def convert(
    source: str,
    house: str | None,
    output: str | None,
    number: int | None,
    kind: str | None,
    keep_going: bool,
    keep_engine: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Convert a configuration of SkyRL, AReaL, verl, TRL or prime-rl.

    The result is TOML for `skyrl run`; a report tells the outcome of each setting.

    If a setting is refused, the exit code is 1 and nothing is written; see --keep-going. Settings of an AReaL file that
    concern machines go into a second file, run.cluster.toml beside run.toml, which `skyrl launch` reads with --cluster.
    """
    from skyrl.config.loading.recognition import refuse_other_sources
    from skyrl.interop.recognised import NAMES, recognised_system
    from skyrl.interop.values import is_script

    if output and not force:
        _refuse_to_replace(output)
    if house is None:
        house = recognised_system(source)
        click.echo(f"{source} is a file of {NAMES[house]}, by its settings; --from chooses another system.", err=True)
    refuse_other_sources(source, house)
    if number and not is_script(source):
        raise UserError(f"--command chooses among the commands of a script, and {source} is none")
    if kind and house != "trl":
        raise UserError(f"--kind works only with --from trl, not --from {house}")
    if keep_engine and house != "areal":
        raise UserError(f"--keep-engine works only with --from areal, not --from {house}")
    from skyrl.tree.imports import following

    with following("nothing"):
        converted = _converted(source, house, number, kind, keep_engine=keep_engine)
    if as_json and not output:
        raise UserError("--json prints the report instead of the TOML: write the TOML to a file with --to")
    if not converted.lines:
        raise UserError(f"{source} contains no settings of {house}: nothing was converted")
    is_written = keep_going or not converted.refused
    cluster = f"{output.removesuffix('.toml')}.cluster.toml" if output and converted.cluster else None
    if is_written:
        if cluster and not force:
            _refuse_to_replace(cluster)
        _write_converted(converted, output, cluster)
    if as_json:
        print_result(_reported(converted, house, is_written), ok=is_written, problems=converted.problems)
        sys.exit(0 if is_written else 1)
    _tell(converted, [name for name in (output, cluster) if name], is_written=is_written)
    if not is_written:
        sys.exit(1)


def _tell(converted: Conversion, files: list[str], *, is_written: bool) -> None:
    """Print the report of a conversion, what was written, and what to do next."""
    click.echo(converted.report(), err=True)
    if converted.problems:
        click.echo(err=True)
        say_problems(converted.problems, "What `skyrl config check` says about it")
    if is_written and files:
        click.echo(f"\nWrote {' and '.join(files)}. Next: skyrl doctor {files[0]}", err=True)
    if not is_written:
        lost = f", {len(converted.lost)} of which may change the training" if converted.lost else ""
        click.echo(
            f"\nNothing was written, because some settings were refused{lost}. "
            "--keep-going writes the others, and lists the refused ones in a comment at the top.",
            err=True,
        )


def _reported(converted: Conversion, house: str, is_written: bool) -> dict[str, object]:
    """The report of a conversion as data, with secrets masked."""
    from skyrl.tree.masking import masked

    return {
        "from": house,
        "written": is_written,
        "counts": converted.counts(),
        "settings": [
            {
                "source": line.source,
                "value": masked(line.value, line.source),
                "outcome": line.outcome,
                "targets": line.targets,
                "reason": line.reason,
                "changes_training": line.is_refused and line.changes_training,
            }
            for line in converted.lines
        ],
    }


def _converted(source: str, house: str, number: int | None, kind: str | None, *, keep_engine: bool) -> Conversion:
    """The converted file of one system. `number` chooses among the commands of a script."""
    if house == "areal":
        from skyrl.interop.areal.convert import convert_areal

        return convert_areal(source, keep_engine=keep_engine, number=number)
    if house == "verl":
        from skyrl.interop.verl.convert import convert_verl

        return convert_verl(source, number=number)
    if house == "trl":
        from skyrl.interop.trl.convert import convert_trl

        return convert_trl(source, number=number, kind=kind)
    if house == "prime-rl":
        from skyrl.interop.prime_rl.convert import convert_prime_rl

        return convert_prime_rl(source)
    from skyrl.interop.skyrl.scripts import convert_skyrl

    return convert_skyrl(source, number=number)


def _refuse_to_replace(output: str) -> None:
    """Raises `UserError` for a file that exists."""
    if os.path.exists(output):
        raise UserError(f"{output} already exists: choose another file, or overwrite it with --force")


def _write_converted(converted: Conversion, output: str | None, cluster: str | None) -> None:
    """Write the TOML to a file or to standard output, and the description of the cluster to a separate file. Raises
    `UserError` for a file that cannot be written.
    """
    from skyrl.cli.preparing.show import dump
    from skyrl.config.cluster import ClusterConfig
    from skyrl.storage.atomic import write_files

    text = converted.header() + dump(converted.tables, "toml", converted.root)
    if not output:
        click.echo(text)
        return
    written = {Path(output): text + "\n"}
    if cluster:
        header = f"# skyrl launch TARGET {output} --cluster {cluster}; docs/launching.md describes the fields.\n"
        written[Path(cluster)] = header + dump(converted.cluster, "toml", ClusterConfig) + "\n"
    try:
        write_files(written)
    except OSError as error:
        raise UserError(f"{' and '.join(map(str, written))} cannot be written: {error.strerror}") from None


@config.command(epilog=examples("skyrl config schema run.toml > run.schema.json"))
@ARGUMENTS
def schema(arguments: tuple[str, ...]) -> None:
    """Print the JSON schema of files, for editors.

    An editor with it completes and checks a file while you type.

    With files: the schema of their tree, including your own classes.
    """
    from skyrl.config import SkyRLTrainConfig
    from skyrl.tree.schema import json_schema

    instance = load_words(arguments).config if arguments else SkyRLTrainConfig()
    click.echo(json.dumps(json_schema(type(instance), instance), indent=2, ensure_ascii=False))


@config.command(epilog=examples("skyrl config docs trainer.faults"))
@ARGUMENTS
def docs(arguments: tuple[str, ...]) -> None:
    """Print the reference of every field as Markdown.

    With files, it includes your own classes. With paths of tables or fields, such as trainer.faults, only these are
    printed.
    """
    from skyrl.config import SkyRLTrainConfig
    from skyrl.config.loading.reference import reference_page, reference_section

    paths = [word for word in arguments if _is_path(word)]
    others = [word for word in arguments if word not in paths]
    run = load_words(others).config if others else SkyRLTrainConfig()
    click.echo("\n".join(reference_section(run, path) for path in paths) if paths else reference_page(run))


def _is_path(word: str) -> bool:
    """Whether the word is a dotted path of a tree, not an argument, a preset, or an existing file or folder."""
    names = word.split(".")
    is_file = os.path.exists(word) or names[-1] in ("toml", "yaml", "yml", "json")
    return all(name.isidentifier() for name in names) and not is_file
