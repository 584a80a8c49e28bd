"""What the lessons' experiments use beside PyTorch's plain step: streams, offloading, quantised layers and states."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import labkit as lab
from labkit import memory
from labkit.recipes import Recipe
from labkit.units import GiB, MiB, UserError

HELD = 65 * MiB  # cuBLAS workspaces on an H200
ROOT = Path(__file__).resolve().parents[1]
TRUTH = ROOT / "data/reference/memory-h200-experiments.jsonl"
sys.path.insert(0, str(ROOT / "bench"))

import memory_experiments  # noqa: E402

# against measurements ----------------------------------------------------------------------------------------------


def measured():
    """The smallest measured row of each kind of experiment and of each way to do it."""
    rows: dict = {}
    for line in TRUTH.read_text().splitlines():
        row = json.loads(line)
        fields = row["experiment"]
        ways = ("kind", "backend", "mask", "name", "bits", "gradients", "save", "checkpoint", "window", "what")
        key = tuple(fields.get(name) for name in ways)
        if key not in rows or row["steady"]["allocated_bytes"] < rows[key]["steady"]["allocated_bytes"]:
            rows[key] = row
    return [row for row in rows.values() if row["experiment"]["kind"] not in ("compiled", "flex", "torchao_optimizer")]


@pytest.mark.slow
@pytest.mark.parametrize("row", measured(), ids=lambda row: memory_experiments.name_of(row["experiment"]))
def test_a_measured_experiment_is_met(row):
    report = memory.predict(memory_experiments.experiment_of(row["experiment"]), card="h200", trace=False)
    delayed = any("record_stream" in note for note in report.notes)
    for step in ("first", "steady"):
        found, truth = getattr(report, step), row[step]
        assert found.allocated_bytes == pytest.approx(truth["allocated_bytes"], rel=0.005)
        if not delayed:
            assert found.requested_bytes == pytest.approx(truth["requested_bytes"], rel=0.002)
            assert found.reserved_bytes == pytest.approx(truth["reserved_bytes"], rel=0.16)


def linears(device, depth=4, width=1024):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth))).to(device)


# streams ---------------------------------------------------------------------------------------------------------


def test_streams_and_events_can_be_used_and_are_gone_afterwards():
    before = torch.cuda.Stream, torch.cuda.stream, torch.Tensor.record_stream

    def build(device):
        side = torch.cuda.Stream(device)
        x = torch.randn(1024, 1024, device=device)

        def step():
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                assert torch.cuda.current_stream() is side
                host = torch.empty(1024, 1024, pin_memory=True)
                host.copy_(x, non_blocking=True)
                x.record_stream(side)
                event = side.record_event()
            assert event.query() and torch.cuda.current_stream() is not side
            torch.cuda.current_stream().wait_event(event)
            event.synchronize()

        return step

    report = memory.predict(build)
    assert report.steady.requested_bytes == HELD + 4 * MiB  # the copy on the host is not counted
    assert any("record_stream" in note for note in report.notes)
    assert (torch.cuda.Stream, torch.cuda.stream, torch.Tensor.record_stream) == before


def test_each_stream_has_memory_of_its_own():
    """A block given back on one stream does not serve a request on another: the allocator's pools are per stream."""

    def build(device, apart):
        side = torch.cuda.Stream()

        def step():
            first = torch.empty(64 * MiB, dtype=torch.uint8, device=device)
            del first
            with torch.cuda.stream(side if apart else torch.cuda.current_stream()):
                torch.empty(64 * MiB, dtype=torch.uint8, device=device)

        return step

    together, apart = (memory.predict(lambda d, a=a: build(d, a)).steady for a in (False, True))
    assert apart.allocated_bytes == together.allocated_bytes
    assert apart.reserved_bytes == together.reserved_bytes + 64 * MiB


# torchao ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_an_optimizer_on_the_host_takes_states_off_the_card(gradients):

    def build(device, away):
        model, x = linears(device), torch.randn(4, 1024, device=device)
        if away:
            from torchao.optim import CPUOffloadOptimizer

            optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=gradients)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    here, away = (memory.predict(lambda d, a=a: build(d, a)) for a in (False, True))
    weights = 4 * 4 * MiB
    saved = 2 * weights + (2 * 4 * MiB if gradients else 0)
    assert here.steady.requested_bytes - away.steady.requested_bytes >= saved
    assert "optimizer state" not in away.held_by()
    if "torchao.optim.cpu_offload" in sys.modules:
        assert sys.modules["torchao.optim.cpu_offload"].get_available_devices()[-1] != "cuda"


# bitsandbytes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bitsandbytes_is_imported_by_the_experiment_alone():
    program = """
import sys, torch, labkit as lab

def build(device, eight):
    layer = torch.nn.Linear(1024, 1024, device=device)
    if eight:
        import bitsandbytes
    optimizer = (bitsandbytes.optim.Adam8bit if eight else torch.optim.Adam)(layer.parameters())
    x = torch.ones(8, 1024, device=device)
    def step():
        layer(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
    return step

plain = lab.memory.predict(lambda device: build(device, False), trace=False)
assert "bitsandbytes" not in sys.modules
eight = lab.memory.predict(lambda device: build(device, True), trace=False)
assert not eight.notes and eight.band_bytes is None, eight
again = lab.memory.predict(lambda device: build(device, True), trace=False)
assert again.first == eight.first and again.steady == eight.steady
print(plain.steady.allocated_bytes - eight.steady.allocated_bytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 6 * MiB  # two moments of a byte each, not of four


@pytest.mark.slow
def test_paged_states_do_not_count_and_the_report_says_so(recwarn):
    import bitsandbytes

    def build(device, name):
        model, x = linears(device), torch.randn(4, 1024, device=device)
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters())

        def step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain, paged = (memory.predict(lambda d, n=n: build(d, n)) for n in ("AdamW8bit", "PagedAdamW8bit"))
    assert plain.steady.requested_bytes - paged.steady.requested_bytes == 4 * 2 * MiB
    assert any("managed memory" in note for note in paged.notes) and not plain.notes
    assert not recwarn


@pytest.mark.slow
def test_quantised_layers_hold_their_bits_and_can_be_trained_through():
    import bitsandbytes

    width = 1024

    def build(device, bits):
        make = {8: bitsandbytes.nn.Linear8bitLt, 4: bitsandbytes.nn.Linear4bit}[bits]
        how = {"has_fp16_weights": False, "threshold": 6.0} if bits == 8 else {"compute_dtype": torch.float16}
        layers = [make(width, width, bias=False, **how) for _ in range(4)]
        for layer in layers:
            layer.weight.requires_grad_(False)
        model = torch.nn.Sequential(*layers).to(device)
        x = torch.randn(256, width, device=device, dtype=torch.float16, requires_grad=True)

        def step():
            model(x).sum().backward()
            x.grad = None

        return step

    eight, four = (memory.predict(lambda d, b=b: build(d, b)) for b in (8, 4))
    one = width * width
    assert 4 * one <= eight.held_by()["parameter"] < 4 * one * 1.02
    assert 2 * one <= four.held_by()["parameter"] < 2 * one * 1.02
    assert eight.steady.requested_bytes > HELD + 4 * one + 256 * width * (2 + 4)  # the int32 sums of the product
    assert any("outliers" in note for note in eight.notes)


# on a card's own dispatcher ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "amp-bf16", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cudas_dispatcher_leads_to_the_same_peaks(precision, attention):
    """Tensors without data on the device cuda:0: PyTorch itself chooses operators and casts there."""
    recipe = Recipe.of(batch=2, seq=256, precision=precision, attention=attention, checkpoint=1)
    here = memory.predict(recipe.experiment(), card="h200")
    there = memory.predict(recipe.experiment(), card="h200", on_fake_cuda=True)
    assert (here.first, here.steady) == (there.first, there.steady)
    assert torch.cuda.memory_allocated() < GiB  # nothing of it was really made


def test_the_check_on_cuda_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a GPU"):
        memory.predict(Recipe.of(batch=1, seq=32).experiment(), on_fake_cuda=True)


def test_a_tensor_of_pythons_values_lands_where_it_would_on_a_card():
    places = []

    def experiment(device):
        places.append(torch.tensor([1.0]).device.index)
        with torch.device("cpu"):  # a context without an index: PyTorch makes a tensor to find out which it is
            places.append(torch.tensor([1.0]).device.index)
        with device:
            places.append(torch.tensor([1.0]).device.index)
        places.append(torch.tensor([1.0], device=device).device.index)
        model = lab.models.gpt2("gpt2", n_layer=1).to(device)  # built on the host, then moved
        tokens = torch.zeros(1, 8, dtype=torch.long, device=device)
        return lambda: model(input_ids=tokens).logits.sum()

    report = lab.measure(experiment, repeats=0, trace=False)
    assert report.ok and places == [None, None, 0, 0]
