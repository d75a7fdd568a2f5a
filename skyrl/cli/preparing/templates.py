"""`skyrl templates`: inspects chat templates before they are used in training."""

from __future__ import annotations

import click
from attrs import asdict

from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_result

_TEMPLATE = click.option(
    "--template", metavar="NAME|FILE", help="Template to use instead of the model's own; see generator.chat_template."
)


@click.group(cls=Commands)
def templates() -> None:
    """Check or show chat templates."""


@templates.command(epilog=examples("skyrl templates check Qwen/Qwen2.5-0.5B-Instruct"))
@click.argument("model")
@_TEMPLATE
@json_option
def check(model: str, template: str | None, as_json: bool) -> None:
    """Check that turns are rendered alike alone and in a chat.

    MODEL is a folder or a hub name. The exit code is 1 if a conversation of two turns differs or is refused.
    """
    from skyrl.config import ChatTemplateConfig
    from skyrl.models.files.chat_templates import BUILT_IN, with_template
    from skyrl.models.files.loading import load_tokenizer
    from skyrl.rollout.template_check import check_template

    own = ChatTemplateConfig(source="name" if template in BUILT_IN else "file", name_or_path=template)
    verdicts = check_template(with_template(load_tokenizer(model), own))
    if as_json:
        safe = verdicts[0].outcome == "stable"
        print_result({"safe": safe, "dialogues": [asdict(verdict) for verdict in verdicts]}, ok=safe)
        raise click.exceptions.Exit(0 if safe else 1)
    for verdict in verdicts:
        click.echo(f"{verdict.dialogue:<28} {verdict.outcome}")
        if verdict.outcome == "refused":
            click.echo(f"  {verdict.as_a_whole}")
        if verdict.outcome == "differs":
            click.echo(f"  trained on:       {verdict.turn_by_turn!r}")
            click.echo(f"  the template has: {verdict.as_a_whole!r}")
    if all(verdict.outcome == "stable" for verdict in verdicts):
        click.echo("Safe for token-in, token-out: a conversation renders the same turn by turn and as a whole.")
    elif verdicts[0].outcome == "stable":
        click.echo(
            "Safe for plain conversations. Conversations that differ above are trained on as they were sampled; "
            "those that are refused cannot be used with this template."
        )
    else:
        click.echo(
            "Not safe: training keeps the tokens that were sampled, but rendering the whole conversation later gives "
            "different ones. Use another template, or continue conversations by tokens when serving, too."
        )
        raise click.exceptions.Exit(1)


@templates.command(epilog=examples("skyrl templates show model --template qwen3_without_thinking"))
@click.argument("model", metavar="MODEL|FILE")
@_TEMPLATE
def show(model: str, template: str | None) -> None:
    """Print nine kinds of chat as a template renders them.

    The learned tokens are between ⟦ and ⟧. MODEL is a folder or a hub name. FILE is a template (.jinja) without a
    model: its special tokens are then the ones that it spells out, and `<|endoftext|>` ends a sequence.
    """
    from skyrl.chats.examples import forms_page
    from skyrl.config import ChatTemplateConfig
    from skyrl.models.files.byte_tokenizer import stand_in_tokenizer
    from skyrl.models.files.chat_templates import BUILT_IN, with_template
    from skyrl.models.files.loading import load_tokenizer

    if model.endswith((".jinja", ".jinja2")):
        own = ChatTemplateConfig(source="file", name_or_path=model)
        tokenizer = stand_in_tokenizer(own)
    else:
        own = ChatTemplateConfig(source="name" if template in BUILT_IN else "file", name_or_path=template)
        tokenizer = with_template(load_tokenizer(model), own)
    click.echo(forms_page(tokenizer), nl=False)
