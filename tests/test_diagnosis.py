# ruff: noqa: E501 (a message stands on one line)
import dataclasses
import io
import json
import sys
import textwrap
import time
from pathlib import Path

import pytest
from diagnosis_texts import HEALTHY, MORE, SILENT, TEXTS, oom, traceback

import labkit
from labkit import cli
from labkit.diagnosis import RULES, diagnose, effecting, outofmemory, raising, reading, rule, settings
from labkit.diagnosis.concepts import CONCEPTS
from labkit.diagnosis.numbers import NAMES
from labkit.diagnosis.prose import found_in
from labkit.diagnosis.rule import Change, Number, Says, Told
from labkit.diagnosis.vocabulary import NAMES as SETTINGS
from labkit.results import Failure, Holding, Report
from labkit.units import GiB, MiB, UserError

EVERY = [(name, text) for name, texts in TEXTS.items() for text in texts]


@pytest.fixture
def unpredicted(monkeypatch):
    """No predictions: they take seconds, and are tested apart."""
    monkeypatch.setattr(effecting, "recipe_of", lambda *_: None)


def names(found):
    return [cause.name for cause in found.causes]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_right_cause_comes_first(unpredicted, name):
    for text in TEXTS[name]:
        found = diagnose(text)
        assert names(found)[:1] == [name], f"{names(found)} for {text[:200]}"
        first = found.causes[0]
        assert first.evidence and first.advice and all(e.quote for e in first.evidence)


def test_texts_that_were_written_after_the_rules(unpredicted):
    wrong = [(name, names(diagnose(text)), text[:80]) for name, text in MORE if names(diagnose(text))[:1] != [name]]
    assert not wrong


@pytest.mark.parametrize("what", sorted(HEALTHY))
def test_nothing_fires_where_nothing_is_wrong(unpredicted, what):
    found = diagnose(HEALTHY[what])
    assert not found.known and names(found) == []
    assert any("no problem that the rules know" in n or "none that the rules know" in n for n in found.notes), found
    assert "no cause that is known here" in str(found)


LOGS = [json.loads(line) for line in (Path(__file__).parent / "diagnosis_logs.jsonl").open(encoding="utf-8")]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log["name"])
def test_logs_of_whole_runs(unpredicted, log):
    """Of many tools and wrappings, and six out-of-memory errors of a card; ``-`` stands for silence."""
    first = (names(diagnose(log["text"])) or ["-"])[0]
    assert first in log["expected"].split("|")


def test_nothing_fires_on_what_only_sounds_like_it(unpredicted):
    assert [(names(diagnose(text)), text) for text in SILENT if diagnose(text).known] == []


def test_every_symptom_has_three_texts_of_its_own():
    listed = [name for name, texts in TEXTS.items() if len(texts) >= 3]
    assert len(listed) >= 31
    assert {r.name for r in RULES} >= set(TEXTS)
    assert {r.kind for r in RULES} >= {
        "dtype", "optimizer", "logits", "fragmentation", "evaluation", "accumulation", "compile", "offload",
        "quantisation", "many cards", "host", "spill", "starved", "numerics",
    }  # fmt: skip


# ------------------------------------------------------------------------------------ out of memory as numbers


def numbers(text):
    source = reading.read(text)
    return outofmemory.find(source, raising.errors(source))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (oom("1.53 GiB", "812.00 MiB", "6.90 GiB", "5.10 GiB", "1.40 GiB"),
         {"wanted": 1.53, "total": 7.78, "free": 812 / 1024, "in_use": 6.9, "allocated": 5.1, "scattered": 1.4}),
        ("RuntimeError: CUDA out of memory. Tried to allocate 786.00 MiB (GPU 0; 14.73 GiB total capacity; 13.33 GiB already"
         " allocated; 575.88 MiB free; 13.38 GiB reserved in total by PyTorch)",
         {"wanted": 786 / 1024, "total": 14.73, "free": 575.88 / 1024, "allocated": 13.33, "scattered": 0.05}),
        ("RuntimeError: CUDA out of memory. Tried to allocate 26.00 MiB (GPU 0; 2.00 GiB total capacity; 435.61 MiB already"
         " allocated; 24.17 MiB free; 26.39 MiB cached)",
         {"wanted": 26 / 1024, "total": 2.0, "allocated": 435.61 / 1024, "scattered": 26.39 / 1024}),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 1 has a total capacty of 23.69 GiB"
         " of which 30.06 MiB is free. Process 77 has 9.80 GiB memory in use. Process 78 has 10.00 GiB memory in use. Including"
         " non-PyTorch memory, this process has 3.80 GiB memory in use. Of the allocated memory 3.20 GiB is allocated by PyTorch,"
         " with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 88.00 MiB is reserved by PyTorch but unallocated.",
         {"total": 23.69, "others": 19.8, "in_use": 3.8, "allocated": 3.2, "scattered": 88 / 1024, "pools": 1.0}),
        ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     :"
         " 6.90 GiB\nRequested               : 20.00 MiB\nDevice limit            : 8.00 GiB\nFree (according to CUDA): 0 bytes",
         {"wanted": 20 / 1024, "allocated": 6.9, "total": 8.0, "free": 0.0}),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 400.00 MiB. GPU 0 has a total capacity of 139.81 GiB of"
         " which 130.02 GiB is free. 8.00 GiB allowed; Including non-PyTorch memory, this process has 8.60 GiB memory in use.",
         {"allowed": 8.0, "wanted": 400 / 1024, "free": 130.02}),
    ],
)  # fmt: skip
def test_a_message_of_any_wording_is_read_into_bytes(text, expected):
    found = numbers(text)
    assert {name: getattr(found, name) / GiB for name in expected} == pytest.approx(expected, rel=0.002, abs=1e-3)


def test_a_message_that_a_terminal_wrapped_is_the_same():
    plain = oom("1.53 GiB", "812.00 MiB")
    wrapped = "\n".join(textwrap.wrap(plain, 70, break_on_hyphens=False))
    assert wrapped.count("\n") > 5 and numbers(wrapped).numbers() == numbers(plain).numbers() != {}


def test_the_phase_is_read_from_the_functions_of_the_traceback(unpredicted):
    def phase(*frames):
        return numbers(traceback(list(frames), oom())).phase

    step = ("train.py", "step", "loss.backward()")
    assert phase(step, ("/x/torch/_tensor.py", "backward", "torch.autograd.backward(")) == "backward"
    assert phase(("t.py", "evaluate", "out = model(x)"), ("/x/m.py", "forward", "x = f(x)")) == "evaluation"
    assert phase(("t.py", "main", "optimizer.step()"), ("/x/torch/optim/adamw.py", "step", "_init()")) == "optimizer"
    assert (
        phase(("t.py", "main", "model.to('cuda')"), ("/x/torch/nn/modules/module.py", "_apply", "fn(param)"))
        == "moving"
    )
    assert phase(("t.py", "main", "model(x)"), ("/x/m.py", "forward", "y = x.float().to(d)")) == "forward"


def test_a_notebooks_traceback_is_read_too(unpredicted):
    text = (
        "---------------------------------------------------------------------------\n"
        "OutOfMemoryError                          Traceback (most recent call last)\n"
        "Cell In[12], line 3\n----> 3 trainer.evaluate()\n\n"
        "File /x/transformers/trainer.py:4105, in Trainer.evaluation_loop(self, dataloader)\n"
        "-> 4105 all_preds.add(logits)\n\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 7.78 GiB of which"
        " 1.00 GiB is free."
    )
    assert names(diagnose(text))[0] == "evaluation-keeps-logits"


def test_numbers_decide_not_words(unpredicted):
    """The same message with other numbers has another cause."""
    assert names(diagnose(oom("640.00 MiB", "90.00 MiB", "7.60 GiB", "5.02 GiB", "2.31 GiB")))[0] == "fragmentation"
    assert "fragmentation" not in names(diagnose(oom("640.00 MiB", "90.00 MiB", "7.60 GiB", "7.30 GiB", "60.00 MiB")))
    assert names(diagnose(oom("640.00 MiB", "90.00 MiB", "1.60 GiB", "1.30 GiB", "60.00 MiB")))[0] == "other-process"


@pytest.mark.parametrize(
    ("words", "concept"),
    [
        ("the step went from 0.4 s to 2.9 s", "slow"), ("51 ms vs 50 ms a step", "no gain"),
        ("310 it/s instead of 840 it/s", "slow"), ("it takes 7.1 gb -> 7.8 gb", "more memory"),
    ],
)  # fmt: skip
def test_two_numbers_tell_what_words_do_not(words, concept):
    assert concept in found_in(words)
    turned = {"the step went from 0.4 s to 2.9 s": "the step went from 2.9 s to 0.4 s"}.get(words)
    assert turned is None or concept not in found_in(turned)
    assert "more memory" not in found_in("it takes 7.8 gb -> 7.1 gb") and "slow" not in found_in("0.50 s -> 0.52 s")


def test_a_denial_takes_trouble_back_and_a_question_does_not(unpredicted):
    assert "oom" not in found_in("it never runs out of memory") and "oom" in found_in("now it runs out of memory")
    assert names(diagnose("How can I avoid CUDA out of memory when I train gpt2?")) == ["activations-told"]
    assert not diagnose("With batch 4 we avoid CUDA out of memory when we train gpt2.").known
    assert not diagnose("In case of out of memory, lower the batch size.").known


# ------------------------------------------------------------------------------------ logs


def steps(*losses):
    return "\n".join(f"{{'loss': {loss}, 'epoch': {i / 100}}}" for i, loss in enumerate(losses))


def test_an_error_that_was_handled_counts_for_nothing_and_one_at_the_end_does(unpredicted):
    handled = f"{oom('2.00 GiB', '1.00 GiB')}\n{steps(3.1, 3.0, 2.9, 2.8)}"
    found = diagnose(handled)
    assert not found.known and any("did not end the run" in n for n in found.notes)
    assert diagnose(f"{handled}\n{oom('2.00 GiB', '1.00 GiB')}").known


def test_nan_in_a_log_and_its_precision(unpredicted):
    bad = steps(3.1, 3.0, "nan", "nan", 2.9)
    assert names(diagnose(bad + "\nfp16=True"))[0] == "fp16-overflow"
    assert names(diagnose(bad + "\nbf16=True"))[0] == "nan-not-fp16"
    assert not diagnose(steps(3.1, 3.0, 2.9)).known
    finding = diagnose(bad + "\nfp16=True").causes[0]
    assert any("2 of 5 values of loss" in e.quote or "2 losses" in e.quote for e in finding.evidence)


def test_memory_that_grows_and_memory_that_does_not(unpredicted):
    def log(values):
        return "\n".join(f"step {i}: loss 2.5 | memory allocated {v:.2f} GiB" for i, v in enumerate(values))

    assert names(diagnose(log([4 + i / 20 for i in range(60)])))[0] == "memory-creep"
    assert not diagnose(log([4 + (i % 5) / 20 for i in range(60)])).known
    assert not diagnose(log([2, 4, 6] + [6.0] * 50)).known  # born in the first steps


def test_utilisation(unpredicted):
    def log(*readings):
        return "\n".join(f"gpu util: {u}% loss 2.4" for u in readings)

    assert names(diagnose(log(31, 22, 45, 28, 36))) == ["starved"]
    assert not diagnose(log(97, 92, 95, 98, 96)).known
    assert not diagnose(log(0)).known  # one look at an idle card


@pytest.mark.slow
def test_a_log_of_any_size_is_read_in_bounded_memory(tmp_path, unpredicted):
    log = tmp_path / "train.log"
    with log.open("w") as file:
        for i in range(20_000):
            file.write(f"2026-12-01 10:00:{i % 60:02d} INFO step {i} loss {4 - i / 1e5:.4f} lr 5e-5 it/s 2.31\n")
        file.write("ValueError: Attempting to unscale FP16 gradients.\n")
    start = time.process_time()
    source = reading.read(file=log)
    assert time.process_time() - start < 15 and len(source.text) < 1_100_000
    assert source.count == 20_001
    finding = diagnose(file=log).causes[0]
    assert finding.name == "unscale-fp16" and finding.evidence[0].line == 20_001
    (tmp_path / "line.log").write_text("x" * 3_000_000)
    assert not diagnose(file=tmp_path / "line.log").known


def test_progress_bars_colours_and_powershells_encoding(tmp_path, unpredicted):
    text = "\x1b[31mepoch 1\r 10%|#   |\r 20%|##  |\r\nValueError: Attempting to unscale FP16 gradients.\r\n"
    for encoding in ("utf-8", "utf-16", "utf-8-sig"):
        file = tmp_path / f"{encoding}.log"
        file.write_bytes(text.encode(encoding))
        assert names(diagnose(file=file)) == ["unscale-fp16"], encoding


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"\n \n", "empty"), (b"\x7fELF" + bytes(4000), "binary"), (b"\x1f\x8b\x08abc", "compressed (gzip)"),
     (bytes(range(1, 256)) * 40, "binary")],
)  # fmt: skip
def test_what_is_no_log_is_one_line_and_exit_2(tmp_path, capsys, content, says):
    file = tmp_path / "some.log"
    file.write_bytes(content)
    assert run("--file", str(file)) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1 and err.startswith("labkit: ")


HOSTILE = {
    "frames without an error": '  File "a.py", line 3, in f\n    loss.backward()\n' * 3000,
    "one word": "loss " * 20_000,
    "the same error": "cuda out of memory. tried to allocate 2.00 gib\n" * 2000,
    "quotes": '"' * 50_000,
    "absurd sizes": "RuntimeError: CUDA out of memory. Tried to allocate 99999999999999999999.00 GiB; memory 1e400 GB",
    "nothing left": "RuntimeError: CUDA out of memory. Tried to allocate 0 bytes (GPU 0; 0 bytes total capacity; 0 bytes already"
    " allocated; 0 bytes free; 0 bytes reserved in total by PyTorch)",
    "letters that grow": "\u0130" * 5000 + " CUDA out of memory. Tried to allocate 2.00 GiB",
    "numbers without end": "mfu 1e400% loss scale: 1e999 memory 9999999999999999 GB util 999%",
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_strange_texts_are_answered_in_seconds(unpredicted, what):
    start = time.process_time()
    diagnose(HOSTILE[what]).to_json()
    assert time.process_time() - start < 5


# ------------------------------------------------------------------------------------ configurations


def test_settings_are_read_from_what_people_write():
    def said(text):
        return dict(settings_of(text))

    def settings_of(text):
        from labkit.diagnosis.settings import said_in

        return said_in(reading.read(text))

    line = "python run_clm.py --model_name_or_path gpt2-large --per_device_train_batch_size 1 --fp16 --block_size 1024"
    assert said(line) == {"model": "gpt2-large", "batch": 1, "precision": "amp-fp16", "seq": 1024}
    assert said("TrainingArguments(bf16=True, fp16=False, gradient_accumulation_steps=8,)") == {
        "precision": "amp-bf16", "accumulation": 8,
    }  # fmt: skip
    assert said('{"per_device_train_batch_size": 4, "gradient_checkpointing": true, "optim": "adamw_bnb_8bit"}') == {
        "batch": 4, "checkpoint": 1, "optimizer": "adam8bit",
    }  # fmt: skip
    assert said("it ran on a Tesla T4")["capability"] == 75


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True, "optim": "paged_adamw_8bit"},
         {"batch": 2, "precision": "amp-bf16", "checkpoint": 1, "optimizer": "adam8bit", "paged": True}),
        ({"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
         {"batch": 4, "precision": "amp-fp16", "parallel": "deepspeed", "zero_stage": 2, "offload": True}),
        ({"mixed_precision": "bf16", "distributed_type": "MULTI_GPU", "num_processes": 2},
         {"precision": "amp-bf16", "parallel": "ddp", "cards": 2}),
    ],
)  # fmt: skip
def test_trainer_accelerate_and_deepspeed_are_one_vocabulary(fields, expected):
    found = settings.of(fields)
    assert {name: found[name] for name in expected} == expected


def test_a_configuration_that_cannot_be(tmp_path, capsys):
    cases = {
        "no.json": "{",
        "list.json": "[1]",
        "other.json": '{"colour": "blue"}',
        "empty.json": "",
        "bad.yaml": "a: [b",
    }
    for name, text in cases.items():
        (tmp_path / name).write_text(text)
        assert run("--recipe", str(tmp_path / name)) == 2, name
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("labkit: "), name
    assert run("--recipe", str(tmp_path / "missing.json")) == 2
    (tmp_path / "recipe.json").write_text('{"model": "gpt2", "batch": 0}')
    assert run("--recipe", str(tmp_path / "recipe.json")) == 2
    assert "batch must be" in capsys.readouterr().err
    assert run("text", "--card", "voodoo2") == 2 and run("text", "--budget", "much") == 2


def test_bf16_for_a_card_that_has_none():
    wanted = {"per_device_train_batch_size": 4, "bf16": True}
    assert names(diagnose(recipe=wanted, card="t4")) == ["bf16-emulated-configured"]
    assert not diagnose(recipe=wanted, card="rtx3090").known


SMALL = {"model": "gpt2", "batch": 2, "seq": 256, "precision": "amp-fp16"}


@pytest.mark.slow
def test_a_recipe_that_fits_needs_nothing():
    found = diagnose(recipe=SMALL, budget="8GiB")
    assert not found.known and any("fits" in n and "nothing is needed" in n for n in found.notes)


@pytest.mark.slow
def test_a_recipe_that_does_not_fit_gets_changes_with_predicted_effects(monkeypatch):
    monkeypatch.setattr(effecting, "_MOST", 3)  # a prediction takes a second
    found = diagnose(recipe={**SMALL, "batch": 4, "seq": 512, "attention": "eager"}, budget="3GiB")
    first = found.causes[0]
    assert first.name in ("attention-scores", "activations")
    effects = [a.effect for a in first.advice if a.effect]
    assert effects and all(e.after_bytes < e.before_bytes for e in effects)
    assert [e.fits for e in effects] == sorted((e.fits for e in effects), reverse=True)  # what fits comes first
    document = json.loads(found.to_json())
    assert document["causes"][0]["advice"][0]["effect"]["after_bytes"] == first.advice[0].effect.after_bytes


def test_no_advice_for_what_is_on_already_or_cannot_help(unpredicted):
    text = oom("384.00 MiB", "130.00 MiB")
    done = " gradient_checkpointing=True optim=adamw_bnb_8bit attn_implementation=sdpa"

    def advice(text):
        return " ".join(a.do for c in diagnose(text).causes for a in c.advice)

    assert "8 bits" in advice(text) and "store the input of each block" in advice(text)
    for word in ("8 bits", "store the input of each block", "fused attention"):
        assert word not in advice(text + done)
    assert "8 bits" not in advice(text + "\nlora_r=8")  # little is left for 8-bit states under LoRA
    assert "grouped-query" not in advice(text)


def report(**more):
    failure = Failure(
        "forward", "lm_head", 1644 * MiB, 900 * MiB, 40 * MiB,
        alive=(Holding("lm_head", "temporary", "forward", 4 * GiB), Holding("transformer.h.0.attn", "activation", "forward", GiB)),
        nearest=("batch 4 (6.1 GiB)",),
    )  # fmt: skip
    return Report(
        "step", "oom", "measured", "a card", budget_bytes=8 * GiB, failure=dataclasses.replace(failure, **more)
    )


def test_a_report_is_explained(tmp_path):
    found = diagnose(report())
    assert names(found)[0] == "logits" and "nearest that fits: batch 4 (6.1 GiB)" in found.notes
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"kind": "report", **report().to_dict()}))
    assert names(diagnose(recipe=file)) == names(found)
    assert names(diagnose(report(phase="optimizer", module="")))[0] == "optimizer-state"
    fine = Report("step", "ok", "measured", "a card")
    assert not diagnose(fine).known and "ran to its end" in diagnose(fine).notes[0]


def test_what_a_notebook_gives(unpredicted):
    try:
        raise ValueError("Attempting to unscale FP16 gradients.")
    except ValueError as error:
        assert names(labkit.diagnose(error)) == ["unscale-fp16"]

    class Arguments:
        def to_dict(self):
            return {"bf16": True, "per_device_train_batch_size": 1}

    class Trainer:
        args = Arguments()

    assert names(diagnose(Trainer(), card="rtx2070")) == ["bf16-emulated-configured"]
    for wrong in ({"recipe": {"batch": 1}, "what": Arguments()}, {"what": 3}, {}, {"what": "  "}):
        with pytest.raises(UserError):
            diagnose(**wrong)


# ------------------------------------------------------------------------------------ the table, and the command


def good(**changes):
    clues = (Says("some message"),)
    fields = {"name": "x", "kind": "memory", "cause": "c", "clues": clues, "changes": (Change("do"),), **changes}
    return rule.Rule(**fields)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"kind": "weather"}, "kind"), ({"clues": (Says("(", 1.0),)}, "cannot be read"), ({"changes": ()}, "change"),
        ({"clues": (Says("m", 0.4),)}, "never fire"), ({"clues": (Told(("no such",)),)}, "no concept"),
        ({"clues": (Number("oom.weather", ">", 1, 1.0),)}, "nothing is called"), ({"clues": Says("m")}, "tuple"),
        ({"clues": (Number("oom", "~", 1, 1.0),)}, "compares nothing"),
    ],
)  # fmt: skip
def test_a_table_with_a_wrong_rule_is_refused(broken, says):
    rule.validate((good(),), set(CONCEPTS), set(SETTINGS), NAMES)
    with pytest.raises(UserError, match=says):
        rule.validate((good(**broken),), set(CONCEPTS), set(SETTINGS), NAMES)
    with pytest.raises(UserError, match="twice"):
        rule.validate((good(), good()), set(CONCEPTS), set(SETTINGS), NAMES)


def test_every_rule_says_where_it_comes_from_and_each_has_a_text():
    assert all(r.source for r in RULES if r.name != "activations-told")
    assert all(r.lesson == "" or r.lesson.isdigit() for r in RULES)
    covered = {name for name, _ in (*EVERY, *MORE)}
    told = {r.name for r in RULES} - covered
    assert len(told) <= 14, told  # variants of a rule that a text, not an error, tells


def run(*arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(["diagnose", *arguments])
    return exit.value.code or 0


class Pipe(io.StringIO):
    """Standard input with bytes behind it."""

    def __init__(self, text):
        super().__init__(text)
        self.buffer = io.BytesIO(text.encode())


def test_the_command_reads_arguments_files_and_pipes(tmp_path, capfd, monkeypatch, unpredicted):
    message = "ValueError: Attempting to unscale FP16 gradients."
    file = tmp_path / "e.log"
    file.write_text(message)
    for arguments in ([message], ["--file", str(file)], [str(file)], ["--file", "-"], ["-"], []):
        monkeypatch.setattr(sys, "stdin", Pipe(message))
        assert run(*arguments) == 0
        assert "unscale-fp16" in capfd.readouterr().out, arguments
    assert run("--json", message) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["known"] is True and document["causes"][0]["evidence"][0]["line"] == 1
    assert document["causes"][0]["confidence"] in ("strong", "likely", "possible")
    assert run("all is well") == 0 and "no cause that is known" in capfd.readouterr().out
    assert run(message, "--file", str(file)) == 2 and run("--file", "/no/such") == 2
