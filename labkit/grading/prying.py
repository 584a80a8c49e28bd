"""Answers that look into the process that runs them: for hidden inputs, or for the way that results travel.

No exercise needs any of these names. What is found here gives no points; what hides better (a name put together at run
time) may be noticed when it runs (`watching`), and gains nothing anyway where a hidden test keeps what decides outside
the answer's process (`hidden`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from . import sources

NAMES = frozenset(
    {
        "__closure__", "__code__", "__func__", "__globals__", "__self__", "__subclasses__", "_current_frames",
        "_getframe", "ag_frame", "cell_contents", "cr_frame", "currentframe", "f_back", "f_builtins", "f_globals",
        "f_locals", "get_objects", "get_referents", "get_referrers", "getclosurevars", "getouterframes", "gi_frame",
        "setprofile", "settrace", "tb_frame",
    }
)  # fmt: skip


def found(cells: Iterable[str]) -> str:
    """The first of `NAMES` that the cells' sources use, as a name, an attribute, an import or a text; empty where none
    does. Source that is no Python says so when it runs."""
    for source in cells:
        if not any(name in source for name in NAMES):
            continue
        tree = sources.parsed(sources.outline(source)[0])
        for node in ast.walk(tree) if tree else ():
            said = (
                [node.attr] if isinstance(node, ast.Attribute)
                else [node.id] if isinstance(node, ast.Name)
                else [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom)
                else [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str)
                else []
            )  # fmt: skip
            for name in said:
                if name in NAMES:
                    return name
    return ""
