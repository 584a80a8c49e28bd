"""The planner: counted work, the time model, the candidates of a card, the search, and what it says."""

from __future__ import annotations

import json
import py_compile
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labkit import cli, machine, models
from labkit.planner import candidates, counting, explanation, planning, roofline, search, view
from labkit.planner.export import script, write
from labkit.planner.roofline import Times
from labkit.planner.room import Need, Room, least_bytes, need
from labkit.planner.shape import Shape
from labkit.recipes import Recipe
from labkit.units import GiB, UserError

H200 = machine.preset("h200")
TURING = machine.preset("rtx2070")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A folder with the configuration of a very small GPT-2."""
    folder = tmp_path_factory.mktemp("tiny-gpt2")
    models.config("gpt2", n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=300).save_pretrained(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------ counting


def test_counted_operations_are_those_of_the_formula(tiny):
    recipe = Recipe.of(model=tiny, batch=5, seq=64, attention="eager", dropout=0.0)
    kernels = counting.work(recipe).at(5)
    shape = Shape.of(recipe)
    matrices = 3 * 12 * 64**2 + 300 * 64  # three blocks and the head
    products = 6 * matrices * 5 * 64 + 12 * 3 * 64 * 64 * 5 * 64  # and attention, two products each way
    counted = float((kernels.flops * kernels.count)[kernels.kind == counting.PRODUCT32].sum())
    assert counted == pytest.approx(products, rel=0.001)
    assert shape.parameters == 12 * 3 * 64**2 + 13 * 64 * 3 + 300 * 64 + 64 * 64 + 2 * 64
    assert shape.tensors == 12 * 3 + 4


def test_work_is_linear_in_depth_and_batch(tiny):
    recipe = Recipe.of(model=tiny, batch=1, seq=32, precision="amp-bf16", loss="chunked")
    of = counting.work(recipe)
    for batch in (2, 4, 7):
        counted = counting._total(recipe.changed(checkpoint=0, optimizer="sgd"), 3, "h200") if batch == 2 else None
        kernels = of.at(batch)
        if counted is not None:  # all three blocks really run
            assert float((kernels.flops * kernels.count).sum()) == pytest.approx(
                sum(row[3] * n for row, n in counted.items()), rel=1e-6
            )
            assert float(kernels.count.sum()) == pytest.approx(sum(counted.values()), rel=0.02)
    two, four = (float((of.at(b).nbytes * of.at(b).count).sum()) for b in (2, 4))
    assert two < four < 2 * two  # weights are read once, whatever the batch


# ------------------------------------------------------------------------------------------------ the time model


def seconds(recipe: Recipe, card: machine.Card = H200) -> float:
    return roofline.estimate(recipe, card).seconds


def test_what_costs_time_does(tiny):
    plain = Recipe.of(model=tiny, batch=8, seq=64, optimizer="adamw-fused")
    assert seconds(plain.changed(checkpoint=1)) > seconds(plain)
    assert seconds(plain.changed(accumulation=3)) > 2 * seconds(plain)
    assert seconds(plain.changed(batch=4096)) > 2 * seconds(plain)
    assert seconds(plain.changed(optimizer="adamw", offload="optimizer")) > seconds(plain)
    times = roofline.estimate(plain.changed(checkpoint=1), H200)
    assert set(times.phases) == {"forward", "backward", "recompute", "loss head", "optimizer"}
    assert times.phases["recompute"][0] == pytest.approx(times.phases["forward"][0])


def test_a_card_with_lower_ceilings_is_slower(tiny):
    recipe = Recipe.of(model=tiny, batch=4096, seq=64)
    slow = replace(H200, bandwidth_bytes=H200.bandwidth_bytes / 50, fp32_flops=H200.fp32_flops / 50)
    assert seconds(recipe, slow) > 5 * seconds(recipe)
    away = recipe.changed(offload="activations")
    narrow = replace(H200, bus_bytes=H200.bus_bytes / 1000)
    assert seconds(away, narrow) > seconds(away) >= seconds(recipe)
    states = Recipe.of(model=tiny, batch=4, seq=64, precision="bf16", optimizer="adamw8bit", offload="states")
    narrow = replace(narrow, bus_bytes=narrow.bus_bytes / 100)
    once = seconds(states, narrow) - seconds(states)
    moved = Shape.of(states).state_bytes(states) / (narrow.bus_bytes * roofline.measured_rates().bus)
    assert 0.95 * moved < once < 1.01 * moved  # each way at once, once a step: less what hides behind the step
    several = states.changed(accumulation=3)
    assert seconds(several, narrow) - seconds(several) == pytest.approx(once)


def test_rates_say_where_they_come_from():
    source = roofline.provenance()
    assert source["card"] == "h200"
    assert source["error"]["rows"] >= 40
    assert 0 < source["error"]["median"] < 0.15
    rates = roofline.measured_rates()
    assert all(0 < getattr(rates, name) <= 1 for name in ("product", "product32", "bandwidth", "bus"))


# ------------------------------------------------------------------------------------------------ candidates


def test_candidates_respect_the_card():
    ones = [r for _, r in candidates.candidates(TURING, model="gpt2", batch=1, seq=512)]
    assert {r.precision for r in ones} == {"fp32", "amp-fp16", "fp16"}
    assert {r.offload for r in ones if r.precision == "fp16"} == {"optimizer", "optimizer+gradients"}
    on_hopper = {r.precision for _, r in candidates.candidates(H200, model="gpt2", batch=1, seq=512)}
    assert {"amp-bf16", "bf16"} <= on_hopper
    assert "amp-fp16" not in on_hopper


def test_no_candidate_loses_small_updates():
    for _, r in candidates.candidates(H200, model="gpt2", batch=1, seq=512):
        assert r.precision != "bf16" or r.stochastic_rounding
        assert r.attention == "sdpa"


def test_what_the_user_fixed_stays():
    ones = [r for _, r in candidates.candidates(H200, model="gpt2", batch=1, seq=512, clip=1.0, compile=False)]
    assert ones
    assert all(r.clip == 1.0 and r.compile == "none" for r in ones)
    assert not any(r.gradients == "in-backward" for r in ones)  # which could not clip


def test_splits_keep_the_number_of_sequences():
    assert candidates.splits(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]


# ------------------------------------------------------------------------------------------------ the search


@pytest.fixture
def prices(monkeypatch):
    """Memory and time by table: a stored block costs 10 a sequence, checkpointed 1 and half as much time again."""
    looked = []

    def cheap(recipe, card):
        looked.append(recipe)
        size = 20 + recipe.batch * (1 if recipe.checkpoint else 10)
        return Need(size, size, 0, size)

    def quick(recipe, card, **_):
        return Times({}, 0.0, (0.1 + recipe.tokens * 1e-5) * (1.5 if recipe.checkpoint else 1.0), 0.0)

    monkeypatch.setattr(search, "need", cheap)
    monkeypatch.setattr(search, "estimate", quick)
    monkeypatch.setattr(search, "least_bytes", lambda recipe, shape: 20)
    monkeypatch.setattr(search, "rough_bytes", lambda recipe, shape: 0)
    return looked


ROOM = Room(replace(H200, memory_bytes=100 + H200.context_band[1]), None)
ONES = [("stored", Recipe.of(seq=100)), ("checkpointed", Recipe.of(seq=100, checkpoint=1))]


def test_the_search_takes_the_fastest_that_fits(prices, monkeypatch):
    monkeypatch.setattr(candidates, "STEP_TOKENS", 0)  # one micro-batch in a step
    found = search.fastest(ONES, H200, ROOM, batch=None)
    assert [c.family for c in found] == ["checkpointed", "stored"]  # at 64 and at 8 sequences
    assert found[0].recipe.batch == 64
    assert found[1].recipe.batch == 8
    assert found[0].tokens_per_second > found[1].tokens_per_second


def test_a_free_batch_may_come_in_micro_batches(prices, monkeypatch):
    monkeypatch.setattr(candidates, "STEP_TOKENS", 3200)
    found = search.fastest(ONES[:1], H200, ROOM, batch=None)
    assert [c.recipe.tokens for c in found] == [3200]
    assert found[0].recipe.accumulation > 1


def test_what_an_estimate_leaves_open_is_predicted_exactly(prices, monkeypatch):
    monkeypatch.setattr(candidates, "STEP_TOKENS", 0)
    asked = []

    def exact(recipe, card):
        asked.append(recipe.batch)
        size = 60 if recipe.batch <= 6 else 160
        return Need(size, size, 0, size, size, True)

    def open_need(recipe, card):  # up to 12 sequences may fit, only one surely does
        return Need(100, 100, 0, 50 if recipe.batch == 1 else 200, 50 if recipe.batch <= 12 else 200)

    monkeypatch.setattr(search, "exact_need", exact)
    monkeypatch.setattr(search, "need", open_need)
    found = search.fastest(ONES[:1], H200, ROOM, batch=None)
    assert asked == [12, 8, 6]  # the fastest first
    assert (found[0].recipe.batch, found[0].need.exact) == (6, True)
    monkeypatch.setattr(search, "CONFIRMED", 0)
    assert search._Line([], H200, ROOM, None, blocks=0).first(1) == []
    assert search.among([ONES[0][1].changed(batch=n) for n in (1, 6, 8)], H200, ROOM)[0].recipe.batch == 6


def test_an_uncompiled_twin_that_is_slower_is_not_looked_at(prices, monkeypatch):
    def quick(recipe, card, **_):
        return Times({}, 0.0, recipe.tokens * (1e-5 if recipe.compile == "blocks" else 2e-5), 0.0)

    monkeypatch.setattr(search, "estimate", quick)
    twin = ("compiled", Recipe.of(seq=100, compile="blocks"))
    assert [c.family for c in search.fastest([ONES[0], twin], H200, ROOM, batch=4)] == ["compiled"]


def test_a_fixed_batch_is_split_only_as_far_as_needed(prices):
    found = {c.family: c.recipe for c in search.fastest(ONES, H200, ROOM, batch=16)}
    assert (found["stored"].batch, found["stored"].accumulation) == (8, 2)
    assert (found["checkpointed"].batch, found["checkpointed"].accumulation) == (16, 1)


def test_among_equals_the_gentler_comes_first(prices, monkeypatch):
    monkeypatch.setattr(search, "estimate", lambda r, c, **_: Times({}, 0.0, 0.97 if r.checkpoint else 0.98, 0.0))
    assert search.fastest(ONES, H200, ROOM, batch=4)[0].family == "stored"


def test_nothing_is_predicted_that_could_not_win(prices):
    many = [*ONES, *(("slow", Recipe.of(seq=100, checkpoint=n)) for n in range(2, 12))]
    search.fastest(many, H200, ROOM, batch=4, shown=1)
    assert {r.checkpoint for r in prices} == {0}


def test_largest_batch(prices):
    found = search.largest_batch(ONES, H200, ROOM)
    assert (found[0].family, found[0].recipe.batch) == ("checkpointed", 64)


def test_least_bytes_are_the_known_bytes_a_parameter():
    shape = Shape(12, 768, 1000, 148, 400, 50257)
    for fields, each in (
        ({}, 16), ({"precision": "amp-bf16", "optimizer": "adam8bit"}, 10),
        ({"precision": "bf16", "optimizer": "adamw8bit"}, 6),
        ({"precision": "bf16", "optimizer": "adamw8bit", "gradients": "in-backward"}, 4),
        ({"precision": "bf16", "optimizer": "adamw8bit", "offload": "states"}, 4),
        ({"precision": "fp16", "offload": "optimizer+gradients"}, 2),
    ):  # fmt: skip
        assert least_bytes(Recipe.of(**fields), shape) == 1000 * each, fields


# ------------------------------------------------------------------------------------------------ a whole plan


@pytest.fixture(scope="module")
def plan(tiny):
    return planning.plan(tiny, card="rtx2070", seq=64, batch=4, compile=False)


def test_a_model_that_fits_needs_nothing(plan):
    assert plan.nothing_needed
    assert "nothing is needed" in str(plan)
    assert not plan.recipe.checkpoint  # memory is free here
    assert plan.recipe.offload == "none"
    assert plan.tree[0].yes
    assert plan.recipe.batch * plan.recipe.accumulation == 4


def test_the_document_has_what_was_agreed(plan):
    document = json.loads(json.dumps(plan.to_dict()))
    assert list(document) == ["card", "budget_bytes", "plans", "nearest_miss"]
    first = document["plans"][0]
    assert list(first) == ["recipe", "allocated_bytes", "reserved_bytes", "tokens_per_second", "why"]
    assert Recipe.of(**first["recipe"]) == plan.recipe
    assert first["why"].startswith("nothing is needed to fit")
    assert 0 < first["allocated_bytes"] <= first["reserved_bytes"] <= document["budget_bytes"]


def test_a_plan_is_a_table(plan):
    assert [len(row) for row in plan.rows] == [len(plan.columns)] * len(plan.choices)
    assert plan.rows[0][0] == plan.best.family


def test_each_switch_has_its_price_and_its_lesson(plan):
    gelu = next(s for s in plan.why if s.name.startswith("activation"))
    without = plan.recipe.changed(activation="gelu_new")
    assert gelu.saves_bytes == need(without, TURING).reserved_bytes - need(plan.recipe, TURING).reserved_bytes
    assert gelu.lesson == "07"
    assert gelu.slower_seconds is not None
    assert gelu.slower_seconds < 0  # one kernel instead of eight


def test_nothing_fits_and_what_would(tiny):
    found = planning.plan(tiny, card="h200", budget="256KiB", seq=64, compile=False)
    assert found.best is None
    assert found.nearest_miss is not None
    assert found.nearest_miss.need.worst_bytes > 2**18
    assert found.smallest_card == "rtx2070"
    assert "nothing fits" in str(found)
    assert "rtx2070" in str(found)
    assert found.to_dict()["nearest_miss"]["reserved_bytes"] > 0
    with pytest.raises(UserError, match="no plan"):
        found.export("nowhere.py")


def test_the_longest_sequence_is_the_models(tiny):
    assert planning.plan(tiny, card="t4", goal="longest", compile=False).seq == 64


def test_the_picture_says_what_it_shows(plan):
    from labkit.plots import alt, png

    ax = plan.picture()
    assert "Does the plain step fit? yes" in alt(ax)
    assert png(ax).startswith(b"\x89PNG")


def test_a_notebook_without_widgets_gets_a_table(plan):
    assert view.interactive(plan) is plan  # no kernel here
    assert "<table>" in plan._repr_html_()


def test_turned_switches_are_priced_or_refused(plan):
    fields = {**plan.recipe.to_dict(), "precision": "fp32"}
    assert "fits" in view.described(fields, "t4", plan.room)
    wrong = {**fields, "stochastic_rounding": True}
    assert "adamw8bit" in view.described(wrong, "t4", plan.room)
    tight = Room(TURING, 2**20)
    assert "too much" in view.described(fields, "t4", tight)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"card": "rtx9999"}, "unknown card"),
        ({"seq": 65}, "positions"),
        ({"goal": "best"}, "goal 'best'"),
        ({"budget": "much"}, "not a size"),
        ({"batch": 0}, "batch must be"),
        ({"host_memory": "some"}, "host memory"),
        ({"goal": "largest-batch", "batch": 3}, "leave --batch out"),
    ],
)
def test_a_mistake_is_one_sentence(tiny, asked, said):
    with pytest.raises(UserError, match=said) as caught:
        planning.plan(tiny, **asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "not json", '{"model_type": "gpt2", "n_embd": 100, "n_head": 3}', '{"model_type": "bert"}']
)
def test_a_configuration_without_the_fields_it_needs(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError):
        planning.plan(str(tmp_path), card="t4", seq=64, compile=False)


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    return int(ended.value.code or 0)


def test_the_command_prints_one_document_and_writes_a_script(tiny, tmp_path, capfd):
    target = tmp_path / "train.py"
    asked = ["--card", "rtx2070", "--seq", "64", "--batch", "4", "--no-compile", "--json", "--export", str(target)]
    assert command(tiny, *asked) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["card"] == "rtx2070"
    compile(target.read_text(), "train.py", "exec")


def test_the_command_exits_with_1_when_nothing_fits(tiny, capfd):
    assert command(tiny, "--card", "h200", "--budget", "256KiB", "--seq", "64", "--no-compile") == 1
    assert "nothing fits" in capfd.readouterr().out


@pytest.mark.parametrize("asked", [("gpt5",), ("gpt2", "--card", "rtx1"), ("gpt2", "--seq", "many")])
def test_the_command_says_a_mistake_in_one_line(asked, capfd):
    assert command(*asked) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_turned_on_names_every_switch():
    recipe = Recipe.of(precision="bf16", stochastic_rounding=True, optimizer="adamw8bit", gradients="host",
                       checkpoint=2, loss="in-place", activation="gelu_pytorch_tanh", compile="blocks",
                       accumulation=2)  # fmt: skip
    named = " ".join(s.name for s in explanation.names(recipe))
    for word in ("bf16", "gradients=host", "checkpoint=2", "loss=in-place", "activation", "compile", "accumulation=2"):
        assert word in named


# ------------------------------------------------------------------------------------------------ the script


SCRIPTS = {
    "plain": {},
    "autocast, chunked": {"precision": "amp-bf16", "loss": "chunked", "loss_chunks": 4, "checkpoint": 1, "clip": 1.0,
                          "optimizer": "adamw-fused", "activation": "gelu_pytorch_tanh", "accumulation": 2},
    "16 bits, gradients on the host": {"precision": "bf16", "gradients": "host", "loss": "in-place", "checkpoint": 2},
    "fp16 with masters on the host": {"precision": "fp16", "offload": "optimizer+gradients", "loss": "in-place"},
    "states on the host": {"precision": "bf16", "optimizer": "adamw8bit", "stochastic_rounding": True,
                           "offload": "states+activations", "checkpoint": 1, "clip": 1.0},
    "in backward": {"precision": "bf16", "gradients": "in-backward"},
    "in backward, flat": {"precision": "bf16", "gradients": "in-backward", "flat": True},
    "flat": {"precision": "bf16", "flat": True, "clip": 1.0, "accumulation": 2},
}  # fmt: skip


def test_every_candidate_gives_a_script_that_compiles(tmp_path):
    seen = set()
    for card in (H200, TURING):
        for family, recipe in candidates.candidates(card, model="gpt2", batch=2, seq=128):
            key = (family, recipe.loss, recipe.offload, recipe.compile, recipe.checkpoint)
            if key not in seen:
                seen.add(key)
                compile(script(recipe, card=card), "train.py", "exec")
    assert len(seen) > 40


@pytest.mark.slow
def test_exported_scripts_train(tiny, tmp_path):
    text_file = tmp_path / "text.txt"
    text_file.write_text("to be or not to be, that is the question. " * 200)
    driver = ["import runpy, sys", "import torch, transformers"]
    for number, fields in enumerate(SCRIPTS.values()):
        recipe = Recipe.of(**{"model": tiny, "batch": 2, "seq": 32, **fields})
        path = write(recipe, tmp_path / f"train{number}.py", card=H200)
        py_compile.compile(str(path), doraise=True)
        argv = [str(path), str(text_file), "--steps", "2", "--tokenizer", "bytes", "--from-scratch"]
        driver += [f"sys.argv = {argv!r}", f"runpy.run_path({str(path)!r}, run_name='__main__')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(driver)], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).resolve().parents[1])  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step 2: loss ")]
    assert len(lines) == len(SCRIPTS)
    for line in lines:
        assert 3 < float(line.split()[3].rstrip(",")) < 7  # a new model of 300 tokens: log 300 is 5.7


# ------------------------------------------------------------------------------------------------ the hard case


@pytest.mark.slow
def test_gpt2_xl_on_a_turing_card_of_8_gb():
    found = planning.plan("gpt2-xl", card="rtx2070", seq=1024)
    assert found.best is not None
    assert found.recipe.precision == "fp16"
    assert found.recipe.offload.startswith("optimizer")
    assert found.best.need.worst_bytes <= found.room.limit_bytes < 8 * GiB
    assert found.best.need.host_bytes > 12 * Shape.of(found.recipe).parameters
    assert "host" in str(found)
