"""The `labkit` command. Each command is a thin wrapper: it imports what it needs when it runs, so that help is instant.

Exit codes: 0 done; 1 a blocker (doctor), a failed lesson (run); 2 the user's mistake, said in one line on standard
error; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .units import UserError

app = typer.Typer(
    name="labkit",
    help="Make GPT-2-class models fit a small GPU: check the machine, run the lessons, predict memory.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: the entry point of the `labkit` script."""
    try:
        code = app(arguments, prog_name="labkit", standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        code = 130
    except (BrokenPipeError, SystemExit) as error:  # `labkit predict ... | head` has read enough
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # typer makes a SystemExit(1) of the broken pipe
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what typer raises for a wrong option or a missing argument
            raise
        _fail(f"{error.format_message().rstrip('.')} (labkit {_command_of(error)}--help)")
    if code == 130:
        _leave("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"labkit: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _leave(message: str, code: int) -> NoReturn:
    """End at once: a plain exit waits for threads, and dies by SIGINT where the key was hit inside an extension."""
    print(f"{chr(10) if code == 130 else ''}labkit: {' '.join(message.split())}", file=sys.stderr)  # after a ^C
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _command_of(error: Any) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "").split()
    return "".join(f"{word} " for word in path[1:])


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"labkit {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


JSON = typer.Option("--json", help="Print JSON instead of text.")


@app.command()
def doctor(as_json: Annotated[bool, JSON] = False) -> None:
    """What is right and wrong with this machine, and what to do about it. Exit code 1 when something blocks the course.

    Example: labkit doctor
    """
    from . import doctor as module

    checks = module.examine()
    print(module.to_json(checks) if as_json else module.to_text(checks))
    raise typer.Exit(1 if any(check.status == "FAIL" for check in checks) else 0)


@app.command()
def diagnose(
    text: Annotated[
        str | None, typer.Argument(help="An error text, a question, or the path of a log; - reads standard input.")
    ] = None,
    file: Annotated[str | None, typer.Option(metavar="LOG", help="A log of any size; - reads standard input.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe, a Trainer configuration or a report, as JSON or YAML.")
    ] = None,
    card: Annotated[str | None, typer.Option(help="The card that it ran on, such as t4 or rtx4090.")] = None,
    budget: Annotated[str | None, typer.Option(help="The memory that there is, such as 8GiB.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """What went wrong, by which evidence, and what to change. Exit code 0, also when no cause is known.

    Example: labkit diagnose train.log (or: python train.py 2>&1 | labkit diagnose)
    """
    from . import diagnosis

    diagnosis.command(text, file, recipe, card, budget, as_json)


@app.command()
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="What to fetch; all by default.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Say what there is, and whether it is here.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is here already.")] = False,
) -> None:
    """Bring models into data/, checked against their sha256. What is there already needs no network.

    Example: labkit fetch smollm2-135m
    """
    from . import fetch as module

    if listing:
        print(module.listing())
        return
    for path in module.fetch(names or None, force=force, say=print):
        print(path)


@app.command()
def run(
    lessons: Annotated[
        list[str] | None, typer.Argument(metavar="[LESSON]...", help="Names or numbers, such as 01; all by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; a new one in runs/ by default.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of going on with an unfinished run.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 1200,
) -> None:
    """Run lessons headless on this machine and write the report. Exit code 1 when a lesson failed.

    Example: labkit run 00 01
    """
    from . import course, places
    from . import fetch as fetching

    books = course.choose(lessons or (), places.home() / "notebooks")
    for name in fetching.needed_by(books):
        try:
            fetching.fetch([name], say=print)
        except UserError as error:  # the lessons that need it will say so; the others run
            print(f"labkit: {error}", file=sys.stderr)
    raise typer.Exit(course.run(lessons or (), out=out, resume=not fresh, timeout=timeout))


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/2026-12-01T10-22-t4.")
    ],
) -> None:
    """Write the HTML report of a run again, and print where it is.

    Example: labkit report runs/interactive
    """
    from . import report as reporting

    print(reporting.write(folder))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run, or a file of rows.")],
    b: Annotated[
        Path | None, typer.Argument(metavar="[B]", help="Another one; the reference rows of the same card by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every line, not only those outside a band.")] = False,
    page: Annotated[Path | None, typer.Option("--html", help="Write the comparison as a page, too.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Two runs side by side, or a run beside data/reference/: ratios, each with its band. Exit code 1 when one differs.

    Example: labkit compare runs/2026-12-01T10-22-t4
    """
    from . import comparing, sidebyside

    found = comparing.compare(a, b)
    print(sidebyside.as_json(found) if as_json else sidebyside.text(found, everything=everything))
    if page is not None:
        sidebyside.write(found, page)
    raise typer.Exit(1 if found.of(comparing.DIFFERS) else 0)


@app.command("submit-reference")
def submit_reference(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run; with --check a file of rows.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; lessons-<card>.jsonl in the working directory by default.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Say what is wrong in a file of rows; write nothing.")] = False,
) -> None:
    """What your card measured, as rows that others can compare with. Exit code 1 when --check finds a problem.

    Example: labkit submit-reference runs/2026-12-01T10-22-t4
    """
    from . import contributing

    if check:
        found = contributing.check(path)
        print(contributing.say(found) or f"{path}: nothing is wrong")
        raise typer.Exit(1 if found else 0)
    target, count = contributing.submit(path, out)
    print(f'{target}: {count} rows; put it into data/reference/ (CONTRIBUTING.md, "Add a card preset")')


@app.command()
def predict(
    model: Annotated[
        str | None,
        typer.Argument(help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder with config.json, a hub name."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 1024,
    precision: Annotated[
        str, typer.Option(help="fp32, amp-fp16, amp-bf16, bf16 or fp16 (with an fp32 master copy).")
    ] = "fp32",
    attention: Annotated[str, typer.Option(help="eager or sdpa.")] = "sdpa",
    checkpoint: Annotated[int, typer.Option(help="0: none; N: every N blocks form one checkpointed segment.")] = 0,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, adamw-fused, adamw-forloop, sgd, sgd-momentum, adam8bit, adamw8bit or adamw4bit (torchao)."
        ),
    ] = "adamw",
    loss: Annotated[str, typer.Option(help="full, chunked or in-place.")] = "full",
    activation: Annotated[str, typer.Option(help="gelu_new or gelu_pytorch_tanh.")] = "gelu_new",
    accumulation: Annotated[int, typer.Option(help="Micro-batches in an optimizer step.")] = 1,
    dropout: Annotated[float, typer.Option(help="Residual, embedding and attention dropout.")] = 0.1,
    loss_chunks: Annotated[int, typer.Option(help="Pieces of a chunked or in-place loss.")] = 8,
    gradients: Annotated[
        str,
        typer.Option(help="card, host, in-backward, in-backward-each-clipped or two-backward-passes."),
    ] = "card",
    clip: Annotated[float | None, typer.Option(help="Global norm that gradients are scaled down to.")] = None,
    stochastic_rounding: Annotated[
        bool, typer.Option("--stochastic-rounding", help="Of bf16 weights, by adamw8bit and adamw4bit.")
    ] = False,
    offload: Annotated[
        str,
        typer.Option(
            help="What the host keeps: none, activations, states, states+activations, optimizer, optimizer+gradients."
        ),
    ] = "none",
    compile: Annotated[str, typer.Option(help="none, blocks or whole: an estimate with a band.")] = "none",
    expandable_segments: Annotated[
        bool, typer.Option("--expandable-segments", help="PYTORCH_ALLOC_CONF=expandable_segments:True.")
    ] = False,
    flat: Annotated[bool, typer.Option("--flat", help="The optimizer steps a block's weights as one tensor.")] = False,
    card: Annotated[str | None, typer.Option(help="The card to predict for, such as t4, rtx4090 or h200.")] = None,
    budget: Annotated[str | None, typer.Option(help="Cap on reserved memory, such as 8GiB; no cap by default.")] = None,
    recipes: Annotated[
        Path | None, typer.Option(help="Predict every recipe of this JSON-lines file (- reads standard input).")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """The GPU memory that a training step needs, without a GPU.

    Example: labkit predict gpt2 --batch 8 --seq 1024 --precision amp-bf16 --card rtx4090 --budget 8GiB
    """
    from . import predicting

    if recipes is not None:
        if model is not None:
            raise UserError("give a model or --recipes FILE, not both")
        raise typer.Exit(predicting.file(recipes, card=card, budget=budget, as_json=as_json))
    fields: dict[str, Any] = {
        "model": model or "gpt2", "batch": batch, "seq": seq, "precision": precision, "attention": attention,
        "checkpoint": checkpoint, "optimizer": optimizer, "loss": loss, "activation": activation,
        "accumulation": accumulation, "dropout": dropout, "loss_chunks": loss_chunks, "gradients": gradients,
        "clip": clip, "stochastic_rounding": stochastic_rounding, "offload": offload, "compile": compile,
        "expandable_segments": expandable_segments, "flat": flat,
    }  # fmt: skip
    predicting.one(fields, card=card, budget=budget, as_json=as_json)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder with config.json.")],
    card: Annotated[str | None, typer.Option(help="The card to plan for, such as t4, rtx4090 or h200.")] = None,
    budget: Annotated[str | None, typer.Option(help="Memory for PyTorch, such as 8GiB; else the card's.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 1024,
    batch: Annotated[int | None, typer.Option(help="Sequences in an optimizer step; chosen if left out.")] = None,
    goal: Annotated[str, typer.Option(help="fastest, largest-batch or longest.")] = "fastest",
    host_memory: Annotated[str | None, typer.Option(help="What the host has, such as 16GiB, for offload.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")] = None,
    dropout: Annotated[float, typer.Option(help="Residual, embedding and attention dropout.")] = 0.1,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Without torch.compile.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write the first plan as a training script.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Which switches make a model train on a card, the fastest first, and why. Exit code 1 when nothing fits.

    Example: labkit plan gpt2-xl --card rtx4090 --seq 1024
    """
    from .planner import command

    asked: dict[str, Any] = {
        "card": card, "budget": budget, "seq": seq, "batch": batch, "goal": goal, "host_memory": host_memory,
        "compile": not no_compile, "clip": clip, "dropout": dropout,
    }  # fmt: skip
    raise typer.Exit(command.run(model, as_json=as_json, export=export, asked=asked))


@app.command()
def submit(
    lesson: Annotated[str, typer.Argument(help="A name or a number, such as 01, or the path of your notebook.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder, or a file called ….labkit.zip; the working directory by default.")
    ] = None,
    student: Annotated[str, typer.Option(help="Your name, or what your instructor tells you to put here.")] = "",
    anyway: Annotated[bool, typer.Option("--anyway", help="Hand in a notebook that has problems as it is.")] = False,
) -> None:
    """One file to hand in: the notebook, its ledger rows and the versions, looked over before it is written.

    Example: labkit submit 01 --student "Ada Lovelace"
    """
    from . import submitting
    from .units import show_bytes

    path, bundle, look = submitting.submit(lesson, out=out, student=student, anyway=anyway)
    size = show_bytes(path.stat().st_size)
    print(f"{bundle.lesson}\n{look.text()}\n  {'written':9s} {path} ({size}): notebook, {len(bundle.rows)} ledger rows")


@app.command()
def grade(
    out: Annotated[Path, typer.Option(help="The folder of results; grading goes on in it after an interruption.")],
    submissions: Annotated[
        Path | None, typer.Argument(help="The folder with SUBMISSIONS/<student>/<lesson>.ipynb in it.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions graded at the same time.")] = 1,
    hidden: Annotated[Path | None, typer.Option(help="The hidden tests; instructor/hidden by default.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh/--resume", help="Grade everything again.")] = False,
    exercises_only: Annotated[
        bool, typer.Option("--exercises-only", help="Score the exercises without running whole notebooks again.")
    ] = False,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", help="Without walls, for submissions that you trust.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take when it is run again.")] = 120,
    manual: Annotated[
        bool, typer.Option("--manual", help="Lay out written answers for nbgrader's formgrader; bring marks back.")
    ] = False,
    export: Annotated[
        str | None, typer.Option(help="Write OUT/export-....csv for moodle, canvas or a plain table.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(help="Who is who: a CSV with a column `folder` and the system's own columns.")
    ] = None,
    provisional: Annotated[
        bool, typer.Option("--provisional", help="Export written answers that nobody has read as they stand.")
    ] = False,
) -> None:
    """For instructors: scores, feedback pages and a class summary of a folder of submissions (instructor/README.md).

    Without SUBMISSIONS, --manual and --export work on results that are there.

    Example: labkit grade submissions --out graded --jobs 2
    """
    try:
        from .grading import export as exporting
        from .grading import grader, occupied, summary
        from .grading import manual as reading
    except ImportError as error:
        raise UserError(f"grading needs {error.name}: pip install 'gpt2-small-gpu-lab[grading]'") from error
    if submissions is None and not manual and export is None:
        raise UserError("give the folder of submissions; or --manual or --export, for results that are there")
    code = 0
    if submissions is not None:
        options = grader.Options(jobs, not no_sandbox, fresh, exercises_only, timeout)
        try:
            code = grader.grade(submissions, out, hidden=hidden, options=options)
        except occupied.Stopped as error:
            _leave(str(error), 2)  # nobody waits for submissions that are in flight
        except KeyboardInterrupt as error:
            _leave(f"interrupted: {error}" if str(error) else "interrupted", 130)
    results, said = grader.results(out), []
    if manual or export is not None:
        with occupied.only(out):
            said += [reading.sync(out).text()] if manual else []
            results = grader.finish(out)
            if export is not None:
                said.append(exporting.write(out, export, roster, provisional=provisional, results=results).text())
    print(
        "\n".join([summary.text(results), *said, *(str(out / n) for n in ("scores.csv", "summary.html", "feedback"))])
    )
    raise typer.Exit(code)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
