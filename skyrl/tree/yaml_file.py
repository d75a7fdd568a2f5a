"""Reads and writes YAML by the core schema of YAML 1.2: `1e-6` is a number, `no` and `on` are text.

libyaml parses the text into events, which carry their lines; nodes and values are built here, so that text with too
many levels or values is refused as soon as a limit is exceeded. Duplicate keys, tags for anything but plain data, and
aliases that expand into too many values are refused as well.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from skyrl.errors import ConfigError
from skyrl.tree.origins import Path
from skyrl.tree.syntax_errors import malformed
from skyrl.tree.types import DEEPEST, MOST_VALUES

TOO_MUCH = f"with aliases expanded, this has more than {MOST_VALUES} values or {DEEPEST} levels"

_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}


def parse_yaml(name: str, text: str) -> tuple[Any, dict[Path, int]]:
    """The value of the one document, and path -> 1-based line of each key. Raises `ConfigError`."""
    try:
        node = _Composer(name, text).document()
    except yaml.MarkedYAMLError as error:
        is_open = str(error.context).endswith(("quoted scalar", "flow sequence", "flow mapping"))  # where it began
        mark = (error.context_mark if is_open else None) or error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else ()
        raise malformed(name, "YAML", error.problem or error.context or "", *position, text=text) from None
    except yaml.YAMLError as error:  # characters that YAML does not have
        raise malformed(name, "YAML", str(error).partition("\n")[0]) from None
    reading = _Reading(name)
    return (reading.value(node, ()) if node else {}), reading.lines


def yaml_text(data: object) -> str:
    """Plain data as YAML that readers of YAML 1.1 and 1.2 interpret identically."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


class _Composer:
    """Builds the nodes of the one document from libyaml's events; libyaml's composer would recurse without a limit."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._loader = _CoreLoader(text)
        self._anchors: dict[str, yaml.Node | None] = {}
        """None while the node is not finished."""
        self._nodes = 0

    def document(self) -> yaml.Node | None:
        """The root node; None for an empty text. Raises `ConfigError` and `yaml.YAMLError`."""
        self._loader.get_event()  # the start of the stream
        if self._loader.check_event(yaml.StreamEndEvent):
            return None
        self._loader.get_event()  # the start of the document
        root = self._node(self._loader.get_event(), 0)
        self._loader.get_event()  # its end
        if not self._loader.check_event(yaml.StreamEndEvent):
            reason = "a second document begins here; a configuration is a single document"
            raise self._refusal(self._loader.peek_event(), reason)
        return root

    def _node(self, event: yaml.Event, depth: int) -> yaml.Node:
        self._nodes += 1
        if self._nodes > 2 * MOST_VALUES or depth > DEEPEST:  # twice: keys are nodes, too
            raise self._refusal(event, TOO_MUCH)
        if isinstance(event, yaml.AliasEvent):
            if (node := self._anchors.get(event.anchor)) is None:
                raise self._refusal(event, f"the alias *{event.anchor} does not refer to a value that ends before it")
            return node
        if event.anchor is not None:
            if event.anchor in self._anchors:
                raise self._refusal(event, f"the anchor &{event.anchor} is defined twice")
            self._anchors[event.anchor] = None
        node = self._compose(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _compose(self, event: yaml.Event, depth: int) -> yaml.Node:
        if isinstance(event, yaml.ScalarEvent):
            return yaml.ScalarNode(self._tag(yaml.ScalarNode, event), event.value, event.start_mark, event.end_mark)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(child := self._loader.get_event(), yaml.SequenceEndEvent):
                items.append(self._node(child, depth + 1))
            return yaml.SequenceNode(self._tag(yaml.SequenceNode, event), items, event.start_mark)
        pairs = []
        while not isinstance(child := self._loader.get_event(), yaml.MappingEndEvent):
            key = self._node(child, depth + 1)
            pairs.append((key, self._node(self._loader.get_event(), depth + 1)))
        return yaml.MappingNode(self._tag(yaml.MappingNode, event), pairs, event.start_mark)

    def _tag(self, kind: type[yaml.Node], event: yaml.Event) -> str:
        if event.tag not in (None, "!"):
            return str(event.tag)
        return str(self._loader.resolve(kind, getattr(event, "value", None), event.implicit))

    def _refusal(self, event: yaml.Event, reason: str) -> ConfigError:
        return malformed(self._name, "YAML", reason, event.start_mark.line + 1, event.start_mark.column + 1)


class _Reading:
    """Converts nodes to values, counting them and recording their lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self._nodes = 0

    def value(self, node: yaml.Node, path: Path) -> object:
        self._nodes += 1
        if self._nodes > MOST_VALUES or len(path) > DEEPEST:
            raise self._refusal(node, TOO_MUCH)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._table(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _table(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag != f"{_TAG}str":
                raise self._refusal(key_node, f"the key {key_node.value!r} is not text: put it in quotes")
            key = key_node.value
            if key in table:
                raise self._refusal(key_node, f"the key {key!r} appears twice in one table")
            if key == "<<":
                raise self._refusal(key_node, "YAML 1.2 has no merge key <<: use extends, or write the values out")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            table[key] = self.value(value_node, (*path, key))
        return table

    def _scalar(self, node: yaml.Node) -> object:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str":
            return text
        if not isinstance(text, str) or kind not in _CORE or not _CORE[kind].fullmatch(text):
            raise self._refusal(node, f"this value with the tag {node.tag} cannot be read as plain data")
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                try:
                    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
                except ValueError:  # thousands of digits
                    raise self._refusal(node, "a whole number with too many digits") from None
            case _:
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def _refusal(self, node: yaml.Node, reason: str) -> ConfigError:
        return malformed(self.name, "YAML", reason, node.start_mark.line + 1, node.start_mark.column + 1)


class _CoreLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # without libyaml: slower
    """The parser of PyYAML with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  # PyYAML's own way: filled below


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no annotations
    """Dumper that quotes text which either version of YAML would read as something else."""


def _represent_text(dumper: Any, text: str) -> Any:
    """Represent text with line ends other than the line feed escaped, since a reader would fold them."""
    style = '"' if any(end in text for end in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _kind, _pattern in _CORE.items():
    _whole = re.compile(f"(?:{_pattern.pattern})$")
    _CoreLoader.add_implicit_resolver(_TAG + _kind, _whole, None)
    _Dumper.add_implicit_resolver(_TAG + _kind, _whole, None)
