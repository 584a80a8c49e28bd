"""`labkit diagnose`: what went wrong, by which evidence, and what to change.

Input is an error text or a log, a recipe or a Trainer configuration, or a report. Rules are data (`rules/`); what they
compare is read in small steps: lines (`reading`), exceptions (`errors`), an out-of-memory message as numbers
(`outofmemory`), series of numbers (`series`), settings (`settings`), what a person wrote (`prose`). Where nothing
that is known fits, the answer says so.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import Report
from ..units import UserError, parse_size, show_bytes
from . import advising, outofmemory, prose, reading, rule, vocabulary
from . import effects as effecting
from . import errors as raising
from . import numbers as counting
from . import settings as configuring
from .concepts import CONCEPTS
from .effects import Effects
from .findings import Advice, Cause, Diagnosis
from .matching import Case, Evidence, fire
from .rule import Rule
from .rules import RULES

if TYPE_CHECKING:
    from ..recipes import Recipe

__all__ = ["RULES", "Advice", "Cause", "Diagnosis", "Evidence", "Rule", "diagnose"]

_MOST_CAUSES = 4
_NEAR = 0.55  # causes with less evidence than this share of the first one's are not told


def diagnose(
    what: Any = None,
    *,
    file: str | Path | None = None,
    recipe: Any = None,
    card: str | None = None,
    budget: int | str | None = None,
) -> Diagnosis:
    """Find what went wrong.

    `what` is a text, an exception, a `Report`, a `Recipe`, a configuration (a dict, or TrainingArguments), a Trainer,
    or a Path to a log; `file` a log's path or ``"-"`` for standard input; `recipe` the configuration that goes with a
    text: a dict, a `Recipe`, TrainingArguments, or the path of a JSON or YAML file (or of a report). `card` (a preset)
    and `budget` say how much memory there is. Raises `UserError` for what is missing, empty, binary or no
    configuration.
    """
    if budget is not None:
        budget = parse_size(budget)
    if card is not None:
        from ..machine import preset

        preset(card)
    text: str | None = None
    if isinstance(what, Path):
        file, what = what, None
    if isinstance(what, str):
        text = what
    elif isinstance(what, BaseException):
        text = "".join(traceback.format_exception(what))
    elif what is not None:
        if recipe is not None:
            raise UserError("give a text with recipe=, or the recipe alone")
        recipe = what
    case, raw, report = Case(), None, None
    if text is not None or file is not None:
        if text is not None and file is not None:
            raise UserError("give a text or a file, not both")
        _read(case, reading.read(text, file))
    elif recipe is None:
        raise UserError("nothing to diagnose: give a text, --file LOG, --file - or --recipe FILE")
    if recipe is not None:
        report, raw = _configuration(recipe)
        settings = configuring.of(
            raw if report is None else {k: v for k, v in report.settings.items() if v is not None} or {"batch": 0}
        )
        case.settings.update(settings)
        case.settings.said.update(settings.said)
    if card is not None:
        capability = preset(card).capability
        case.settings.note("capability", 10 * capability[0] + capability[1], 0, f"card {card}")
    return _conclude(case, raw, report, card, budget)


def _read(case: Case, source: reading.Reading) -> None:
    case.reading = source
    case.errors = raising.errors(source)
    case.error = raising.final(case.errors)
    case.oom = outofmemory.find(source, case.errors)
    case.settings = configuring.said_in(source)
    case.passages = prose.passages(source)
    if case.oom is not None and case.oom.handled:
        for passage in case.passages:
            passage.concepts.pop("oom", None)


def _configuration(given: Any) -> tuple[Report | None, dict[str, Any]]:
    """A report, or the fields of a configuration, from an object or a file."""
    if isinstance(given, Report):
        return given, given.settings
    if isinstance(given, (str, Path)):
        given = configuring.load(given)
    for attribute in ("args",):  # a Trainer
        inner = getattr(given, attribute, None)
        if inner is not None and hasattr(inner, "to_dict"):
            given = inner
    if hasattr(given, "to_dict"):
        given = given.to_dict()
    if not isinstance(given, dict):
        raise UserError(f"a recipe, a configuration or a report is needed, not {type(given).__name__}")
    if "status" in given and "source" in given and "card" in given:
        try:
            return Report.from_dict({"name": "report", **given}), given.get("settings") or {}
        except (TypeError, AttributeError, KeyError) as error:
            raise UserError(f"the report cannot be read ({error})") from error
    return None, given


def _conclude(
    case: Case, raw: dict[str, Any] | None, report: Report | None, card: str | None, budget: int | None
) -> Diagnosis:
    case.numbers = counting.of(case.reading, case.error, case.oom, case.settings, case.passages)
    notes = _notes(case)
    total = (case.oom.allowed or case.oom.total) if case.oom else None
    if report is not None and report.budget_bytes and budget is None:
        budget = report.budget_bytes
    there_is = effecting.room(budget, card, total)
    recipe = effecting.recipe_of(case.settings, raw if report is None else report.settings or None)
    predicted: Effects | None = None
    if report is not None:
        _from_report(case, report, notes)
    if recipe is not None and (report is None or not report.ok) and (case.reading is None or case.oom is not None):
        predicted = _predict(case, recipe, report, card, there_is, notes)
    elif case.reading is None and report is None:
        notes.append("model, batch and sequence length are not all known here: no memory could be predicted")
    fired = fire(RULES, case)
    best = fired[0][1] + fired[0][0].base if fired else 0.0
    kept = [f for f in fired if f[1] + f[0].base >= _NEAR * best][:_MOST_CAUSES]
    causes = tuple(advising.cause(entry, weight, evidence, case, predicted) for entry, weight, evidence in kept)
    if predicted is not None and causes:
        notes += advising.closing(predicted)
    if not causes and not any("nothing is needed" in note for note in notes):
        notes.append(_unknown(case))
    return Diagnosis(causes, tuple(notes), case.oom.numbers() if case.oom else {})


def _notes(case: Case) -> list[str]:
    notes = [f"{case.oom}" for _ in (1,) if case.oom and case.oom.numbers() and not case.oom.handled]
    handled = [e for e in case.errors if e.handled]
    if handled:
        notes.append(
            f"line {handled[-1].line}: {handled[-1].kind} did not end the run, which went on: it is not counted"
        )
    return notes


def _unknown(case: Case) -> str:
    if case.reading is None:
        return "nothing in this configuration is known to go wrong"
    if case.error is not None:
        return f"line {case.error.line}: {case.error.quote[:160]} is an error, but none that the rules know"
    return "the text holds no problem that the rules know; with the whole traceback or log there is more to go by"


def _from_report(case: Case, report: Report, notes: list[str]) -> None:
    if report.failure is None:
        notes.append(f"the report ran to its end ({report.name}): no failure to explain")
        return
    failure = report.failure
    words = f"{report.name}: wanted {show_bytes(failure.wanted_bytes)}, {show_bytes(failure.free_bytes)} free"
    case.numbers.put("oom", True, 0, words)
    case.numbers.put(
        "oom.phase",
        {"build": "moving"}.get(failure.phase, failure.phase) if failure.phase != "other" else None,
        0,
        words,
    )
    place = (
        "attention"
        if ".attn" in failure.module
        else "mlp"
        if ".mlp" in failure.module
        else "loss"
        if "lm_head" in failure.module
        else None
    )
    case.numbers.put("oom.place", place, 0, f"in {failure.module}" if place else "")
    held = sum(h.nbytes for h in failure.alive)
    if failure.scattered_bytes and held:
        case.numbers.put("oom.scattered_bytes", failure.scattered_bytes, 0, words)
        case.numbers.put("oom.scattered_share", failure.scattered_bytes / (failure.scattered_bytes + held), 0, words)
        case.numbers.put("oom.scattered_covers", failure.free_bytes / max(1, failure.wanted_bytes), 0, words)
    _held(case, report)
    if failure.nearest:
        notes.append(f"nearest that fits: {', '.join(failure.nearest)}")


def _held(case: Case, report: Report) -> None:
    words = " · ".join(f"{k} {show_bytes(v)}" for k, v in report.held_by().items() if v)
    for name, share in effecting.shares(report).items():
        case.numbers.put(f"held.{name}_share", share, 0, f"alive: {words}")


def _predict(
    case: Case,
    recipe: Recipe,
    report: Report | None,
    card: str | None,
    there_is: effecting.Room | None,
    notes: list[str],
) -> Effects | None:
    """Predict the recipe as it is; where it does not fit, that is a finding of its own."""
    base = effecting.predict(recipe, card, trace=report is None)
    if report is None and case.reading is None:
        if there_is is None:
            notes.append(
                f"{recipe}: predicted peak {show_bytes(base.peak_bytes)}; --card or --budget tells whether that fits"
            )
        elif effecting.fits(recipe, card, there_is):
            notes.append(
                f"{recipe}: predicted peak {show_bytes(base.peak_bytes)}, fits {there_is.what}: nothing is needed"
            )
        else:
            words = f"{recipe} peaks at {show_bytes(base.peak_bytes)} and does not fit {there_is.what}"
            case.numbers.put("oom", True, 0, f"predicted: {words}")
    if "oom" not in case.numbers:
        return None
    if report is None:
        _held(case, base)
    return Effects(recipe, base, card, there_is)


def command(
    text: str | None, file: str | None, recipe: Path | None, card: str | None, budget: str | None, as_json: bool
) -> None:
    """What ``labkit diagnose`` does: print the diagnosis. Without a text, a file and a recipe it reads what is piped
    in; a text that is ``-`` or names a file stands for it. Raises `UserError`."""
    if (
        text is not None
        and file is None
        and (text == "-" or ("\n" not in text and len(text) < 300 and Path(text).is_file()))
    ):
        text, file = None, text
    if text is None and file is None and recipe is None and not sys.stdin.isatty():
        file = "-"
    from ..predicting import only_ours

    with only_ours() as say:  # what libraries print while they predict goes to standard error
        found = diagnose(text, file=file, recipe=recipe, card=card, budget=budget)
        say(found.to_json() if as_json else str(found))


rule.validate(RULES, set(CONCEPTS), set(vocabulary.NAMES), set(counting.NAMES))
