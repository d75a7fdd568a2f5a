"""Commands that take fields as PATH=VALUE, and say so where a field is given as an option: `--lr 1e-5`."""

from __future__ import annotations

import click


class FieldsCommand(click.Command):
    """A command whose unknown options are looked for among the fields of the tree."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Option like click's; the message for an unknown option names the fields that may be meant."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            takes_fields = any(parameter.name == "arguments" for parameter in self.params)
            if not takes_fields or error.possibilities not in (None, [], ["--help"]):
                raise
            raise click.UsageError(_as_field(error.option_name, words), ctx) from None


class Commands(click.Group):
    """A group of such commands."""

    command_class = FieldsCommand
    group_class = type


def _as_field(option: str, words: list[str]) -> str:
    """The sentence about an unknown option, with the argument that sets the field of its name."""
    from skyrl.config.root import SkyRLTrainConfig
    from skyrl.tree.suggestions import suggestion

    name = option.lstrip("-").replace("-", "_")
    _, paths = suggestion(SkyRLTrainConfig, SkyRLTrainConfig, tuple(name.split(".")), 0)
    value = _value_of(option, words)
    meant = " or ".join(f"{path}={value}" for path in paths)
    return f"no such option: {option}. Fields are set as PATH=VALUE" + (f": {meant}" if meant else "")


def _value_of(option: str, words: list[str]) -> str:
    """Text given with the option: `--lr=1e-5`, `--lr 1e-5`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following or "VALUE"
    return "VALUE"
