"""A cell's source as Python: what IPython makes of it, without IPython's shell."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from typing import Any

_KEPT = frozenset({"time", "capture"})  # cell magics whose cell leaves its names in the notebook
_TIMED = re.compile(r"^(\s*)get_ipython\(\)\.run_line_magic\('time', (['\"].+['\"])\)$")
_TIME_LINE = re.compile(r"^(\s*)%time\s+(?=\S)")
_MAGIC_LINE = re.compile(r"^(\s*)(?:[%!?].*|.*\?\s*)$")
_MAGIC_VALUE = re.compile(r"^(\s*[\w.\[\], ]+=\s*)[%!].*$")


def python(source: str) -> str:
    """A cell's source as the Python that IPython runs for it, line numbers unchanged: magics and ``!`` become calls of
    `get_ipython` (see `running.Shell`), what ``%time``, ``%%time`` and ``%%capture`` run stays in the open. Source that
    is no Python even then comes back as it is.

    IPython reads all of a cell again for each magic in it: for what learners wrote, call this in the sandbox only.
    """
    source = source.removeprefix("\ufeff")
    if parsed(source) is not None:
        return source
    body = _body(source)
    if body is not None:
        return "\n" + python(body)
    try:
        made = _manager().transform_cell(source)
    except (SyntaxError, RuntimeError, ValueError, IndexError):  # what its tokens cannot say
        return source
    return "\n".join(_timed(line) for line in made.removesuffix("\n").split("\n"))


def outline(source: str) -> tuple[str, bool]:
    """A cell's source with its magics taken out line by line, and whether there were none: enough to see which names it
    gives, in a time that grows with its length only."""
    source = source.removeprefix("\ufeff")
    if parsed(source) is not None:
        return source, True
    body = _body(source)
    lines = ("" if source.startswith("%%") else source) if body is None else body
    return "\n".join(_plain(line) for line in textwrap.dedent(lines).split("\n")), False


def parsed(source: str) -> ast.Module | None:
    """The tree of a source that is Python as it stands; None when it is not."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _body(source: str) -> str | None:
    """What stands below a cell magic that leaves its names; None where there is no such magic."""
    first, _, rest = source.partition("\n")
    return rest if first.startswith("%%") and first[2:].partition(" ")[0].strip() in _KEPT else None


def _plain(line: str) -> str:
    line = _TIME_LINE.sub(r"\1", line)
    return _MAGIC_LINE.sub(r"\1pass", _MAGIC_VALUE.sub(r"\1None", line))


@functools.cache
def _manager() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()


def _timed(line: str) -> str:
    """The statement that ``%time`` runs, in place of the call."""
    found = _TIMED.match(line)
    return f"{found[1]}{ast.literal_eval(found[2])}" if found else line
