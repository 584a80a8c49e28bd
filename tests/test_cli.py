"""The `labkit` command: exit codes, one clear line for a mistake, clean standard output, quick help."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit import cli, memory, predicting, units
from labkit.recipes import Recipe
from labkit.results import Holding, Peaks, Report

COMMANDS = sorted(command.name or command.callback.__name__ for command in cli.app.registered_commands)


def run(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *arguments], capture_output=True, text=True, timeout=120, **kwargs
    )


def call(capsys, *arguments):
    """Run in this process; the exit code and what was printed."""
    with pytest.raises(SystemExit) as exit:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return exit.value.code, out, err


@pytest.fixture
def quick_prediction(monkeypatch):
    """A prediction that takes no time; what is under test here is the command around it."""

    def predict_recipe(recipe, *, card=None, budget_bytes=None, trace=False):
        print("a library prints to standard output")
        os.write(1, b"and another writes past Python\n")
        if recipe.batch == 13:
            raise RuntimeError("no rule for aten::surprise\nmore")
        peaks = Peaks(3 * units.GiB, 2 * units.GiB, 4 * units.GiB)
        alive = (Holding("wte", "parameter", "build", units.GiB), Holding("h", "activation", "forward", 2 * units.GiB))
        return Report(
            name=str(recipe), status="ok", source="predicted", card=card or "h200", budget_bytes=budget_bytes,
            first=peaks, steady=peaks, context_bytes=450 * units.MiB, alive=alive,
        )  # fmt: skip

    monkeypatch.setattr(memory, "predict_recipe", predict_recipe)
    monkeypatch.setattr(predicting, "_load", lambda: None)


def test_help_is_quick_and_names_every_command():
    run("--help")  # the first start compiles the sources
    start = time.perf_counter()
    done = run("--help")
    assert time.perf_counter() - start < 2.0  # 0.15 s on an idle machine; two test workers and their children share it
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys, labkit.cli\n"
        "try: labkit.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "Example: labkit " + command in " ".join(out.split())


def test_version_and_no_command(capsys):
    code, out, _ = call(capsys, "--version")
    assert code == 0 and out.startswith("labkit ") and out.strip()[-1].isdigit()
    code, out, _ = call(capsys)
    assert code == 0 and "Commands:" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["predict", "--nonsense", "1"], "--nonsense"),
        (["predict", "--batch", "many"], "--batch"),
        (["predict", "--batch", "0"], "batch"),
        (["predict", "--batch", "-3"], "batch"),
        (["predict", "--dropout", "1.5"], "dropout"),
        (["predict", "--precision", "fp7"], "amp-bf16"),
        (["predict", "--card", "voodoo2"], "rtx4090"),
        (["predict", "--budget", "-8GiB"], "size"),
        (["predict", "--budget", "lots"], "8GiB"),
        (["predict", "no-such-model"], "gpt2-xl"),
        (["predict", "gpt2", "--seq", "4096"], "1024 positions"),
        (["predict", "gpt2", "--recipes", "x.jsonl"], "not both"),
        (["predict", "--recipes", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["fetch", "no-such-thing"], "smollm2-135m"),
        (["doctor", "extra"], "extra"),
        (["run", "99"], "unknown lesson '99'"),
        (["run", "--timeout", "0"], "--timeout"),
        (["report", "no-such-run"], "no-such-run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, named, capsys):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("labkit: ") and named in lines[0]
    assert "Traceback" not in err


def test_predict_has_a_flag_for_every_field_of_a_recipe(capsys, quick_prediction):
    _, out, _ = call(capsys, "predict", "--help")
    changed = {
        "model": "gpt2-medium", "batch": 3, "seq": 77, "precision": "bf16", "attention": "eager", "checkpoint": 2,
        "optimizer": "adam8bit", "loss": "chunked", "activation": "gelu_pytorch_tanh", "accumulation": 5,
        "dropout": 0.3, "loss_chunks": 4, "gradients": "two-backward-passes", "clip": 0.5,
        "stochastic_rounding": True, "offload": "activations", "compile": "none", "expandable_segments": True,
        "flat": True,
    }  # fmt: skip
    changed |= {"optimizer": "adamw8bit", "accumulation": 1}  # what goes together with these
    assert set(changed) == set(Recipe().to_dict()), "a new recipe field needs a flag in cli.predict and a value here"
    flags = []
    for name, value in changed.items():
        if name != "model":
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    done = _captured("predict", "gpt2-medium", *flags, "--json")
    row = json.loads(done)
    assert {name: row[name] for name in changed} == changed
    for name, value in Recipe().to_dict().items():
        assert name == "model" or f"--{name.replace('_', '-')}" in out
        assert name == "model" or value in (None, False) or f"[default: {value}]" in " ".join(out.split())


def _captured(*arguments):
    """What reaches file descriptor 1, libraries that write past Python included."""
    read, write = os.pipe()
    before = os.dup(1)
    os.dup2(write, 1)
    try:
        with pytest.raises(SystemExit) as exit:
            cli.main(list(arguments))
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _captured.code = exit.value.code
    return text


def test_recipes_one_line_each_in_order_and_nothing_else_on_stdout(tmp_path, capfd, quick_prediction):
    file = tmp_path / "recipes.jsonl"
    file.write_text('{"batch": 2}\n\n{"batch": 1, "model": "gpt2-xl"}\n{"batch": 3}\n')
    rows = [
        json.loads(line) for line in _captured("predict", "--recipes", str(file), "--card", "t4", "--json").splitlines()
    ]
    assert _captured.code == 0
    assert [(row["model"], row["batch"]) for row in rows] == [("gpt2", 2), ("gpt2-xl", 1), ("gpt2", 3)]
    assert {
        "status",
        "allocated_bytes",
        "reserved_bytes",
        "first_step_requested_bytes",
        "context_bytes",
        "seconds",
    } <= set(rows[0])
    assert capfd.readouterr().err.count("and another writes past Python") == 3


def test_a_broken_line_is_named_and_the_others_are_done(tmp_path, capfd, quick_prediction):
    file = tmp_path / "recipes.jsonl"
    lines = ['{"batch": 2}', "{broken", "[1]", '{"batch": 0}', '{"colour": "red"}', '"x"', '{"batch": 4}', "\xff"]
    file.write_bytes("\n".join(lines).encode("latin-1"))
    rows = [json.loads(line) for line in _captured("predict", "--recipes", str(file), "--json").splitlines()]
    assert _captured.code == 2
    assert [row["batch"] for row in rows] == [2, 4]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("labkit: ")]
    assert [line.split(": ")[2] for line in said] == [f"line {n}" for n in (2, 3, 4, 5, 6, 8)]


def test_a_reader_that_has_enough_ends_a_file_of_recipes_quietly(tmp_path, quick_prediction, monkeypatch):
    file = tmp_path / "recipes.jsonl"
    file.write_text('{"batch": 2}\n' * 50)
    asked = []
    before = memory.predict_recipe
    monkeypatch.setattr(memory, "predict_recipe", lambda *args, **kwargs: asked.append(1) or before(*args, **kwargs))
    read, write = os.pipe()
    kept = os.dup(1)
    os.close(read)
    os.dup2(write, 1)
    try:
        with pytest.raises(BrokenPipeError):
            predicting.file(file, card=None, budget=None, as_json=True)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(write)
    assert len(asked) == 1


def test_heads_that_do_not_go_together_are_the_users_mistake(tmp_path, capfd):
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": -1, "vocab_size": 97, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(small))
    file = tmp_path / "recipes.jsonl"
    file.write_text(json.dumps({"model": str(tmp_path), "batch": 1, "seq": 8}))
    assert _captured("predict", "--recipes", str(file), "--json") == "" and _captured.code == 2
    assert f"line 1: {tmp_path}: its configuration makes no model that runs" in capfd.readouterr().err


def test_a_fault_of_labkit_on_a_folder_is_not_blamed_on_it(tmp_path, quick_prediction):
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 97, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(small))
    with pytest.raises(RuntimeError, match="surprise"):
        predicting._predicted(Recipe.of(model=str(tmp_path), batch=13, seq=8), None, None)


def test_a_broken_pipe_exits_with_0(monkeypatch):
    monkeypatch.setattr(sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115  the command closes it

    def broken(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(predicting, "file", broken)
    with pytest.raises(SystemExit) as exit:
        cli.main(["predict", "--recipes", "x"])
    assert exit.value.code == 0


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_a_file_without_a_recipe_is_a_mistake(tmp_path, capfd, quick_prediction, text):
    file = tmp_path / "recipes.jsonl"
    file.write_text(text)
    assert _captured("predict", "--recipes", str(file), "--json") == "" and _captured.code == 2
    assert "holds no recipe" in capfd.readouterr().err


def test_a_byte_order_mark_is_not_part_of_the_first_recipe(tmp_path, quick_prediction):
    file = tmp_path / "recipes.jsonl"
    file.write_text('{"batch": 3}\n', encoding="utf-8-sig")
    assert json.loads(_captured("predict", "--recipes", str(file), "--json"))["batch"] == 3 and _captured.code == 0


def test_a_fault_of_labkit_on_one_recipe_keeps_the_others(tmp_path, capfd, quick_prediction):
    file = tmp_path / "recipes.jsonl"
    file.write_text('{"batch": 2}\n{"batch": 13}\n{"batch": 4}\n')
    rows = [json.loads(line) for line in _captured("predict", "--recipes", str(file), "--json").splitlines()]
    assert _captured.code == 1
    assert [row["batch"] for row in rows] == [2, 4]
    assert "line 2: RuntimeError: no rule for aten::surprise" in capfd.readouterr().err


def test_predict_as_text_shows_who_holds_the_peak_and_what_is_outside(quick_prediction):
    text = _captured("predict", "gpt2", "--budget", "4GiB", "--card", "t4")
    bar = next(line for line in text.splitlines() if line.startswith("  |"))
    assert bar.count("P") == 16 and bar.count("A") == 32 and bar.count("·") == 16  # of 64 characters for 4 GiB
    assert (
        "whole width is the budget: 4.00 GiB" in text and "CUDA context" in text and "not checked on a real one" in text
    )
    assert "does not fit" not in text
    text = _captured("predict", "gpt2", "--card", "h200")
    assert "fits the 140.40 GiB of NVIDIA H200" in text and "not checked" not in text
    bar = next(line for line in text.splitlines() if line.startswith("  |"))
    assert "whole width is the peak: 3.00 GiB" in text and bar.count("P") == 21 and "·" not in bar


def test_run_fetches_what_its_lessons_need_and_goes_on_without_a_network(tmp_path, monkeypatch, capsys):
    from labkit import course, fetch

    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    for name, needs in (("00_a", []), ("01_b", ["smollm2-135m"])):
        book = {"metadata": {"labkit": {"fetch": needs}}, "cells": [], "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps(book))
    asked, ran = [], []

    def offline(names, say):
        asked.extend(names)
        raise units.UserError("no package index could be reached")

    monkeypatch.setattr(fetch, "fetch", offline)
    monkeypatch.setattr(course, "run", lambda lessons, **options: ran.append((list(lessons), options)) or 1)
    code, _, err = call(capsys, "run", "00")
    assert code == 1 and asked == [] and err == ""
    code, _, err = call(capsys, "run", "--fresh", "--timeout", "5", "--out", "somewhere")
    assert code == 1 and asked == ["smollm2-135m"] and err == "labkit: no package index could be reached\n"
    assert ran[1] == ([], {"out": Path("somewhere"), "resume": False, "timeout": 5.0})


def test_a_bar_beyond_the_budget_says_so():
    assert "beyond" in predicting.bar({"activation": 9 * units.GiB}, 8 * units.GiB)
    beyond = predicting.bar({"parameter": 4 * units.GiB, "activation": units.GiB}, units.MiB).splitlines()
    assert len(beyond[0]) < 90 and "activation 1.00 GiB" in beyond[2], "a bar stays a line, whatever the budget"
    assert "\x1b[" not in predicting.bar({"activation": units.GiB}, 8 * units.GiB)
    assert "\x1b[" in predicting.bar({"activation": units.GiB}, 8 * units.GiB, colour=True)


@pytest.mark.parametrize("after_seconds", [0.0, 0.4, 0.9, 1.2, 2.0])  # from the first line to the middle of imports
def test_ctrl_c_is_one_line_and_exit_code_130(tmp_path, after_seconds):
    fifo = tmp_path / "recipes"
    os.mkfifo(fifo)  # reading it waits for a writer, so the command waits
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", "predict", "--recipes", str(fifo)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    writer = os.open(fifo, os.O_WRONLY)  # returns when the command has opened its end
    try:
        time.sleep(after_seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        os.close(writer)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "labkit: interrupted" and "Traceback" not in err


def test_a_reader_that_stops_reading_is_no_error():
    script = f"{sys.executable!r} -m labkit.cli --help | true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_prediction_says_nothing_but_its_result():
    command = [sys.executable, "-m", "labkit.cli", "predict", "gpt2", "--batch", "1", "--seq", "64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "ok"
    assert done.stderr == ""  # no library talks about itself
