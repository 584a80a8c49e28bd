"""What kernels allocate by themselves, against the allocator's history of every single operator on an H200."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from labkit.memory.kernels import chip, plan

FILE = Path(__file__).resolve().parents[1] / "data/reference/kernels-h200.json.gz"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
aten = torch.ops.aten


@pytest.fixture(scope="module")
def rows():
    import torch._meta_registrations  # noqa: F401  shapes of operators that have no meta kernel in C++

    with gzip.open(FILE, "rt") as stream:
        return [row for row in json.load(stream) if "events" in row]


def meta(*size, dtype=torch.float32):
    return torch.empty(*size, dtype=dtype, device="meta")


def measured(row, events=10**9):
    """Births (positive) and deaths (negative) in bytes."""
    return [
        size if action == "alloc" else -size
        for action, size, _ in row["events"]
        if action in ("alloc", "free_requested")
    ][:events]


def planned(func, *args):
    out = func(*args)
    outs = out if isinstance(out, (tuple, list)) else (out,)
    steps = plan(func, args, {}, out, chip("h200", (9, 0)))
    if steps is None:
        return [t.numel() * t.dtype.itemsize for t in outs if isinstance(t, torch.Tensor)]
    found, taken = [], []
    for kind, *rest in steps:
        if kind == "out":
            found.append(outs[rest[0]].numel() * outs[rest[0]].dtype.itemsize)
        elif kind == "take":
            taken.append(rest[0])
            found.append(rest[0])
        elif kind == "give":
            found.append(-taken[rest[0]])
    return found


def of(rows, name):
    found = [row for row in rows if row["name"] == name]
    assert len(found) >= 12
    return [(row, DTYPES[row["dtype"]]) for row in found]


def test_sums_over_rows(rows):
    split = 0
    for row, dtype in of(rows, "sum0"):
        found = planned(aten.sum.dim_IntList, meta(row["n"], row["c"], dtype=dtype), [0], True)
        assert found == measured(row), row
        split += len(found) > 1
    assert split > 50  # the cases in which a buffer is needed are among them


def test_whole_sums_and_norms(rows):
    for row, dtype in of(rows, "sum_all"):
        assert planned(aten.sum.default, meta(row["n"], dtype=dtype)) == measured(row), row
    for row, dtype in of(rows, "norm_all"):
        assert planned(aten.linalg_vector_norm.default, meta(row["n"], dtype=dtype)) == measured(row), row


def test_layer_norms_need_nothing_of_their_own(rows):
    for row, dtype in of(rows, "layer_norm_backward"):
        x, w, mean = meta(row["n"], row["c"], dtype=dtype), meta(row["c"], dtype=dtype), meta(row["n"], 1)
        args = (x, x, [row["c"]], mean, mean, w, w, [True] * 3)
        assert planned(aten.native_layer_norm_backward.default, *args) == measured(row), row


def test_embeddings_are_sorted_beyond_3072_tokens(rows):
    for row, dtype in of(rows, "embedding_backward"):
        args = (meta(row["n"], row["c"], dtype=dtype), meta(row["n"], dtype=torch.int64), row["vocab"], -1, False)
        found, true = planned(aten.embedding_dense_backward.default, *args), measured(row)
        assert len(found) == len(true), row
        assert max(abs(a - b) for a, b in zip(found, true, strict=True)) <= 1024, row  # what CUB takes is a fit


@pytest.mark.parametrize("kind", ["cudnn", "flash", "efficient"])
def test_attention(rows, kind):
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    seen = 0
    for name in ("sdpa", "sdpa_backward"):
        for row, dtype in of(rows, name):
            if kind not in row.get("node", "").lower() or "bool" in row["mask"]:
                continue
            seen += 1
            q, p, causal = (
                meta(row["b"], row["s"], row["h"], row["d"], dtype=dtype).transpose(1, 2),
                row["p"],
                row["causal"],
            )
            if kind == "cudnn":
                args = (q, q, q, None, True, p, causal, False)
            elif kind == "flash":
                args = (q, q, q, p, causal, False)
            else:
                args = (q, q, q, None, True, p, causal)
            if name == "sdpa":
                assert planned(forward, *args) == measured(row), row
                continue
            o = forward(*args)
            if kind == "cudnn":
                args = (q, q, q, q, o[0], o[1], o[6], o[7], None, o[2], o[3], o[4], o[5], p, causal)
            elif kind == "flash":
                args = (q, q, q, q, o[0], o[1], o[2], o[3], o[4], o[5], p, causal, o[6], o[7])
            else:
                args = (q, q, q, q, None, o[0], o[1], o[2], o[3], p, [True, True, True, False], causal)
            found = planned(backward, *args)
            assert found == measured(row, len(found)), row  # afterwards only what the forward kept is freed
    assert seen > 40
