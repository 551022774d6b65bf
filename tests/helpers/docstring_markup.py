"""What Sphinx would stumble over in a docstring, found without Sphinx."""

from __future__ import annotations

import re

#: Sections whose entries are `names: text`.
ENTRIES = ("Args", "Attributes", "Raises")
LITERAL = re.compile(r"``.+?``|`[^`]+`", re.S)


def broken(text: str) -> list[str]:
    """Return the lines of a docstring, as `inspect.cleandoc` leaves it, that break a rule."""
    found, section, before, is_list = [], "", "", False
    for line in LITERAL.sub("x", text).split("\n"):
        depth = len(line) - len(line.lstrip())
        if depth == 0 and line:
            heading = re.match(r"([A-Z]\w+):( |$)", line)
            section = heading.group(1) if heading else ""
        if section in ENTRIES and depth == 4:
            names, colon, _ = line.partition(":")
            if not colon:
                found.append(f"names of an entry end with a colon on their own line: {line}")
            if ", *" in names:
                found.append(f"a name with a star begins an entry of its own: {line}")
        if not section:
            is_item = line.startswith("- ")
            is_list = is_list if before else is_item
            deeper = depth > len(before) - len(before.lstrip())
            if before and not is_list and (is_item or deeper):
                found.append(f"an empty line goes before a list or an indented text: {line}")
        before = line
    return found
