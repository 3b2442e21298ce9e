"""The directive `commands`: every command and flag of a program, from its parser.

``{commands} jaxinf.cli:main`` calls the program's function up to the place where it
would read the command line, and writes a section for each command that it defines, or
the flags alone if there is one command.
"""

import argparse
import importlib
import re
import warnings
from collections.abc import Iterator
from unittest import mock

import tyro
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class _Called(Exception):
    """The program would read its command line now."""


def parser_of(place: str) -> argparse.ArgumentParser:
    """Returns the parser of the program whose main function is at module:name."""
    module, _, name = place.partition(":")

    def called(*definition: object, **how: object) -> None:
        raise _Called(definition, how)

    main = getattr(importlib.import_module(module), name)
    with mock.patch("tyro.cli", called):
        try:
            main(["--help"])
        except _Called as call:
            definition, how = call.args
        else:
            raise ValueError(f"{place}: expected a function that calls tyro.cli")
    how = {k: v for k, v in how.items() if k in ("prog", "description", "config")}
    with warnings.catch_warnings():
        # tyro has no other way to the flags; pyproject.toml bounds its version.
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(*definition, **how)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields the parsers of all commands that can be given."""
    below = [
        one
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction) or _names(action)
        for one in _names(action).values()
    ]
    if not below:
        yield parser
    for one in below:
        yield from commands_of(one)


def _names(action: object) -> dict[str, argparse.ArgumentParser]:
    return getattr(action, "_name_parser_map", {})


class Commands(SphinxDirective):
    """Sections with the commands of a program."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns a section for each command, or the flags if there is one command."""
        parser = parser_of(self.arguments[0])
        every = list(commands_of(parser))
        if every == [parser]:
            return _flags(parser)
        return [self._section(one) for one in every]

    def _section(self, parser: argparse.ArgumentParser) -> nodes.section:
        section = nodes.section(ids=[nodes.make_id(parser.prog)])
        section += nodes.title(parser.prog, "", nodes.literal(text=parser.prog))
        for text in re.split(r"\n\s*\n", parser.description or ""):
            section += nodes.paragraph("", " ".join(text.split()))
        section.extend(_flags(parser))
        self.state.document.note_implicit_target(section, section)
        return section


def _flags(parser: argparse.ArgumentParser) -> list[nodes.Node]:
    """Returns the flags below the titles of their groups."""
    found: list[nodes.Node] = []
    titled = [
        (group.title or "", [a for a in group._group_actions if a.dest != "help"])
        for group in parser._action_groups
    ]
    titled = [(title, actions) for title, actions in titled if actions]
    for title, actions in titled:
        if len(titled) > 2:
            found.append(nodes.rubric("", title))
        found.append(_listed(actions, parser.prog))
    return found


def _listed(actions: list[argparse.Action], prog: str) -> nodes.definition_list:
    listed = nodes.definition_list(classes=["flags"])
    for action in actions:
        place = nodes.make_id(f"{prog} {_name(action)}")
        shown = nodes.literal(text=_shown(action))
        term = nodes.term("", "", nodes.reference("", "", shown, refid=place))
        term["ids"] = [place]
        text = " ".join((action.help or "").split())
        listed += nodes.definition_list_item(
            "", term, nodes.definition("", nodes.paragraph("", text))
        )
    return listed


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar)


def _shown(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    takes = action.metavar if action.nargs != 0 else None
    return " ".join(str(word) for word in (names, takes) if word)


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
