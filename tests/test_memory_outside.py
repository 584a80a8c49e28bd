"""What an experiment does beside its own operators: threads, and state that would outlive a prediction."""

import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit import memory
from labkit.memory import PredictionError

ROOT = Path(__file__).resolve().parents[1]


def small(device):
    model = torch.nn.Linear(64, 64).to(device)
    x = torch.randn(4, 64, device=device)
    return lambda: model(x).sum().backward()


def test_an_operator_in_another_thread_is_refused():
    def build(device):
        model = torch.nn.Linear(512, 8).to(device)

        def step():
            work = threading.Thread(target=lambda: model(torch.randn(4, 512, device=device)).sum().backward())
            work.start()
            work.join()

        return step

    start = threading.Thread.start
    with pytest.raises(PredictionError, match="another thread"):
        memory.predict(build)
    assert threading.Thread.start is start


def test_work_for_a_pool_is_refused_and_host_tensors_are_not():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def on_the_gpu(device):
            x = torch.randn(8, device=device)
            return lambda: pool.submit(lambda: x * 2).exception()

        def on_the_host(device):
            return lambda: pool.submit(lambda: torch.ones(3).sum().item()).result()

        with pytest.raises(PredictionError, match="another thread"):
            memory.predict(on_the_gpu)
        assert memory.predict(on_the_host).ok


def test_two_predictions_at_once_wait_for_each_other():
    expected = memory.predict(small).steady
    with ThreadPoolExecutor(2) as pool:
        assert [r.steady for r in pool.map(memory.predict, [small] * 4)] == [expected] * 4


def test_autocast_left_on_ends_with_the_prediction():
    def build(device):
        torch.autocast("cuda", dtype=torch.float16, cache_enabled=False).__enter__()
        raise KeyError

    def state():
        kinds = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
        depth = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
        return kinds, torch.is_autocast_cache_enabled(), depth

    before = state()
    with pytest.raises(KeyError):
        memory.predict(build)
    assert state() == before


def test_default_device_and_numpy_are_as_they_were():
    def build(device):
        torch.set_default_device(device)
        np.random.rand(3)
        return small(device)

    state = np.random.get_state()[1].tolist(), np.random.get_state()[2]
    memory.predict(build)
    assert torch.get_default_device() == torch.device("cpu") and torch.ones(2).tolist() == [1.0, 1.0]
    assert torch.ones(2).get_device() == -1
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == state


def test_a_default_device_takes_in_every_constructor_after_the_first_prediction():
    """PyTorch remembers its constructors at the first use of a device as a context: not those of a prediction."""
    code = """
import torch
from labkit import memory

def build(device):
    with device:
        x = torch.tensor([1.0, 2.0])
        assert x.get_device() == 0 and torch.ones(2).get_device() == 0
    return lambda: x * 2

memory.predict(build)
with torch.device("meta"):
    assert torch.tensor([1.0]).is_meta and torch.ones(1).is_meta and torch.arange(3).is_meta
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-500:]


def test_an_optimizer_from_outside_gets_its_states_back():
    model = torch.nn.Linear(8, 8)
    fresh, used = (torch.optim.AdamW(model.parameters(), lr=0.0) for _ in range(2))
    model(torch.ones(1, 8)).sum().backward()
    used.step()
    used.zero_grad()
    states = {id(p): {k: v.clone() for k, v in s.items()} for p, s in used.state.items()}

    def build(device):
        moved, x = model.to(device), torch.randn(1, 8, device=device)

        def step():
            moved(x).sum().backward()
            fresh.step()

        return step

    assert memory.predict(build).ok
    assert not fresh.state
    model(torch.ones(1, 8)).sum().backward()
    fresh.step()
    assert all(p.isfinite().all() for p in model.parameters())

    def on_the_host(device):
        def step():
            model(torch.ones(1, 8)).sum().backward()
            used.step()  # counts its steps on the host

        return step

    memory.predict(on_the_host)
    for p, state in used.state.items():
        assert torch.equal(state["step"], states[id(p)]["step"])


# host tensors where tensors of the GPU are expected --------------------------------------------------------------


def test_a_tensor_left_on_the_host_is_refused_by_name():
    def batch(device):
        model = torch.nn.Linear(512, 8).to(device)
        return lambda: model(torch.randn(4, 512)).sum().backward()

    def whole_model(device):
        model = torch.nn.Linear(512, 8)
        return lambda: model(torch.randn(4, 512, device=device)).sum().backward()

    def in_place(device):
        return lambda: torch.zeros(4, device=device).add_(torch.ones(4))

    for build, name in ((batch, "addmm"), (whole_model, "addmm"), (in_place, "add_")):
        with pytest.raises(PredictionError, match=f"same device.*{name}"):
            memory.predict(build)


def test_what_cuda_takes_from_the_host_is_accepted():
    def build(device):
        x = torch.randn(4, 8, device=device)

        def step():
            x.copy_(torch.ones(4, 8))
            x[torch.tensor([0, 2])] = 1.0
            return (x[torch.tensor([1, 3])] * torch.tensor(2.0)).sum() + x.cpu().to(device).sum()

        return step

    assert memory.predict(build).ok


# operators without a rule ----------------------------------------------------------------------------------------


def test_grouped_and_sparse_operators_fail_with_their_names():
    def grouped(device):
        weight, x = torch.randn(4, 16, 32, device=device), torch.randn(64, 16, device=device)
        ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device=device)
        return lambda: torch._grouped_mm(x, weight, offs=ends)

    def sparse(device):
        table = torch.nn.Embedding(100, 16, sparse=True).to(device)
        return lambda: table(torch.zeros(4, dtype=torch.long, device=device)).sum().backward()

    for build, name in ((grouped, "_grouped_mm"), (sparse, "sparse")):
        with pytest.raises(PredictionError, match=f"operator aten.*{name}"):
            memory.predict(build)


# values ----------------------------------------------------------------------------------------------------------


def test_random_integers_are_legal_indices_and_said_to_be_assumed():
    shapes = []

    def build(device):
        data = torch.randint(0, 5000, (10000,), device=device)

        def step():
            starts = torch.randint(len(data) - 128, (4,), device=device)
            shapes.append(torch.stack([data[i : i + 128] for i in starts]).shape)
            shapes.append(torch.zeros(int(torch.randint(3, 9, (), device=device))).shape)

        return step

    report = memory.predict(build)
    assert shapes[:2] == [(4, 128), (3,)]
    assert any(".item()" in note for note in report.notes)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_everything_is_finite(size):
    def build(device):
        y = torch.randn(size, 2, device=device)

        def step():
            assert torch.isfinite(y).all() and y.view(-1).isfinite().all() and torch.isfinite(y.sum())
            assert not (~torch.isfinite(y)).any() and not torch.isnan(y).any()

        return step

    assert any(".item()" in note for note in memory.predict(build).notes)


def test_lists_of_bfloat16_and_saving():
    lists = []

    def build(device):
        y = torch.randn(2, dtype=torch.bfloat16, device=device)

        def step():
            lists.append((y.tolist(), torch.ones(1, dtype=torch.bfloat16).tolist()))

        return step

    assert memory.predict(build).ok and lists[0] == ([0.0, 0.0], [1.0])
    with pytest.raises(PredictionError, match=r"torch\.save"):
        memory.predict(lambda device: lambda: torch.save(torch.ones(2, device=device), io.BytesIO()))


def test_recurrent_layers_are_noted_or_refused():
    def experiment(kind, device):
        layer, x = kind(16, 32, batch_first=True).to(device), torch.randn(2, 3, 16, device=device)
        return lambda: layer(x)[0].sum().backward()

    assert any("LSTM" in note for note in memory.predict(lambda d: experiment(torch.nn.LSTM, d)).notes)
    for kind, name in ((torch.nn.GRU, "gru"), (torch.nn.RNN, "rnn_tanh")):
        with pytest.raises(PredictionError, match=name):
            memory.predict(lambda d, kind=kind: experiment(kind, d))
        assert kind(16, 32)(torch.ones(3, 16))[0].isfinite().all()


def test_an_error_says_that_it_comes_from_a_prediction():
    def build(device):
        raise RuntimeError("Tried to instantiate dummy base class Event")

    with pytest.raises(RuntimeError, match="dummy base class Event") as caught:
        memory.predict(build)
    if sys.version_info >= (3, 11):  # before, exceptions take no notes and the error passes as it is
        assert "prediction" in caught.value.__notes__[0]
