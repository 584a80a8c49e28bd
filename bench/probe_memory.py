"""What a real GPU allocates, event by event: the material from which the predictor's constants were taken.

``python bench/probe_memory.py recipes OUT.json.gz`` runs a few recipes, each in a fresh process: the allocator's whole
event stream from the build to the fourth step, and the operators of a fifth step with the allocations inside each.
``python bench/probe_memory.py operators OUT.json.gz`` does the same for single operators over many sizes.
"""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# ruff: noqa: B023  (each closure is called before its loop goes on)

RECIPES = [
    {},
    {"precision": "amp-bf16"},
    {"precision": "amp-fp16", "attention": "eager", "optimizer": "adamw-fused"},
    {"precision": "bf16", "checkpoint": 1, "optimizer": "adamw-forloop", "loss": "chunked"},
    {"model": "gpt2-medium", "attention": "eager", "optimizer": "sgd-momentum", "checkpoint": 2, "seq": 512},
    {"model": "gpt2-xl", "batch": 2, "seq": 512, "precision": "amp-bf16", "optimizer": "adam8bit", "loss": "chunked",
     "checkpoint": 3},
    {"precision": "bf16", "attention": "eager", "optimizer": "adam8bit", "accumulation": 2, "batch": 4},
    {"batch": 3, "seq": 200, "dropout": 0.0, "activation": "gelu_pytorch_tanh", "optimizer": "sgd"},
    {"precision": "amp-bf16", "attention": "eager", "checkpoint": 1, "accumulation": 2, "dropout": 0.0, "batch": 4},
    {"model": "gpt2-large", "batch": 1, "seq": 333, "precision": "amp-fp16", "loss": "chunked",
     "activation": "gelu_pytorch_tanh"},
    {"precision": "amp-fp16", "checkpoint": 4, "accumulation": 4, "optimizer": "adam8bit", "batch": 2},
    {"model": "gpt2-medium", "batch": 32, "seq": 64, "precision": "bf16", "attention": "eager", "optimizer": "sgd"},
    {"batch": 5, "seq": 777, "precision": "bf16", "dropout": 0.0, "optimizer": "adamw-fused"},
    {"seq": 128, "attention": "eager", "loss": "chunked", "accumulation": 2},
    {"batch": 1, "seq": 97, "precision": "amp-bf16", "dropout": 0.0, "optimizer": "adam8bit"},
]  # fmt: skip


def warm(torch):
    """Both threads' cuBLAS handles and workspaces, in the two kinds of product that training uses."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()
    torch.cuda.synchronize()


def trace(torch):
    """The allocator's events since recording began: (action, size, address)."""
    snapshot = torch.cuda.memory._snapshot()
    names = {}
    events = []
    for e in snapshot["device_traces"][0]:
        events.append([names.setdefault(e["action"], len(names)), e["size"], e["addr"]])
    return {"actions": list(names), "events": events}


def peaks(torch):
    stats = torch.cuda.memory_stats()
    return {k: stats[f"{k}_bytes.all.peak"] for k in ("allocated", "requested", "reserved")}


def one_recipe(fields: dict) -> dict:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from labkit.recipes import Recipe

    recipe = Recipe.of(**fields)
    torch.cuda.init()
    warm(torch)
    import gc

    gc.collect()
    base = {k: v for k, v in torch.cuda.memory_stats().items() if k.endswith("_bytes.all.current")}
    base_segments = [[s["total_size"], s["segment_type"], [[b["size"], b["state"]] for b in s["blocks"]]]
                     for s in torch.cuda.memory._snapshot()["segments"]]  # fmt: skip
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=5_000_000)
    step = recipe.experiment()(torch.device("cuda"))
    marks, steps = [len(trace(torch)["events"])], []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        steps.append(peaks(torch))
        marks.append(len(trace(torch)["events"]))
    stream = trace(torch)
    operators = []

    def stats():
        s = torch.cuda.memory_stats()
        return s["allocation.all.allocated"], s["allocation.all.freed"]

    def brief(value):
        if isinstance(value, torch.Tensor):
            return [str(value.dtype)[6:], list(value.shape), value.device.type]
        if isinstance(value, (list, tuple)):
            return [brief(v) for v in value][:8]
        return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = stats()
            out = func(*args, **(kwargs or {}))
            after = stats()
            operators.append([str(func), brief(list(args)), {k: brief(v) for k, v in (kwargs or {}).items()},
                              brief(out), before, after])  # fmt: skip
            return out

    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=5_000_000, clear_history=True)
    origin = stats()
    with Log():
        step()
    traced = trace(torch)
    return {
        "recipe": recipe.to_dict(), "base": base, "base_segments": base_segments, "marks": marks, "steps": steps,
        "stream": stream, "traced_origin": origin, "traced": traced, "operators": operators,
        "versions": {"torch": torch.__version__, "card": torch.cuda.get_device_name()},
    }  # fmt: skip


def operators() -> list[dict]:
    """Allocations inside single operators."""
    import itertools

    import torch
    import torch.nn.functional as F

    torch.cuda.init()
    warm(torch)
    aten = torch.ops.aten
    rows = []
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    def probe(name, params, make, call):
        try:
            args = make()
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000, clear_history=True)
            out = call(*args)
            events = trace(torch)
            del out
            ids: dict[int, int] = {}
            rows.append(
                {
                    "name": name,
                    **params,
                    "events": [
                        [events["actions"][a], size, ids.setdefault(addr, len(ids))]
                        for a, size, addr in events["events"]
                    ],
                }
            )
        except Exception as error:
            rows.append({"name": name, **params, "error": f"{type(error).__name__}: {error}"[:300]})

    def rand(*shape, dtype=torch.float32, grad=False):
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)

    rows_of = (63, 200, 512, 1000, 2048, 4096, 8192, 16384, 32768)
    widths = (768, 1024, 1280, 1600, 2304, 3072, 4800, 6400)
    for (label, dt), n, c in itertools.product(dtypes.items(), rows_of, widths):
        probe(
            "sum0",
            {"dtype": label, "n": n, "c": c},
            lambda: (rand(n, c, dtype=dt),),
            lambda x: x.sum([0], keepdim=True),
        )
    for (label, dt), n, c in itertools.product(dtypes.items(), rows_of, widths[:4]):

        def make():
            x, w, b = rand(n, c, dtype=dt), rand(c, dtype=dt), rand(c, dtype=dt)
            y, mean, rstd = aten.native_layer_norm(x, [c], w, b, 1e-5)
            return y, x, [c], mean, rstd, w, b, [True] * 3

        probe("layer_norm_backward", {"dtype": label, "n": n, "c": c}, make, aten.native_layer_norm_backward)
        probe(
            "layer_norm",
            {"dtype": label, "n": n, "c": c},
            lambda: (rand(n, c, dtype=dt), [c], rand(c, dtype=dt), rand(c, dtype=dt), 1e-5),
            aten.native_layer_norm,
        )
    for (label, dt), n in itertools.product(
        dtypes.items(), (1, 64, 97, 256, 768, 1000, 1024, 2048, 3072, 3073, 4096, 8192, 16384, 32768, 65536)
    ):
        for vocab, c in ((50257, 768), (1024, 768), (50257, 1600)):
            probe(
                "embedding_backward",
                {"dtype": label, "n": n, "vocab": vocab, "c": c},
                lambda: (rand(n, c, dtype=dt), torch.randint(0, vocab, (n,), device="cuda"), vocab, -1, False),
                aten.embedding_dense_backward,
            )

    def attention(label, dt, b, h, s, d, p, causal, mask, backend="default"):
        if backend != "default":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            chosen = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}[backend]
            with sdpa_kernel(chosen):
                return attention(label, dt, b, h, s, d, p, causal, f"{mask} {backend}")

        def make():
            qkv = [rand(b, s, h, d, dtype=dt).transpose(1, 2).requires_grad_() for _ in range(3)]
            m = torch.ones(b, 1, s, s, dtype=torch.bool, device="cuda").tril() if "bool" in mask else None
            return qkv, m

        def forward(qkv, m):
            return F.scaled_dot_product_attention(*qkv, attn_mask=m, dropout_p=p, is_causal=causal)

        def make_backward():
            qkv, m = make()
            y = forward(qkv, m)
            return qkv, y, torch.randn_like(y)

        params = {"dtype": label, "b": b, "h": h, "s": s, "d": d, "p": p, "causal": causal, "mask": mask}
        try:
            qkv, m = make()
            y = forward(qkv, m)
            params["node"] = type(y.grad_fn).__name__
            params["choice"] = torch._fused_sdp_choice(*qkv, attn_mask=m, dropout_p=p, is_causal=causal)
            params["stride"] = list(y.stride())
            del qkv, m, y
        except Exception as error:
            params["error0"] = str(error)[:200]
        probe("sdpa", params, make, forward)
        probe("sdpa_backward", params, make_backward, lambda qkv, y, g: torch.autograd.grad(y, qkv, g))

    for label, dt in dtypes.items():
        for b, h, s, d in (
            (8, 12, 1024, 64),
            (1, 12, 97, 64),
            (3, 12, 200, 64),
            (2, 25, 512, 64),
            (5, 20, 777, 64),
            (16, 16, 64, 64),
            (1, 25, 1024, 64),
            (2, 9, 300, 96),
            (2, 8, 256, 128),
            (1, 8, 512, 80),
            (1, 4, 300, 256),
        ):
            for p in (0.0, 0.1):
                attention(label, dt, b, h, s, d, p, True, "none")
                if label != "fp32":
                    attention(label, dt, b, h, s, d, p, True, "none", "flash")
                    attention(label, dt, b, h, s, d, p, True, "none", "efficient")
        attention(label, dt, 2, 12, 200, 64, 0.1, False, "bool")
        attention(label, dt, 2, 12, 200, 64, 0.0, False, "bool")
        attention(label, dt, 2, 12, 256, 64, 0.0, False, "none")
    for (label, dt), n, (k, m) in itertools.product(
        dtypes.items(),
        (97, 1024, 8192),
        ((768, 2304), (768, 768), (768, 3072), (3072, 768), (1600, 4800), (768, 50257)),
    ):
        probe(
            "addmm",
            {"dtype": label, "n": n, "k": k, "m": m},
            lambda: (rand(m, dtype=dt), rand(n, k, dtype=dt), rand(k, m, dtype=dt)),
            torch.addmm,
        )
        probe(
            "mm",
            {"dtype": label, "n": n, "k": k, "m": m},
            lambda: (rand(n, k, dtype=dt), rand(k, m, dtype=dt)),
            torch.mm,
        )
        probe(
            "mm_t",
            {"dtype": label, "n": n, "k": k, "m": m},
            lambda: (rand(n, k, dtype=dt), rand(n, m, dtype=dt)),
            lambda a, b: a.t().mm(b),
        )
        probe(
            "linear",
            {"dtype": label, "n": n, "k": k, "m": m},
            lambda: (rand(n, k, dtype=dt), rand(m, k, dtype=dt), rand(m, dtype=dt)),
            F.linear,
        )
    for label, dt in dtypes.items():
        for n in (10, 100_000, 10_000_000, 38_597_376):
            probe("sum_all", {"dtype": label, "n": n}, lambda: (rand(n, dtype=dt),), torch.sum)
            probe("norm_all", {"dtype": label, "n": n}, lambda: (rand(n, dtype=dt),), torch.linalg.vector_norm)
        for n in (97, 1016, 8184):
            probe("log_softmax", {"dtype": label, "n": n}, lambda: (rand(n, 50257, dtype=dt), -1), torch.log_softmax)
            probe(
                "cross_entropy",
                {"dtype": label, "n": n},
                lambda: (rand(n, 50257, dtype=dt), torch.randint(0, 50257, (n,), device="cuda")),
                F.cross_entropy,
            )
            probe(
                "log_softmax_backward",
                {"dtype": label, "n": n},
                lambda: (rand(n, 50257, dtype=dt), rand(n, 50257, dtype=dt), 1, dt),
                aten._log_softmax_backward_data,
            )
        probe("softmax", {"dtype": label}, lambda: (rand(2, 12, 512, 512, dtype=dt), -1, torch.float32), torch.softmax)
        probe(
            "native_dropout", {"dtype": label}, lambda: (rand(8, 1024, 768, dtype=dt), 0.1, True), aten.native_dropout
        )
        probe(
            "clip",
            {"dtype": label},
            lambda: ([rand(s, s, dtype=dt) for s in (10, 100, 1000)],),
            lambda x: torch._foreach_norm(x),
        )
        probe("cumsum", {"dtype": label}, lambda: (rand(8, 1024, dtype=dt), -1), torch.cumsum)
        probe(
            "index_put",
            {"dtype": label},
            lambda: (
                rand(1000, 64, dtype=dt),
                [torch.randint(0, 1000, (512,), device="cuda")],
                rand(512, 64, dtype=dt),
                True,
            ),
            aten.index_put,
        )
        probe(
            "index_add",
            {"dtype": label},
            lambda: (
                rand(1000, 64, dtype=dt),
                0,
                torch.randint(0, 1000, (512,), device="cuda"),
                rand(512, 64, dtype=dt),
            ),
            torch.index_add,
        )
        probe("bmm", {"dtype": label}, lambda: (rand(96, 512, 64, dtype=dt), rand(96, 64, 512, dtype=dt)), torch.bmm)
        probe(
            "baddbmm",
            {"dtype": label},
            lambda: (rand(96, 512, 512, dtype=dt), rand(96, 512, 64, dtype=dt), rand(96, 64, 512, dtype=dt)),
            torch.baddbmm,
        )
    probe("topk", {}, lambda: (rand(8, 50257), 50), torch.topk)
    probe("sort", {}, lambda: (rand(8, 50257),), torch.sort)
    probe("multinomial", {}, lambda: (rand(8, 50257).softmax(-1), 1), torch.multinomial)
    probe("all", {}, lambda: (torch.ones(8, 1024, dtype=torch.bool, device="cuda"),), torch.all)
    probe("nonzero", {}, lambda: (torch.ones(8, 1024, dtype=torch.bool, device="cuda"),), torch.nonzero)
    return rows


def write(path: str, value) -> None:
    with gzip.open(path, "wt", compresslevel=9) as stream:
        json.dump(value, stream, separators=(",", ":"))


def main(mode: str, out: str, index: str = "") -> None:
    if mode == "operators":
        write(out, operators())
    elif mode == "one":
        write(out, one_recipe(RECIPES[int(index)]))
    else:
        with tempfile.TemporaryDirectory() as folder:

            def run(i: int):
                file = f"{folder}/{i}.json.gz"
                done = subprocess.run([sys.executable, __file__, "one", file, str(i)], capture_output=True, text=True)
                if done.returncode:
                    return {"recipe": RECIPES[i], "error": done.stderr[-1500:]}
                with gzip.open(file, "rt") as stream:
                    return json.load(stream)

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                write(out, list(pool.map(run, range(len(RECIPES)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
