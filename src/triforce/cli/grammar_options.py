"""Options that hold a text to a form. Imports nothing heavy."""

from __future__ import annotations

import argparse

from triforce.cli.argument_values import path, some_text


def grammar(parser: argparse._ActionsContainer) -> None:
    """Add them; one of them may be given."""
    add = parser.add_mutually_exclusive_group().add_argument
    text = "the text is JSON that a JSON schema describes: that in a file, or SCHEMA itself if it begins with {"
    add("--json-schema", type=path, metavar="SCHEMA", help=text)
    text = "the whole text matches this regular expression, without look-around"
    add("--regex", type=some_text, metavar="PATTERN", help=text)
    text = "the text is exactly TEXT; repeat it to allow several"
    add("--choice", type=some_text, action="append", metavar="TEXT", help=text)
