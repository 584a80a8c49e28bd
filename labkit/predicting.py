"""`labkit predict`: one recipe as text with a bar, or a file of recipes as JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from . import machine, quiet
from .units import UserError, parse_size, show_bytes

if TYPE_CHECKING:
    from .recipes import Recipe
    from .results import Report

# the Okabe-Ito colours, in the order of results.CATEGORIES; a letter goes with each, for terminals without colour
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#f0e442", "#999999", "#56b4e9")
_LETTERS = "PGOATWI"


def one(fields: dict[str, Any], *, card: str | None, budget: str | None, as_json: bool) -> None:
    """Predict one recipe and print it, as JSON or as text with a stacked bar. Raises `UserError` for bad input."""
    from .recipes import Recipe

    limit = None if budget is None else parse_size(budget)
    machine.preset(card)
    recipe = Recipe.of(**fields)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    with only_ours() as say:
        _load()
        report, row = _predicted(recipe, card, limit, trace=not as_json)
        say(json.dumps(row) if as_json else _text(report, row, card, colour))


def file(path: Path, *, card: str | None, budget: str | None, as_json: bool) -> int:
    """Predict every recipe of a JSON-lines file, in order, one line out for each; returns the exit code.

    A line that cannot be read or predicted gives one line on standard error with its number; the others are still
    done. 0: all done; 2: some lines were wrong; 1: some failed for a reason that is not the user's. Raises `UserError`
    for a file that cannot be read or holds no recipe, and BrokenPipeError when nobody reads the output any more.
    """
    from .recipes import Recipe

    limit = None if budget is None else parse_size(budget)
    machine.preset(card)
    code, found = 0, False
    with _opened(path) as lines, only_ours() as say:
        _load()
        for number, line in enumerate(lines, start=1):
            line = line.strip().removeprefix("\ufeff")  # some editors put a byte order mark before the first line
            if not line:
                continue
            found = True
            try:
                report, row = _predicted(Recipe.of(**_fields(line)), card, limit)
                say(json.dumps(row) if as_json else _summary(report, row))
            except UserError as error:
                code = code or 2
                print(f"labkit: {path}: line {number}: {error}", file=sys.stderr, flush=True)
            except BrokenPipeError:  # the reader has gone: nobody is left to predict for
                raise
            except Exception as error:  # a fault of labkit's on one recipe must not lose the recipes after it
                code = 1
                what = " ".join(str(error).split())[:300]
                print(f"labkit: {path}: line {number}: {type(error).__name__}: {what}", file=sys.stderr, flush=True)
    if not found:
        raise UserError(f'{path} holds no recipe: a line is an object such as {{"model": "gpt2", "batch": 4}}')
    return code


@contextmanager
def only_ours() -> Iterator[Callable[[str], None]]:
    """Inside the block, only what goes through the yielded function reaches standard output, flushed line by line;
    what libraries print goes to standard error, also when they write past Python."""
    sys.stdout.flush()
    try:
        descriptor = os.dup(1)
    except OSError:  # no such descriptor: started without a standard output
        descriptor = os.open(os.devnull, os.O_WRONLY)
    before, ours = sys.stdout, os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")

    def say(text: str) -> None:
        ours.write(text + "\n")
        ours.flush()

    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield say
    finally:
        sys.stdout = before
        os.dup2(descriptor, 1)
        with suppress(BrokenPipeError):  # the reader has gone, and whoever wrote last has been told already
            ours.close()


def _load() -> None:
    """Import what a prediction needs, silently, so that its time does not count the imports."""
    quiet.transformers()
    import transformers
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

    from .memory import prediction  # noqa: F401

    transformers.logging.set_verbosity_error()


def _predicted(
    recipe: Recipe, card: str | None, limit: int | None, trace: bool = False
) -> tuple[Report, dict[str, Any]]:
    from . import memory

    start = time.perf_counter()
    try:
        report = memory.predict_recipe(recipe, card=card, budget_bytes=limit, trace=trace)
    except UserError:
        raise
    except Exception as error:
        if _runs(recipe):
            raise
        what = " ".join(str(error).split())[:200]
        raise UserError(f"{recipe.model}: its configuration makes no model that runs ({what})") from error
    seconds = time.perf_counter() - start
    return report, memory.recipe_row(recipe, report, seconds, memory.host_memory(recipe))


def _runs(recipe: Recipe) -> bool:
    """Whether one block of the recipe's model computes a loss on the processor: then its configuration is not at fault.

    Numbers of heads or widths that do not go together show only when the model runs.
    """
    import torch

    from . import models

    if recipe.model in models.GPT2_SIZES:
        return True
    configuration = recipe.config()
    if configuration.vocab_size * configuration.hidden_size > 2**28:
        return True  # a gigabyte of embedding is too much for a question
    configuration.num_hidden_layers = 1
    tokens = torch.zeros(1, min(recipe.seq, 8), dtype=torch.long)
    try:
        with torch.no_grad():
            models.causal_lm(configuration, attention=recipe.attention)(input_ids=tokens, labels=tokens)
    except Exception:  # whatever it is: what the caller tells is the error that came first
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """A file, or standard input for ``-``; bytes that are not UTF-8 become part of a wrong line."""
    if str(path) == "-":
        yield sys.stdin
        return
    try:
        lines = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    with lines:
        yield lines


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UserError(f"not JSON ({error})") from error
    except RecursionError:
        raise UserError("not a recipe: nested too deeply") from None
    if not isinstance(fields, dict):
        raise UserError('not a recipe: an object of fields, such as {"model": "gpt2", "batch": 4}, is needed')
    return fields


def _summary(report: Report, row: dict[str, Any]) -> str:
    peaks = " ".join(f"{name} {show_bytes(row.get(f'{name}_bytes'))}" for name in ("allocated", "reserved"))
    return f"{report.name}: {'fits' if report.ok else 'out of memory'}  {peaks}"


def _text(report: Report, row: dict[str, Any], card: str | None, colour: bool) -> str:
    """The report, a bar of who holds the peak, and what lies outside the allocator."""
    preset = machine.preset(card)
    lines = [str(report)]
    held = {name: size for name, size in report.held_by().items() if size > 0}
    if held:
        total = sum(held.values())
        ceiling, what = report.budget_bytes or preset.memory_bytes, "budget" if report.budget_bytes else preset.title
        if not report.budget_bytes and not ceiling / 8 < total < ceiling:
            ceiling, what = total, "peak"  # on a card that is far larger, or too small, the parts are what can be seen
        lines += ["", bar(held, ceiling, colour=colour), f"  the whole width is the {what}: {show_bytes(ceiling)}"]
    low, high = preset.context_band
    context = row.get("context_bytes")
    lines.append(
        f"  outside the allocator: CUDA context, about {show_bytes(context)}"
        f" ({show_bytes(low)} to {show_bytes(high)} by card and driver)"
    )
    reserved = [row[key] for key in ("reserved_bytes", "first_step_reserved_bytes") if row.get(key)]
    if reserved and context is not None:
        whole, room = max(reserved) + context, preset.memory_bytes
        verdict = f": {'fits' if whole <= room else 'does not fit'} the {show_bytes(room)} of {preset.title}"
        asked = card is not None or report.budget_bytes is None  # a budget says for itself what must fit where
        lines.append(f"  with it {show_bytes(whole)}{verdict if asked else ''}")
    if host := (row.get("host_pinned_bytes") or 0) + (row.get("host_pageable_bytes") or 0):
        locked = show_bytes(row["host_pinned_bytes"])
        lines.append(
            f"  in the host's memory: {show_bytes(host)}, of which {locked} pinned; Python and the data on top"
        )
    if not preset.measured:
        lines.append(f"  predictions for {preset.name} ({preset.sm}) were not checked on a real one")
    return "\n".join(lines)


def bar(held: dict[str, int], ceiling: int, *, width: int = 64, colour: bool = False) -> str:
    """A stacked bar of `held` bytes by category, `width` characters for `ceiling` bytes, with its legend."""
    from rich.console import Console
    from rich.text import Text

    from .results import CATEGORIES

    order = [name for name in CATEGORIES if name in held] + sorted(set(held) - set(CATEGORIES))
    marks = {name: (_LETTERS[i], _COLOURS[i]) for i, name in enumerate(CATEGORIES)}
    strip, legend, total, drawn = Text("  |"), [], 0, 0
    for name in order:
        letter, tone = marks.get(name, ("?", "#999999"))
        total += held[name]
        # of the running total, so that rounding does not add up; what lies beyond the width is not drawn
        cells = min(width, round(width * total / ceiling)) - drawn
        drawn += cells
        strip.append(letter * cells, style=f"{tone} reverse")
        legend.append(Text.assemble("  ", (letter, f"{tone} reverse"), f" {name} {show_bytes(held[name])}"))
    strip.append("·" * (width - drawn) + "|" if total <= ceiling else "  beyond it")
    console = Console(force_terminal=colour, no_color=not colour, width=4 * width, highlight=False)
    with console.capture() as capture:
        console.print(strip, *legend, sep="\n")
    return capture.get().rstrip()
