"""Predictions: phases, modules, CUDA's semantics on ghosts, failures, and the measured cells they are held against."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from labkit import memory, models
from labkit.memory import PredictionError
from labkit.memory.ghosts import GPU
from labkit.memory.kernels import chip
from labkit.memory.prediction import Run
from labkit.recipes import Recipe
from labkit.units import GiB, MiB

TRUTH = Path(__file__).resolve().parents[1] / "data/reference/memory-h200.jsonl"
HELD = 65 * MiB  # cuBLAS workspaces on an H200


def stack(width=1024, depth=4, batch=64):
    """An experiment: linear layers and AdamW."""

    def experiment(device):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth))).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.randn(batch, width, device=device)

        def step():
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return step

    return experiment


def seen(function, capability=(9, 0)):
    """What `function` (called on the stand-in device inside a prediction) returns."""
    found = {}

    def experiment(device):
        found["out"] = function(device)
        return lambda: None

    Run(chip("h200", capability)).play(experiment)
    return found["out"]


def operators(function, capability=(9, 0)):
    """Names of the operators that `function` runs inside a prediction."""
    run, names = Run(chip("h200", capability)), []
    real = run.ghosts.run
    run.tracer._run = lambda func, args, kwargs: (names.append(str(func)), real(func, args, kwargs))[1]

    def experiment(device):
        del names[:]
        function(device)
        return lambda: None

    run.play(experiment)
    return names


# against measurements ------------------------------------------------------------------------------------------


def cells():
    """Twenty measured rows of the half that no constant was fitted on: every value of every field, cheap ones first."""
    rows = [json.loads(line) for line in TRUTH.read_text().splitlines()]
    rows = [r for r in rows if r["status"] == "ok" and r["split"] == "test"]
    layers = {"gpt2": 12, "gpt2-medium": 24, "gpt2-large": 36, "gpt2-xl": 48}
    rows.sort(
        key=lambda r: (
            layers[r["recipe"]["model"]] * r["recipe"]["accumulation"] * (2 if r["recipe"]["checkpoint"] else 1)
        )
    )
    chosen, covered = [], set()
    for row in rows:
        values = {(k, v) for k, v in row["recipe"].items() if k not in ("batch", "seq")}
        if not values <= covered:
            chosen.append(row)
            covered |= values
    return (chosen + [r for r in rows if r not in chosen])[: max(20, len(chosen))]


@pytest.mark.parametrize("row", cells(), ids=lambda r: str(Recipe(**r["recipe"])))
def test_a_measured_cell_is_met(row):
    report = memory.predict_recipe(Recipe(**row["recipe"]), card="h200")
    for step in ("first", "steady"):
        found, truth = getattr(report, step), row[step]
        assert found.allocated_bytes == pytest.approx(truth["allocated_bytes"], rel=0.02)
        assert found.requested_bytes == pytest.approx(truth["requested_bytes"], rel=0.001)
        assert found.reserved_bytes == pytest.approx(truth["reserved_bytes"], rel=0.08)


def test_the_cells_cover_every_value_of_every_field():
    rows = [json.loads(line) for line in TRUTH.read_text().splitlines()]
    for field in rows[0]["recipe"].keys() - {"batch", "seq"}:
        every = {r["recipe"][field] for r in rows if r["status"] == "ok" and r["split"] == "test"}
        assert {r["recipe"][field] for r in cells()} == every


def test_one_prediction_does_not_change_the_next():
    """Shapes are remembered from one prediction to the next: also which dtype was the default when they were found."""
    from labkit.memory.prediction import _shapes

    recipe = Recipe.of(batch=1, seq=64, precision="amp-bf16")
    _shapes.cache_clear()
    fresh = memory.predict_recipe(recipe).steady
    _shapes.cache_clear()
    memory.predict_recipe(recipe.changed(precision="bf16"))
    assert memory.predict_recipe(recipe).steady == fresh


# what is counted -----------------------------------------------------------------------------------------------


def test_every_byte_of_a_small_stack_has_a_name():
    report = memory.predict(stack(width=1024, depth=4, batch=64), card="h200")
    held = report.held_by()
    parameters = 4 * (1024 * 1024 + 1024) * 4
    assert held["workspace"] == HELD
    assert held["parameter"] == held["gradient"] == parameters
    assert held["optimizer state"] == 2 * parameters
    assert held["input"] == 64 * 1024 * 4
    assert sum(held.values()) == report.steady.requested_bytes
    assert report.first.requested_bytes == report.steady.requested_bytes  # the peak is the optimizer's


def test_states_are_born_in_the_first_step():
    """Activations decide the peak: the first step does without the states, the later ones carry them."""
    report = memory.predict(stack(width=256, depth=4, batch=65536), card="h200")
    states = 2 * 4 * (256 * 256 + 256) * 4
    assert report.steady.requested_bytes - report.first.requested_bytes == states


def test_phases_and_modules():
    recipe = Recipe.of(batch=2, seq=128, checkpoint=1)
    report = memory.predict_recipe(recipe, trace=True)
    assert set(report.phase_peaks) == {"forward", "backward", "recompute", "optimizer"}
    assert max(report.phase_peaks.values()) == report.steady.requested_bytes
    timeline = report.timeline
    assert timeline.modules == (
        "embedding",
        *(f"block {i}" for i in range(12)),
        "final norm",
        "head and loss",
        "optimizer",
        "other",
    )
    assert len(timeline.phases) <= 160 and max(timeline.totals) == report.steady.requested_bytes
    order = [p for i, p in enumerate(timeline.phases) if i == 0 or timeline.phases[i - 1] != p]
    assert order[0] == "forward" and order[-1] == "optimizer" and order.count("recompute") >= 6
    # a block holds its weights always, and its recomputed activations only while it is its turn
    first, last = timeline.held[1], timeline.held[12]
    assert first.index(max(first)) > last.index(max(last))


def test_the_difference_of_two_reports_adds_up():
    one, two = (memory.predict(stack(width=512, depth=n), card="h200") for n in (4, 8))
    change = memory.difference(one, two)
    layer = (512 * 512 + 512) * 4
    assert change["parameter"] == change["gradient"] == 4 * layer and change["optimizer state"] == 8 * layer
    assert sum(change.values()) == two.steady.requested_bytes - one.steady.requested_bytes
    assert memory.difference(one, one) == {}


def test_backward_is_attributed_to_the_module_of_the_forward():
    recipe = Recipe.of(batch=2, seq=128, attention="eager")
    run = Run(chip("h200", (9, 0)), stateless=True)
    run.play(recipe.experiment())
    recorder = run.recorder
    owners = {recorder.places[p] for p in recorder.births}
    for block in range(12):
        for part in ("ln_1", "attn.c_attn", "attn", "mlp.act", "mlp.c_proj"):
            assert ("forward", f"transformer.h.{block}.{part}") in owners
            assert ("backward", f"transformer.h.{block}.{part}") in owners


# CUDA's semantics ----------------------------------------------------------------------------------------------


def test_weights_are_cast_once_within_an_autocast_context_and_the_copy_is_dropped_at_its_end():
    def cast(device):
        layer, x = torch.nn.Linear(512, 512, bias=False, device=device), torch.randn(8, 512, device=device)
        for _ in range(2):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                layer(layer(x))

    names = operators(cast)
    # the weight once in each context; the first input once, the second is bfloat16 already
    assert names.count("aten._to_copy.default") == 4


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: torch.nn.functional.layer_norm(x, (8,)), torch.float32),
        (lambda x: torch.softmax(x, -1), torch.float32),
        (lambda x: torch.softmax(x, -1, dtype=torch.float16), torch.float16),
        (lambda x: x.pow(3), torch.float32),
        (lambda x: x.sum(-1), torch.float32),
        (lambda x: torch.exp(x), torch.float32),
        (lambda x: torch.tanh(x), torch.float16),
        (lambda x: torch.nn.functional.gelu(x), torch.float16),
        (lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(8, dtype=torch.long, device=GPU)), torch.float32),
        (lambda x: x @ x, torch.float16),
    ],
)
def test_autocast_follows_cuda_lists(call, dtype):
    def cast(device):
        with torch.autocast(device.type, dtype=torch.float16):
            return call(torch.randn(8, 8, dtype=torch.float16, device=device)).dtype

    assert seen(cast) is dtype


def test_dropout_keeps_a_bool_mask_and_none_without_need():
    assert "aten.native_dropout.default" in operators(lambda d: torch.dropout(torch.randn(8, device=d), 0.1, True))
    assert operators(lambda d: torch.dropout(torch.randn(8, device=d), 0.0, True)) == ["aten.randn.default"]
    assert operators(lambda d: torch.dropout(torch.randn(8, device=d), 0.1, False)) == ["aten.randn.default"]


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "masked", "kernel"),
    [
        ((9, 0), torch.bfloat16, 64, False, "cudnn"),
        ((9, 0), torch.float32, 64, False, "efficient"),
        ((8, 9), torch.bfloat16, 64, False, "flash"),
        ((8, 0), torch.float16, 64, True, "efficient"),
        ((7, 5), torch.float16, 64, False, "efficient"),
        ((7, 5), torch.bfloat16, 64, False, "math"),  # emulated there: no fused kernel
        ((8, 0), torch.float32, 65, False, "math"),  # not aligned
    ],
)
def test_the_attention_kernel_is_the_cards(capability, dtype, size, masked, kernel):
    def attend(device):
        q = torch.randn(2, 4, 32, size, dtype=dtype, device=device, requires_grad=True)
        mask = torch.ones(32, 32, dtype=torch.bool, device=device) if masked else None
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1)

    names = operators(attend, capability)
    fused = [n for n in names if "scaled_dot_product" in n]
    assert fused == ([] if kernel == "math" else [f"aten._scaled_dot_product_{kernel}_attention.default"])


def test_gradients_of_a_fork_are_summed_in_place_only_if_nobody_else_holds_them():
    def fork(keep):
        def experiment(device):
            x = torch.randn(1024, 1024, device=device, requires_grad=True)

            def step():
                y = x * 2
                kept = []
                if keep:
                    y.register_hook(lambda g: None)
                    y.sin().register_hook(lambda g: kept.append(g))
                (y.sin() + y.cos()).backward(x.detach())
                x.grad = None

            return step

        return memory.predict(experiment).steady.requested_bytes

    plain = fork(False) - HELD
    # x, y, both results and their sum are freed or kept as autograd does: what matters is that no fourth buffer comes
    assert plain % (4 * MiB) == 0
    run = Run(chip("h200", (9, 0)), without=frozenset({"sums"}))

    def experiment(device):
        x = torch.randn(1024, 1024, device=device, requires_grad=True)

        def step():
            y = x * 2
            (y.sin() + y.cos()).backward(x.detach())
            x.grad = None

        return step

    run.play(experiment)
    with_copy = sum(1 for e in run.recorder.events[run.starts[0] : run.starts[1]] if e >= 0)
    run = Run(chip("h200", (9, 0)))
    run.play(experiment)
    in_place = sum(1 for e in run.recorder.events[run.starts[0] : run.starts[1]] if e >= 0)
    assert with_copy - in_place == 1


def test_save_on_cpu_moves_activations_away_and_back():
    def experiment(away):
        def build(device):
            model = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(8)))
            x = torch.randn(4 * MiB, device=device, requires_grad=True)

            def step():
                with torch.autograd.graph.save_on_cpu(pin_memory=True) if away else torch.enable_grad():
                    y = model(x)
                y.sum().backward()
                x.grad = None

            return step

        return memory.predict(build).steady.requested_bytes - HELD

    tensor = 16 * MiB
    assert experiment(False) >= 10 * tensor  # the input, eight results, a gradient
    assert experiment(True) <= 6 * tensor


def test_an_optimizer_that_steps_in_backward_frees_gradients_as_they_come():
    def experiment(early):
        def build(device):
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(device)
            x = torch.randn(4, 1024, device=device)
            optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
            if early:
                for p, optimizer in zip(model.parameters(), optimizers, strict=True):
                    p.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step() or o.zero_grad())

            def step():
                model(x).sum().backward()
                if not early:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()

            return step

        return memory.predict(build)

    late, early = experiment(False), experiment(True)
    assert late.steady.requested_bytes - early.steady.requested_bytes > 5 * 4 * MiB
    assert "optimizer" in early.phase_peaks


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_kinds_of_checkpoint_recompute(reentrant):
    from torch.utils.checkpoint import checkpoint

    def build(device):
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Tanh()).to(device)
            for _ in range(6)
        ]
        x = torch.randn(16384, 256, device=device, requires_grad=True)

        def step():
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            y.sum().backward()
            x.grad = None

        step.blocks = blocks
        return step

    report = memory.predict(build)
    assert "recompute" in report.phase_peaks
    assert report.steady.requested_bytes - HELD < 14 * 16 * MiB  # without: 1 + 18 of them before backward begins


def test_known_integers_keep_their_values_and_others_say_so():
    def decide(device):
        positions = torch.arange(8, device=device).unsqueeze(0)
        return bool((positions[:, 1:] - positions[:, :-1] == 1).all())

    assert seen(decide) is True

    def build(device):
        x = torch.randn(4, device=device)
        return lambda: x.sum().item()

    assert any(".item()" in note for note in memory.predict(build).notes)


def test_cuda_calls_go_to_the_stand_in():
    def build(device):
        layer = torch.compile(torch.nn.Linear(64, 64).to(device))
        x = torch.randn(64, 64, device=device)
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step():
            with torch.autocast("cuda"):
                loss = layer(x).float().sum()
                assert layer(x).dtype is torch.float16  # CUDA's default, not the CPU's
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.synchronize()

        return step

    report = memory.predict(build)
    assert report.ok and any("torch.compile" in note for note in report.notes)


def test_a_gpu_asked_for_by_name_is_the_stand_in():
    """Where PyTorch was built with CUDA, an experiment may name the device instead of using the one it is given."""
    run = Run(chip("h200", (9, 0)))
    empty = torch.ops.aten.empty.memory_format
    made = []

    def build(device):
        made.append(run.ghosts.run(empty, ([4],), {"device": torch.device("cuda"), "pin_memory": False}))
        return lambda: None

    run.play(build)
    assert run.recorder.sizes[0] == 16


def test_values_can_be_shown_and_are_zero():
    shown = []

    def build(device):
        x = torch.randn(2, 3, device=device)

        def step():
            shown.extend([repr(x), f"{x.sum():.1f}", x.cpu().numpy().shape, x.tolist(), repr(torch.ones(1))])

        return step

    assert memory.predict(build).notes
    assert "size=(2, 3)" in shown[0]
    assert shown[1:5] == ["0.0", (2, 3), [[0.0] * 3] * 2, "tensor([1.])"]


def test_an_optimizer_chooses_as_on_cuda_when_nothing_is_asked_for():
    def build(device, **how):
        model = torch.nn.Linear(1024, 1024, bias=False).to(device)
        optimizer, x = torch.optim.AdamW(model.parameters(), **how), torch.randn(4, 1024, device=device)

        def step():
            model(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    default = memory.predict(build).steady
    assert default == memory.predict(lambda d: build(d, foreach=True)).steady
    assert default != memory.predict(lambda d: build(d, fused=True)).steady


def test_what_is_kept_from_a_prediction_is_safe_to_use():
    kept = []

    def build(device):
        weight = torch.nn.Parameter(torch.randn(512, 512, device=device))

        def step():
            kept.append(weight.sum())
            kept.append(weight)
            kept.append(torch.zeros(512, 512, dtype=torch.long, device=device).cpu())

        return step

    memory.predict(build)
    assert kept[0].isnan() and kept[1].sum().isnan() and kept[1].shape == (512, 512) and kept[2].sum() == 0
    assert "nan" in repr(kept[0])


# failures ------------------------------------------------------------------------------------------------------


def test_a_budget_that_does_not_suffice_gives_an_oom_report():
    report = memory.predict(stack(width=1024, depth=8, batch=64), card="h200", budget_bytes=160 * MiB, name="too small")
    assert report.status == "oom" and report.steady is None
    failure = report.failure
    assert failure.phase == "optimizer"  # weights and gradients fit, two states each do not
    assert 0 < failure.wanted_bytes <= 4 * MiB
    assert failure.free_bytes <= 160 * MiB - HELD
    assert sum(h.nbytes for h in failure.alive) + failure.free_bytes == pytest.approx(160 * MiB, rel=0.01)
    assert "out of memory in optimizer" in str(report)
    fits = memory.predict(stack(width=1024, depth=8, batch=64), card="h200", budget_bytes=320 * MiB)
    assert fits.ok and fits.fits(320 * MiB)


def test_a_budget_below_the_workspaces_is_out_of_memory_too():
    report = memory.predict(stack(), budget_bytes=40 * MiB)
    assert report.status == "oom" and report.failure.phase == "build" and report.failure.wanted_bytes == 32 * MiB


def test_out_of_memory_while_building_is_reported_as_such():
    report = memory.predict(stack(width=8192, depth=8), budget_bytes=GiB)
    assert report.status == "oom" and report.failure.phase == "build"


def test_an_operator_without_a_rule_fails_with_its_name():
    def build(device):
        return lambda: torch.nonzero(torch.randn(5, device=device))

    with pytest.raises(PredictionError, match=r"aten\.nonzero"):
        memory.predict(build)


def test_a_custom_operator_without_a_rule_fails_with_its_name():
    library = torch.library.Library("labkit_test", "DEF")
    try:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CPU")

        def build(device):
            return lambda: torch.ops.labkit_test.mystery(torch.randn(5, device=device))

        with pytest.raises(PredictionError, match=r"labkit_test\.mystery"):
            memory.predict(build)
    finally:
        library._destroy()


def test_an_experiment_must_return_its_step():
    with pytest.raises(PredictionError, match="must return its step"):
        memory.predict(lambda device: None)


def test_every_card_preset_has_a_chip():
    from labkit import machine

    for card in machine.PRESETS.values():
        assert chip(card.name, card.capability).processors > 0


def test_another_card_is_labelled_as_not_measured():
    recipe = Recipe.of(batch=1, seq=64)
    ampere, hopper = (memory.predict_recipe(recipe, card=card, trace=True) for card in ("rtx3090", "h200"))
    assert any("rtx3090" in note for note in ampere.notes) and not hopper.notes
    assert hopper.held_by()["workspace"] - ampere.held_by()["workspace"] == 2 * (32 * MiB - 8320 * 1024)


def test_the_workspace_follows_the_variable(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    recipe = Recipe.of(batch=1, seq=64)
    assert memory.predict_recipe(recipe, trace=True).held_by()["workspace"] == 65 * MiB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert memory.predict_recipe(recipe, trace=True).held_by()["workspace"] == 2 * 128 * 1024 + MiB


# nothing stays behind ------------------------------------------------------------------------------------------


def state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.nn.Module._apply,
        torch.compile,
        torch.autocast.__init__,
        torch.amp.GradScaler.__init__,
        torch.cuda.synchronize,
        torch.Tensor.numpy,
        repr(torch.ones(2)),
        sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices(),
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        len(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
    )


def numbers():
    """Results of operators whose kernels a prediction replaces."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = [
            torch.nn.functional.layer_norm(q.bfloat16(), (16,)).dtype,
            torch.softmax(q.bfloat16(), -1).dtype,
            q.pow(2).dtype,
        ]
    return [
        *under,
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().item(),
        torch.dropout(q, 0.5, True).sum().item(),
        torch.softmax(q, -1).sum().item(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_prediction_leaves_no_trace_in_the_process(fails):
    def build(device):
        torch.set_default_dtype(torch.float64)
        random.random()
        torch.randn(3)
        stack()(device)()
        if fails:
            raise KeyError("the experiment's own mistake")
        return stack()(device)

    expected = numbers()
    before = state()
    if fails:
        with pytest.raises(KeyError):
            memory.predict(build)
    else:
        memory.predict(build)
    assert state() == before
    assert numbers() == expected


def test_a_model_made_outside_gets_its_weights_back():
    model = models.gpt2("gpt2", n_layer=1, n_embd=64, n_head=2)
    weights = [p.detach().clone() for p in model.parameters()]

    def build(device):
        moved = model.to(device)
        tokens = torch.ones(1, 8, dtype=torch.long, device=device)
        return lambda: moved(input_ids=tokens, labels=tokens).loss.backward()

    assert memory.predict(build).ok
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight) and parameter.grad is None
    assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_no_weights_are_held_in_host_memory():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = memory.predict_recipe(Recipe.of(model="gpt2-xl", batch=1, seq=64, optimizer="sgd", loss="chunked"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert report.steady.allocated_bytes > 6 * GiB
    assert grown * 1024 < GiB


def test_the_row_of_the_command_line():
    recipe = Recipe.of(batch=1, seq=32, optimizer="sgd")
    row = memory.recipe_row(recipe, memory.predict_recipe(recipe), 0.5)
    expected = {"allocated_bytes", "requested_bytes", "reserved_bytes"}
    expected |= {f"first_step_{name}" for name in expected}
    assert set(row) == set(recipe.to_dict()) | expected | {"status", "context_bytes", "seconds"}
    assert row["status"] == "ok" and row["seconds"] == 0.5 and all(row[name] > 0 for name in expected)
    failed = memory.recipe_row(recipe, memory.predict_recipe(recipe, budget_bytes=200 * MiB), 0.5)
    assert failed["status"] == "oom" and failed["allocated_bytes"] is None
