"""The figures that a learner handed in beside those of the same notebook when it is run again, compared as they look.

What a learner's notebook calls an image may be anything: only sound PNG images of a reasonable size are taken.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import report as reporting
from ..units import MiB
from .comparing import BAD_ROW, CLOSE, DIFFERS, ONLY_AGAIN, ONLY_SAVED, SAME

FIGURE_SHARE = 0.02  # of pixels: a title that names another card changes less, another curve more
PNG_BYTES, PNG_SIDE, MOST_FIGURES = 2 * MiB, 4000, 60
PNG_PIXELS = 4 * 10**6  # each pair is unpacked and compared: a file of some kilobytes can hold many


@dataclass(frozen=True)
class FigurePair:
    """A figure as saved and as drawn again (base64 of the PNG; empty where there is none), what it shows, its cell."""

    cell: str
    alt: str
    saved: str
    again: str
    verdict: str

    @property
    def flagged(self) -> bool:
        """Whether the two look different."""
        return self.verdict == DIFFERS


def pairs(saved: Path | None, again: Path | None) -> list[FigurePair]:
    """The figures of two executed notebooks, cell by cell; None stands for a notebook that is not there."""
    before, after = _figures(saved), _figures(again)
    found = []
    for key in [*after, *(k for k in before if k not in after)]:
        one, other = before.get(key, ("", "")), after.get(key, ("", ""))
        verdict = _look(one[0], other[0]) if one[0] and other[0] else ONLY_SAVED if one[0] else ONLY_AGAIN
        found.append(FigurePair(key[0], other[1] or one[1], one[0], other[0], verdict))
    return found


def _figures(notebook: Path | None) -> dict[tuple[str, int], tuple[str, str]]:
    """Sound images of a notebook by cell and place in it: base64 of the PNG, and its description."""
    found: dict[tuple[str, int], tuple[str, str]] = {}
    if notebook is None or not notebook.is_file():
        return found
    count: dict[str, int] = {}
    for data, alt, cell in _images(notebook):
        count[cell] = count.get(cell, 0) + 1
        if len(found) < MOST_FIGURES and (image := sound(data)):
            found[cell, count[cell]] = (image, alt[:2000])
    return found


def _images(notebook: Path) -> Iterable[tuple[str, str, str]]:
    try:
        return [(data, str(alt), str(cell)) for data, alt, cell, _ in reporting.figures(notebook)]
    except BAD_ROW:  # outputs of a shape that no kernel writes
        return []


def sound(data: str) -> str:
    """`data` as clean base64 when it is a PNG of a reasonable size, else nothing."""
    if len(data) > PNG_BYTES * 4 / 3 + 4:
        return ""
    try:
        image = base64.b64decode(data, validate=True)
        width, height = struct.unpack(">II", image[16:24])
    except (binascii.Error, ValueError, struct.error):
        return ""
    if not image.startswith(b"\x89PNG\r\n\x1a\n") or not (0 < width <= PNG_SIDE and 0 < height <= PNG_SIDE):
        return ""
    if width * height > PNG_PIXELS:
        return ""
    return base64.b64encode(image).decode()


def _look(saved: str, again: str) -> str:
    """Whether two PNG images look the same."""
    if saved == again:
        return SAME
    one, other = _grey(saved), _grey(again)
    if one is None or other is None or one.shape != other.shape:
        return DIFFERS
    import numpy

    share = float((numpy.abs(one - other) > 32).mean())
    return SAME if share == 0 else CLOSE if share <= FIGURE_SHARE else DIFFERS


def _grey(data: str) -> Any:
    """The grey levels of an image, 0 to 255; None where it cannot be decoded."""
    import matplotlib.image
    import numpy

    try:
        image = matplotlib.image.imread(io.BytesIO(base64.b64decode(data)), format="png")
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for a broken file
        return None
    levels = image if image.ndim == 2 else image[..., :3].mean(axis=-1)
    return 255 * numpy.asarray(levels, dtype=float)
