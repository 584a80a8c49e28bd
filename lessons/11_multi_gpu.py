# ---
# jupyter:
#   labkit:
#     title: What does a second small card bring?
#     question: When do more cards make training faster, when do they make a model fit, and what do they send?
#     after: choose between copies, shards and layers, start such a job, and say what each card holds and sends
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget on each card
#     needs: [00_environment, 01_baseline_oom, 02_mixed_precision]
#     fetch: []
# ---

# %% name="begin"
# first, so that two more processes import what they need while this one does
from labkit import launching

ranks = launching.Ranks(
    2,
    imports=(
        "labkit.parallel",
        "transformers.models.gpt2.modeling_gpt2",
        "torch._dynamo",  # DDP imports it
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
    ),
)

import contextlib
import functools
import itertools
import json
import logging
import os
import re
import subprocess
import sys

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

import labkit as lab
from labkit import extras, measuring, parallel, quiet

quiet.transformers()  # imported now, silently

lesson = lab.begin("11_multi_gpu")
BUDGET = lesson.budget  # bytes that PyTorch may take from each card
cards = lesson.machine.cards
two, show, seconds = cards >= 2, lab.show_bytes, lab.show_seconds
capability = lesson.machine.capability or lab.machine.preset().capability
half = torch.bfloat16 if capability >= (8, 0) else torch.float16  # below sm_80 bf16 is emulated
GiB, MiB = 2**30, 2**20
if two:
    print("two processes run on two cards, through NCCL: their numbers are measured")
else:
    have = "one card" if cards else "no card"
    print(f"{have} here: two processes run on the processor, on a small model, through gloo.")
    print(
        "What they compute, hold and send is counted there; speeds of two cards are reference rows."
    )


def known(name, value, unit, what, **more):
    """A number that takes two cards: measured where they are, else the reference row, or None where there is none."""
    if two:
        return lab.fact(name, value, unit, what=what, cards=2, **more)
    rows = lab.reference(name, what=what)
    return rows[-1] if rows else {"value": None, "label": "no reference row", "capability": ""}


def told(number, how):
    """A number as `how` shows it, or a dash where there is none."""
    return "–" if number is None else how(number)


here = "measured" if two else "cpu"
there = "measured" if two else "reference"  # where speeds come from

# %% [markdown]
# ## Claims
#
# Seven sentences about training on several cards. This run fills in the empty columns, at the end of the lesson.
#
# Words that this lesson uses:
#
# | word | meaning |
# | --- | --- |
# | rank | the number of a process in a job; here each process has one card, so it is the card's number, too |
# | world size | how many processes the job has; W in formulas |
# | collective | an operation in which all ranks take part, and in which each waits for all others |
# | all-reduce | every rank gives a tensor, every rank gets their sum |
# | all-gather | every rank gives a part, every rank gets the whole |
# | reduce-scatter | every rank gives a whole tensor, every rank gets its part of the sum |
# | NCCL, gloo | the libraries that carry collectives: NVIDIA's between cards, and one between processors |
# | DDP | `DistributedDataParallel`: a copy of the model in each rank, another part of the batch for each |
# | bucket | a piece of flat memory in which DDP collects gradients, to average many with one all-reduce |
# | shard | a rank's part of a tensor that is cut into W parts |
# | FSDP2 | `fully_shard`: weights, gradients and optimizer state are shards, put together only while they are used |
# | ZeRO | the paper behind it (Rajbhandari et al., 2020); stages 1, 2, 3 shard state, gradients, weights |
# | pipeline | a model cut by layers, a part on each card; *micro-batches* keep the parts busy at the same time |
# | scaling efficiency | the throughput of W cards, divided by W times that of one |

# %% name="claims"
lab.claim("twice", "Two cards train twice as fast.", said_by="blog posts")
lab.claim(
    "same",
    "DDP computes the gradients of one process with the whole batch.",
    said_by="documentation, PyTorch",
)
lab.claim(
    "views",
    "gradient_as_bucket_view=True saves as much memory as the gradients take.",
    said_by="documentation, PyTorch",
)
lab.claim(
    "dataparallel",
    "DataParallel is enough in one machine; DDP is for clusters.",
    said_by="forum answers",
)
lab.claim("shards", "FSDP on W cards needs 1/W of the memory on each.", said_by="blog posts")
lab.claim(
    "traffic", "Sharding everything sends 1.5 times as much as DDP.", said_by="paper, ZeRO"
)
lab.claim(
    "layers",
    "device_map spreads a model over two cards, so both of them compute.",
    said_by="forum answers",
)
lab.claims()

# %% [markdown]
# ## Experiment
#
# ### Two processes
#
# PyTorch trains on several cards with one process for each. A launcher starts them, all with the same program, and
# tells each its rank; a collective is how they meet. `launching.Ranks` above did that for this notebook: it called
# `torchrun --nproc-per-node=2`, and its processes wait for functions. `parallel.join` is
# `dist.init_process_group("nccl")` where each rank has a card of its own, and `"gloo"` on the processor.


# %% name="hello"
def hello():
    place = parallel.join()
    mine = torch.tensor([10.0 + place.rank], device=place.device)
    given = mine.item()
    dist.all_reduce(mine)  # every rank gives its number, and gets the sum
    found = {"backend": place.backend, "device": str(place.device), "process": os.getpid()}
    return {**found, "gave": given, "got": mine.item()}


rows = ranks.run(hello)
lab.table(
    ["rank", "process", "backend", "device", "gave", "got"],
    [
        [str(r["rank"]), str(r["process"]), r["backend"], r["device"], r["gave"], r["got"]]
        for r in rows
    ],
)

# %% [markdown]
# ### Starting a job of your own
#
# A training script runs unchanged under two launchers. `torchrun` needs nothing but PyTorch:
#
# ```
# torchrun --standalone --nproc-per-node=2 train.py
# ```
#
# `accelerate launch` reads a file (`accelerate config` asks questions and writes it; here the cell does), and the
# script's `Accelerator` wraps model, optimizer and loader as that file says. The cell writes both and starts the job;
# a later cell reads what it said. `main_process_port: 0` takes a free port, so that two jobs do not collide on 29500.

# %% name="launch"
configuration = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",  # DDP
    "num_machines": 1,
    "num_processes": 2,
    "main_process_port": 0,
    "mixed_precision": "no",
    "use_cpu": False,
}
script = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
data = torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x in data:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
rank, world = accelerator.process_index, accelerator.num_processes
print(f"rank {rank} of {world}: {type(model).__name__}, {accelerator.device}, {len(data)} batches", flush=True)
"""
lesson.folder.mkdir(parents=True, exist_ok=True)
program, settings = lesson.folder / "11_train.py", lesson.folder / "11_two_cards.yaml"
program.write_text(script)
settings.write_text(yaml.safe_dump(configuration, sort_keys=False))
# Without a card accelerate's processes do not find each other, unless they are told to use the processor.
processor = {} if two else {"ACCELERATE_USE_CPU": "true"}
launched = subprocess.Popen(
    [sys.executable, "-m", "accelerate.commands.launch", "--config_file", settings, program],
    env=launching.environment(2, processor),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
)
print(f"accelerate launch --config_file {settings.name} {program.name}\n")
print(settings.read_text())

# %% [markdown]
# ### Copies: what DDP holds and sends
#
# Every rank has the whole model and its own part of the batch. While backward runs, DDP collects gradients in buckets
# (25 MiB each, the first one 1 MiB) and starts an all-reduce for each bucket as soon as it is full. So it sends while
# backward still computes. After that all ranks have the mean of the gradients, and each takes the same optimizer step.
#
# By default a gradient exists twice: as `parameter.grad`, and as a part of a bucket. With
# `gradient_as_bucket_view=True` the gradient *is* that part of the bucket.

# %% name="guess-sent"
lab.guess(
    "sent",
    None,
    "GPT-2 124M in fp32, DDP, 2 ranks: how many MiB does each rank send in one step?",
    unit="MiB",
)
lab.guess("third", None, "FSDP2 instead: how many times the bytes that DDP sends?", unit="x")

# %% [markdown]
# The cell trains a model in four ways and counts in each rank: what the rank holds when the optimizer has just stepped
# and gradients are still there, and what goes through collectives in one step. `fully_shard` is called on every block
# and then on the whole model: each call makes a group whose weights are gathered together.


# %% name="ways"
WAYS = ("one process", "DDP", "DDP, bucket views", "FSDP2")
SMALL = {} if two else {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 512}
SMALL |= {} if two else {"n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}


def network(place, size="gpt2", **fields):
    """The same weights in every rank, and no dropout, so that two ways can be compared."""
    torch.manual_seed(0)
    fields = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **fields}
    with place.device:
        model = lab.models.gpt2(
            size, attention="sdpa", activation_function="gelu_pytorch_tanh", **fields
        )
    return model.train()


def parallelised(model, way, place):
    """The model as this way trains it."""
    if way.startswith("DDP"):
        where = [place.device] if place.device.type == "cuda" else None
        return DDP(model, device_ids=where, gradient_as_bucket_view=way.endswith("views"))
    if way == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(place.device.type, (place.world,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def counted(way):
    """What one rank holds and sends in a step, 2 x 64 tokens in each rank."""
    place = parallel.join()
    model = parallelised(network(place, **SMALL), way, place)
    buckets = parallel.Buckets(model) if way.startswith("DDP") else None
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, model_vocabulary(model), (2, 64), device=place.device)
    for step in range(3):  # DDP arranges its buckets anew after the first step
        with parallel.Traffic() if step == 2 else contextlib.nullcontext() as traffic:
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        held = parallel.held(model, optimizer, buckets)
        optimizer.zero_grad(set_to_none=True)
    sizes = buckets.sizes if buckets else []
    return {"held": held, "buckets": sizes, **traffic.row(place.world)}


def model_vocabulary(model):
    return getattr(model, "module", model).config.vocab_size


counts = {way: ranks.run(counted, way=way, timeout=120)[0] for way in WAYS}
parameters = counts["one process"]["held"]["weights"] // 4
if two:
    measuring.release()
print(f"{parameters:,} parameters in fp32; rank 0 of 2, {here}\n")
terms = ["weights", "gradients", "optimizer state", "buckets"]
rows = []
for way, found in counts.items():
    each = [found["held"][term] / parameters for term in terms]
    sent = {
        "all-reduce": "all_reduce",
        "all-gather": "all_gather",
        "reduce-scatter": "reduce_scatter",
    }
    calls = ", ".join(
        f"{found['calls'][k]} {n}" for n, k in sent.items() if k in found["calls"]
    )
    rows.append(
        [
            way,
            *(f"{e:.2f}" for e in each),
            f"{sum(each):.2f}",
            calls or "none",
            show(found["link_bytes"]),
        ]
    )
    lab.fact(
        "held", sum(found["held"].values()) / parameters, "B/parameter", what=way, source=here
    )
    lab.fact("sent", found["link_bytes"] / parameters, "B/parameter", what=way, source=here)
lab.table(["bytes a parameter", *terms, "sum", "collectives in a step", "sent by a rank"], rows)
sizes = counts["DDP"]["buckets"]
print(
    f"DDP's buckets, in the order in which they were full: {', '.join(show(size) for size in sizes)}"
)

# %% [markdown]
# *What to read:* AdamW in fp32 takes 16 bytes a parameter, as in lesson 01. Plain DDP has 4 more, for its buckets.
# With views those 4 are gone: the gradients *are* the buckets. FSDP2 holds half of everything.
#
# *Sent* is by the ring algorithm, which moves the fewest bytes. Let S be the bytes of all gradients. An all-gather, and
# a reduce-scatter as well, makes each rank send (W - 1) / W of S; an all-reduce is one of each.

# %% name="settle-traffic"
gradient_bytes = 4 * parameters
link = {way: counts[way]["link_bytes"] for way in WAYS}
ratio = link["FSDP2"] / link["DDP"]
full = 4 * 124_439_808  # GPT-2 124M in fp32
lab.answer(
    "sent",
    measured=link["DDP"] / gradient_bytes * full / MiB,
    formula=2 * (2 - 1) / 2 * full / MiB,
    source=here,
    note="2 (W - 1) / W times the gradients; counted on the model above, by parameter.",
)
layers = 12 if two else SMALL["n_layer"]
again = counts["FSDP2"]["calls"]["all_gather"] - layers - 1
with torch.device("meta"):
    big = lab.models.gpt2("gpt2")
blocks = sum(p.numel() for block in lab.models.blocks(big) for p in block.parameters())
outside = 1 - blocks / sum(
    p.numel() for p in big.parameters()
)  # the group that stays whole in between
at_124 = ratio if two else (1 + (1 - outside) + 1) / 2
lab.answer(
    "third",
    measured=at_124,
    formula=1.5,
    source=here,
    note=f"Weights are gathered for forward, {again} of {layers + 1} groups again for backward, and gradients are "
    f"scattered. The group of the embeddings, {outside:.0%} of GPT-2 124M, stays whole in between, which is why it is "
    "less. (The calls are counted; without two cards on the small model, its own ratio "
    f"{ratio:.2f}.)",
)
lab.settle(
    "traffic",
    measured=f"GPT-2 124M {at_124:.2f} times, {again} of {layers + 1} groups gathered twice",
    verdict="holds"
    if abs(at_124 - 1.5) < 0.05
    else "holds when every group is gathered twice"
    if 1 < at_124 < 1.5
    else "does not hold",
    source=here,
    scope="every card: it is counted",
)

# %% [markdown]
# ### What DDP takes at full size
#
# Now GPT-2 with 124 million parameters and fused AdamW (which makes no copy of its own). First one process, in two
# cases: a short sequence in fp32, and a batch of 6 x 512 tokens with 16-bit autocast and many activations. Its
# timeline says how many bytes of gradients are there at each moment, and from that follows what DDP adds. The buckets
# are there all the time: 4 bytes a parameter, also at the start of backward, where one process has no gradients.
# Without views the gradients come on top of them; with views they lie inside, but for one at a time, which is made
# first and then copied into its bucket.


# %% name="one-process"
def training_step(model, optimizer, tokens, amp=True):
    def step():
        with torch.autocast(tokens.device.type, dtype=half, enabled=amp):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = tokens.numel()
    return step


def one_process(device, batch, seq, amp=True):
    with device:
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", activation_function="gelu_pytorch_tanh"
        ).train()
        tokens = torch.randint(0, 50257, (batch, seq))
    return training_step(model, torch.optim.AdamW(model.parameters(), fused=True), tokens, amp)


CASES = {
    "1 x 128, fp32": {"batch": 1, "seq": 128, "amp": False},
    "6 x 512, autocast": {"batch": 6, "seq": 512, "amp": True},
}
once = {"budget": BUDGET, "repeats": 0, "nearest": False, "stateless": True}
alone = {
    case: lab.measure(one_process, name=f"one process, {case}", **once, **sizes)
    for case, sizes in CASES.items()
}
N = full // 4


LARGEST = 4 * 50_257 * 768  # the gradient of the embedding, which comes last


def with_buckets(report, views):
    """Requested bytes at the peak of a rank of DDP, from the moments of one process."""
    t = report.timeline
    gradients = t.by_category[t.categories.index("gradient")]
    if not views:
        return max(t.totals) + 4 * N
    rest = [total - g for total, g in zip(t.totals, gradients, strict=True)]
    end = max(i for i, phase in enumerate(t.phases) if phase == "backward")
    return (
        max(*rest, rest[end] + LARGEST) + 4 * N
    )  # made outside the bucket, then copied into it


lab.guess(
    "saved",
    None,
    "6 x 512 tokens on each card: how many MiB do bucket views save at the peak?",
    unit="MiB",
)


# %% name="peaks"
def full_size(place, way, batch, seq, amp=True):
    """A training step of this way, in one rank of two."""
    with place.device:
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", activation_function="gelu_pytorch_tanh"
        ).train()
        tokens = torch.randint(0, 50257, (batch, seq))
    model = parallelised(model, way, place)
    return training_step(model, torch.optim.AdamW(model.parameters(), fused=True), tokens, amp)


def peak_of(**sizes):
    place = parallel.join()
    build = functools.partial(full_size, place, **sizes)
    return parallel.measured(build, place, budget=BUDGET, steps=0)


rows, saved, ranked = [], {}, {}
for case, sizes in CASES.items():
    formula = {way: with_buckets(alone[case], way.endswith("views")) for way in WAYS[1:3]}
    for way in WAYS[1:]:
        side = ranks.run(peak_of, way=way, **sizes)[0] if two else None
        found = known(
            "peak", side["requested_bytes"] if two else None, "bytes", f"{way}, {case}"
        )
        ranked[way, case] = found["value"]
        cells = [told(formula.get(way), show), told(found["value"], show), found["label"]]
        rows.append([case, way, show(alone[case].steady.requested_bytes), *cells])
    real = [ranked[way, case] for way in WAYS[1:3]]
    by_account = formula["DDP"] - formula["DDP, bucket views"]
    saved[case] = (by_account, None if None in real else real[0] - real[1])
head = [f"one process ({lesson.source})", "DDP, by the account", "a rank of two", "from"]
lab.table(["on each card", "way", *head], rows)
best = {
    case: by_account if real is None else real for case, (by_account, real) in saved.items()
}
source = lesson.source if None in [real for _, real in saved.values()] else there
late = list(CASES)[1]
lab.answer(
    "saved",
    measured=best[late] / MiB,
    formula=saved[late][0] / MiB,
    source=source,
    note="At the start of backward no gradient is there that could be there twice.",
)
helps = [case for case, value in best.items() if value > 0.9 * (4 * N - LARGEST)]
verdict = "does not hold"
if helps:
    verdict += f": at most all but the largest gradient, where all are alive at the peak ({', '.join(helps)})"
lab.settle(
    "views",
    measured=", ".join(
        f"{case}: {value / MiB:.0f} of {4 * N / MiB:.0f} MiB" for case, value in best.items()
    ),
    verdict="holds" if min(best.values()) > 3.9 * N else verdict,
    source=source,
)

# %% [markdown]
# So a rank of DDP needs up to 4 bytes a parameter more than one process, and views give them back only where the peak
# is late: when activations are small, or in the last micro-batch of an accumulation. Switch them on anyway.
#
# ### What the launched job said
#
# The script that `accelerate launch` started has ended meanwhile. There were two processes, and each got half of the
# batches: `prepare` sharded the loader as well. To shard the *model* instead, the same script runs with these lines in
# the file:
#
# ```yaml
# distributed_type: FSDP
# fsdp_config:
#   fsdp_version: 2
#   fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
#   fsdp_transformer_layer_cls_to_wrap: GPT2Block
#   fsdp_reshard_after_forward: true
# ```
#
# DeepSpeed is a third way to shard. Its settings are a file, too, and the script stays the same.

# %% name="launched"
try:
    said, _ = launched.communicate(timeout=120)
except subprocess.TimeoutExpired:
    launched.kill()
    said, _ = launched.communicate()
spoken = sorted(re.findall(r"^rank \d+ of .*$", said, re.MULTILINE))
print("\n".join(spoken) or said[-1500:])

zero = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": half == torch.bfloat16},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
}
(lesson.folder / "11_zero3.json").write_text(json.dumps(zero, indent=1))
print(
    "\naccelerate launch --use_deepspeed --deepspeed_config_file 11_zero3.json --num_processes 2 train.py"
)
if extras.has("deepspeed"):
    print(
        f"DeepSpeed {extras.version('deepspeed')} is installed; this lesson does not measure it"
    )
else:
    extras.missing("deepspeed", "the command above cannot run")

# %% [markdown]
# ### How much faster
#
# Both ranks train on batches of the same size as one process did. The longer step is the price of being two: gradients
# that are still under way when backward ends. Weak scaling asks for the throughput of two cards with the same batch
# *each*; strong scaling shares one batch out, so each card gets half.

# %% name="guess-speed"
lab.guess(
    "small",
    None,
    "GPT-2 124M, two cards, one sequence of 512 tokens on each: how many times the tokens/s of one card?",
    unit="x",
)

# %% name="speeds"
BATCHES = (1, 2, 4, 8)
BOTH = ("one process", "DDP, bucket views")


def both_in_turn(batch):
    """Five times 5 steps of each way; in turn, or what changes on the host would look like a difference."""
    place = parallel.join()
    builds = {
        way: functools.partial(full_size, place, way, batch=batch, seq=512) for way in BOTH
    }
    return parallel.in_turn(builds, place)


times = {}
for batch in BATCHES:
    sides = ranks.run(both_in_turn, batch=batch, timeout=120) if two else None
    for way in BOTH:
        took, spread = parallel.medians(sides, way) if two else (None, None)
        times[way, batch] = known("step", took, "s", f"{way}, {batch} x 512", spread=spread)


def reduce_alone():
    place = parallel.join()
    return {"seconds": parallel.all_reduce_seconds(full, place)}


reduced = ranks.run(reduce_alone)[0]["seconds"] if two else None
reduce_time = known("all-reduce", reduced, "s", "gradients of GPT-2 124M, fp32")
rows, weak, strong, exposed, gains = [], {}, {}, {}, {}
for batch in BATCHES:
    single, both = (times[way, batch]["value"] for way in BOTH)
    if single and both:
        weak[batch] = single / both
        gains[batch] = f"{2 * weak[batch]:.2f}"
        spreads = [times[way, batch].get("spread") for way in BOTH]
        if None not in spreads:  # rows of earlier runs have none
            gains[batch] += f" ± {2 * sum(spreads) / both:.2f}"
        exposed[batch] = max(0.0, 1 - single / both)
        hidden = max(0.0, 1 - max(0.0, both - single) / reduce_time["value"])
        rows.append(
            [
                batch,
                seconds(single),
                seconds(both),
                f"{2 * batch * 512 / both:,.0f}",
                f"{gains[batch]} times",
                f"{exposed[batch]:.0%}",
                f"{hidden:.0%}",
            ]
        )
for batch in BATCHES[1:]:
    whole, part = (
        times["one process", batch]["value"],
        times["DDP, bucket views", batch // 2]["value"],
    )
    if whole and part:
        strong[batch // 2] = whole / part / 2
if weak:
    head = [
        "batch on each card",
        "one card",
        "two cards",
        "tokens/s",
        "throughput",
        "waiting",
        "hidden",
    ]
    lab.table(head, rows)
    label = times["one process", 1]["label"]
    print(f"{label}; the all-reduce alone takes {seconds(reduce_time['value'])}")
    lab.plots.show(
        lab.plots.lines(
            {
                "same batch on each card": (list(weak), [100 * v for v in weak.values()]),
                "one batch, half of it on each card": (
                    list(strong),
                    [100 * v for v in strong.values()],
                ),
            },
            x="sequences of 512 tokens on each card",
            y="scaling efficiency (%)",
            log="x",
            title="Two cards against one, GPT-2 124M, DDP",
            source=f"{label}, two cards",
            zero=True,
        )
    )
else:
    print("no reference row yet: the table and the figure need two cards")
lab.answer("small", measured=2 * weak[1] if weak else None, source=there)

# %% [markdown]
# *What to see:* how far each line lies below 100 %. *Waiting* is the part of a step of two that one process does not
# have; *hidden* is the part of the all-reduce that ran behind backward; ± comes from the spread of five rounds. Where
# the step grows by more than the all-reduce takes alone, the link is not all of it: DDP's hooks run on the host, and
# NCCL's kernels share the card with backward; they are not told apart here. A step that does not grow with its batch is
# bound by its host: then half a batch takes as long as a whole one, and the second line lies near one half.

# %% name="settle-twice"
if weak:
    good = [b for b in weak if all(e >= 0.9 for other, e in weak.items() if other >= b)]
    said = ", ".join(f"batch {b}: {gain} times" for b, gain in gains.items())
    lab.settle(
        "twice",
        measured=said,
        verdict="does not hold"
        if not good
        else "holds"
        if len(good) == len(weak)
        else f"holds when each card has {good[0]} x 512 tokens or more (within 10 %)",
        source=there,
        scope=times["one process", 1]["capability"],
    )
else:
    lab.settle("twice", measured="no reference row", verdict="not measured here")
needed = full * 2 * (2 - 1) / 2
rows = []
for name in ("t4", "rtx3090", "rtx4090", "h100"):
    card = lab.machine.preset(name)
    least = needed / card.bus_bytes
    rows.append([card.title, card.bus, f"{card.bus_bytes / 1e9:.1f} GB/s", seconds(least)])
lab.table(
    ["card", "bus (standard)", "one direction", f"{show(int(needed))} take at least"], rows
)

# %% [markdown]
# The last table is arithmetic from data sheets, not a measurement: small cards have no NVLink between them, so the
# gradients cross the bus of the host. Compare with the time of your own backward: what is longer is what you wait for.
# Three things make the share smaller. A larger batch on each card. Gradients in 16 bits
# (`model.register_comm_hook(None, default_hooks.bf16_compress_hook)`), which halves the bytes. And accumulation.
#
# ### Accumulation without sending each time
#
# Gradient accumulation adds up several micro-batches before one step. DDP does not know that, and averages after every
# backward. `with model.no_sync():` leaves it out; only the last micro-batch, outside of it, sends.


# %% name="accumulation"
def accumulated(quiet_until_last, micro_batches=4):
    """What four micro-batches of 2 x 64 tokens send, and the gradients that they leave."""
    place = parallel.join()
    model = DDP(network(place, **SMALL), gradient_as_bucket_view=True)
    torch.manual_seed(100 + place.rank)
    tokens = torch.randint(
        0, model_vocabulary(model), (micro_batches, 2, 64), device=place.device
    )
    model(input_ids=tokens[0], labels=tokens[0]).loss.backward()  # buckets are arranged now
    model.zero_grad()
    with parallel.Traffic() as traffic:
        for number, part in enumerate(tokens):
            last = number == micro_batches - 1
            with contextlib.nullcontext() if last or not quiet_until_last else model.no_sync():
                (model(input_ids=part, labels=part).loss / micro_batches).backward()
    norm = (
        torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
    )
    return {"norm": norm.item(), **traffic.row(place.world)}


rows, norms = [], {}
for name, quiet_until_last in {"as it comes": False, "with no_sync": True}.items():
    found = ranks.run(accumulated, quiet_until_last=quiet_until_last)[0]
    norms[name] = found["norm"]
    sent = found["link_bytes"] / parameters
    lab.fact("sent, accumulating", sent, "B/parameter", what=name, source=here)
    rows.append(
        [
            name,
            str(found["calls"]["all_reduce"]),
            show(found["link_bytes"]),
            f"{found['norm']:.10g}",
        ]
    )
lab.table(
    ["4 micro-batches, 2 ranks", "all-reduces", "sent by a rank", "norm of the gradients"], rows
)

# %% [markdown]
# ### DataParallel
#
# `torch.nn.DataParallel` is the form that older texts show: one process, one thread for each card. In every step it
# copies the model to the other card, splits the batch, gathers the outputs on the first card and adds the gradients up
# there. PyTorch's documentation recommends DDP instead, also in one machine. The cell measures it where there are two
# cards, with the batch that both ranks of DDP had together.


# %% name="dataparallel"
class LossOnly(torch.nn.Module):
    """A model whose output is its loss: DataParallel gathers what comes out, and logits are large."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, labels=tokens).loss.unsqueeze(0)


def host_seconds(step, repeats=6):
    """Seconds of a step, both cards idle before and after; the peaks of both, in bytes."""
    for _ in range(2):
        step()
    for card in (0, 1):
        torch.cuda.synchronize(card)
        torch.cuda.reset_peak_memory_stats(card)
    timing = lab.time_step(step, device="cuda", warmup=1, repeats=repeats)
    return timing.median_seconds, [torch.cuda.max_memory_allocated(card) for card in (0, 1)]


def threads(batch):
    with torch.device("cuda:0"):
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", activation_function="gelu_pytorch_tanh"
        ).train()
        tokens = torch.randint(0, 50257, (batch, 512))
    wrapped = torch.nn.DataParallel(LossOnly(model), device_ids=[0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with torch.autocast("cuda", dtype=half):
            loss = wrapped(tokens).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return host_seconds(step)


rows, slower = [], {}
for batch in (2, 8):
    with lab.budget(BUDGET) if two else contextlib.nullcontext():
        took, peaks = threads(2 * batch) if two else (None, (None, None))
    old = known("step", took, "s", f"DataParallel, 2 x {batch} x 512")
    where = [
        known("peak", peaks[c], "bytes", f"DataParallel, 2 x {batch} x 512, card {c}")
        for c in (0, 1)
    ]
    new = times["DDP, bucket views", batch]["value"]
    slower[batch] = old["value"] / new if old["value"] and new else None
    cells = [
        told(old["value"], seconds),
        told(new, seconds),
        told(slower[batch], lambda r: f"{r:.2f} times"),
    ]
    rows.append(
        [f"2 x {batch} x 512", *cells, *(told(w["value"], show) for w in where), old["label"]]
    )
lab.table(
    ["both cards together", "DataParallel", "DDP", "longer", "card 0", "card 1", "from"], rows
)
if None not in slower.values():
    lab.settle(
        "dataparallel",
        measured=", ".join(
            f"2 x {b} x 512: {r:.2f} times the step of DDP" for b, r in slower.items()
        ),
        verdict="does not hold"
        if min(slower.values()) > 1.05
        else "holds"
        if max(slower.values()) < 1.05
        else "holds when the batch is large",
        source=there,
        scope=old["capability"],
    )
else:
    lab.settle("dataparallel", measured="no reference row", verdict="not measured here")
if two:
    measuring.release()

# %% [markdown]
# ### Shards: a model that fits no card
#
# DDP's copies need what one process needs. GPT-2 XL has 1.56 billion parameters: 16 bytes each are 23 GiB, on every
# card. Sharding cuts them into W parts. The stages of ZeRO say what is cut.

# %% name="guess-xl"
lab.guess(
    "xl",
    None,
    "GPT-2 XL, fp32 AdamW, FSDP2 on 2 cards: GiB of weights, gradients and state on each?",
    unit="GiB",
)
lab.guess("ranks", None, "How many cards of 8 GiB does that need at least?")

# %% name="zero"
XL = 1_557_611_200


def rank_bytes(n, world, stage, weight=4, gradient=4, state=8):
    """Bytes of a rank by ZeRO's stage: 0 is DDP (with bucket views); 1 shards the state, 2 gradients too, 3 all."""
    parts = [
        weight / world if stage >= 3 else weight,
        gradient / world if stage >= 2 else gradient,
    ]
    return round(n * (sum(parts) + (state / world if stage >= 1 else state)))


worlds = (1, 2, 3, 4, 6, 8)
stages = {"0: DDP": 0, "1: state": 1, "2: + gradients": 2, "3: + weights (FSDP2)": 3}
curves = {
    name: (worlds, [rank_bytes(XL, w, stage) / GiB for w in worlds])
    for name, stage in stages.items()
}
lab.plots.show(
    lab.plots.lines(
        {**curves, "budget of a card": (worlds, [BUDGET / GiB] * len(worlds))},
        x="cards",
        y="GiB on each card",
        title="GPT-2 XL in fp32 with AdamW: weights, gradients, state",
        source="arithmetic: 4 + 4 + 8 bytes a parameter",
        zero=True,
    )
)
least = next(w for w in range(1, 65) if rank_bytes(XL, w, 3) < BUDGET)
lab.answer(
    "xl", measured=rank_bytes(XL, 2, 3) / GiB, formula=16 * XL / 2 / GiB, source="predicted"
)
lab.answer(
    "ranks",
    measured=float(least),
    source="predicted",
    note="By this sum alone: activations and gathered weights come on top.",
)

# %% [markdown]
# *What to see:* stage 3 gets below the budget with three cards, stage 2 only with eight, by a hair; stages 0 and 1
# never do. What a stage does not cut is a floor that no number of cards lowers.
#
# Two cards of 8 GiB are not enough for fp32. Two changes make it fit. Weights, gradients and state all in 16 bits
# are 8 bytes a parameter (lesson 02 says what that loses). Or the shards lie in the host's memory, and only what is
# gathered is on the card: `CPUOffloadPolicy` (lesson 05: the bus decides). Both with checkpointing.


# %% name="xl-ranks"
def sharded(device_of_shards, place, size, dtype, offload=False, **fields):
    """A GPT-2 that no rank ever holds as a whole: shapes first, then shards, then memory for the shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = lab.models.gpt2(
            size, attention="sdpa", activation_function="gelu_pytorch_tanh", **fields
        )
    model = model.to(dtype).train()
    model.gradient_checkpointing_enable()
    how = {"mesh": init_device_mesh(place.device.type, (place.world,))}
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    if offload:
        how["offload_policy"] = CPUOffloadPolicy()
    for block in model.transformer.h:
        fully_shard(block, **how)
    fully_shard(model, **how)
    model.to_empty(device=device_of_shards)
    model.lm_head.weight = model.transformer.wte.weight  # tied again: to_empty takes them apart
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.01)  # only the sizes count here
    return model


def step_of_xl(dtype, offload, seq=1024):
    place = parallel.join()

    def build():
        model = sharded("cpu" if offload else place.device, place, "gpt2-xl", dtype, offload)
        tokens = torch.randint(0, 50257, (1, seq), device=place.device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return training_step(model, optimizer, tokens, amp=False)

    return parallel.measured(build, place, budget=BUDGET, warmup=2, steps=1)


RECIPES = {
    "fp32, AdamW": {"dtype": torch.float32, "offload": False},
    "all in 16 bits": {"dtype": half, "offload": False},
    "fp32 on the host": {"dtype": torch.float32, "offload": True},
}
sixteen = lab.Recipe.of(
    model="gpt2-xl",
    batch=1,
    precision="bf16",
    checkpoint=1,
    optimizer="adamw-fused",
    activation="gelu_pytorch_tanh",
)
one = lab.measure(sixteen, card=lab.machine.preset().name, trace=False, repeats=0, record=False)
rest = one.peak_bytes - 8 * XL  # of one process: activations, logits, workspace
root, block = 51_281 * 1600 + 3200, 12 * 1600**2 + 13 * 1600
gathered = 2 * (
    root + 2 * block
)  # in 16 bits: the embeddings, a block, and the next one on its way
rows = []
for name, recipe in RECIPES.items():
    shard = 0 if recipe["offload"] else rank_bytes(XL, 2, 3) * recipe["dtype"].itemsize // 4
    side = {"status": None, "allocated_bytes": None, "seconds": None}
    if two:
        try:
            side = ranks.run(step_of_xl, timeout=90, **recipe)[0]
        except (TimeoutError, launching.RankError) as error:
            print(f"{name}: {error}")
            side["status"] = "failed"
    what = f"GPT-2 XL, {name}, 1 x 1024"
    status = known("status", side["status"], "", what)
    peak = known("peak", side["allocated_bytes"], "bytes", what)["value"]
    step = known("step", side["seconds"], "s", what)["value"]
    fit = {"ok": told(peak, show), "oom": "out of memory", None: "–"}.get(
        status["value"], "failed"
    )
    sum_of = shard + rest + gathered
    account = f"{show(sum_of)}{'' if sum_of < BUDGET else ', too much'}"
    speed = told(step, lambda s: f"{2 * 1024 / s:,.0f}")
    rows.append([name, show(shard), account, fit, speed, status["label"]])
head = [
    "GPT-2 XL, 1 x 1024 on each of 2 cards",
    "shard",
    "with the rest (predicted)",
    "a rank's peak",
]
lab.table([*head, "tokens/s", "from"], rows)
print(f"the rest: {show(rest)} of a predicted step, and {show(gathered)} of gathered weights")

# %% [markdown]
# ### Layers: a part of the model on each card
#
# `device_map` of transformers and accelerate puts whole layers on cards, in one process. The function below only
# plans; `"auto"` does the same with the memory that is free. Each card then holds its own layers and their
# activations. The cell plans GPT-2 XL in 16 bits, with 2 GiB of weights on each card.

# %% name="plan"
from accelerate import infer_auto_device_map

# it warns when one plans for cards that are not here
logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
with torch.device("meta"):
    shapes = lab.models.gpt2("gpt2-xl", attention="sdpa")
plan = infer_auto_device_map(
    shapes,
    max_memory={0: "2GiB", 1: "2GiB"},
    no_split_module_classes=["GPT2Block"],
    dtype=torch.bfloat16,
)
rows = []
for card in (0, 1):
    names = [name for name, where in plan.items() if where == card]
    held = {p for name in names for p in shapes.get_submodule(name).parameters()}
    blocks = [name.split(".")[-1] for name in names if ".h." in name]
    others = [
        name.split(".")[-1]
        for name in names
        if ".h." not in name and name != "transformer.drop"
    ]
    span = f"blocks {blocks[0]} to {blocks[-1]}"
    rows.append(
        [f"card {card}", span, ", ".join(others), show(2 * sum(p.numel() for p in held))]
    )
lab.table(["", "layers", "and", "weights in 16 bits"], rows)
lab.guess(
    "layers",
    None,
    "device_map over two cards, batch 8 x 512: how many times the tokens/s of one card?",
    unit="x",
)

# %% [markdown]
# The head shares its weights with the embedding, so both must lie on one card, and the last result travels back to
# it. That is what `tie_word_embeddings` means for any split.
#
# In such a plan a layer waits for the one before it. While one card computes, the other is idle. A *pipeline* cuts the
# batch into m micro-batches and lets card 1 work on the first while card 0 works on the second. At the start and the
# end a card still waits: its idle share is (W - 1) / (m + W - 1), the *bubble*.


# %% name="stages"
class Stage(torch.nn.Module):
    """The part of a GPT-2 that one card of a pipeline has; embedding and head are not tied here."""

    def __init__(self, model, index, stages):
        super().__init__()
        body = model.transformer
        each = len(body.h) // stages
        self.blocks = body.h[index * each : (index + 1) * each]
        if index == 0:
            self.tokens, self.positions = body.wte, body.wpe
        if index == stages - 1:
            self.norm, self.head = body.ln_f, model.lm_head

    def forward(self, x):
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x  # a tuple in older versions of transformers
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def next_token_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


def pipeline(model, place, micro_batches):
    """A schedule that runs forward and backward of one batch over all ranks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part = Stage(model, place.rank, place.world).to(place.device)
    stage = PipelineStage(part, place.rank, place.world, place.device)
    return part, ScheduleGPipe(stage, n_microbatches=micro_batches, loss_fn=next_token_loss)


def fed(schedule, tokens, place):
    """Run it: the first rank gives the tokens, the last one the targets."""
    ends = {"target": tokens, "losses": []} if place.rank == place.world - 1 else {}
    schedule.step(*([tokens] if place.rank == 0 else []), **ends)
    return torch.stack(ends["losses"]).mean().detach() if ends else None


def piped(micro_batches, batch=8, seq=512):
    place = parallel.join()

    def build():
        part, schedule = pipeline(
            network(place, tie_word_embeddings=False), place, micro_batches
        )
        optimizer = torch.optim.AdamW(part.parameters(), fused=True)
        tokens = torch.randint(0, 50257, (batch, seq), device=place.device)

        def step():
            with torch.autocast(place.device.type, dtype=half):
                loss = fed(schedule, tokens, place)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return step

    return parallel.measured(build, place, budget=BUDGET, steps=6)


def mapped(batch=8, seq=512):
    """One process, blocks 0 to 5 and the embedding on card 0, blocks 6 to 11 on card 1."""
    from accelerate import dispatch_model

    with torch.device("cuda:0"):
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", activation_function="gelu_pytorch_tanh"
        ).train()
    where = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "lm_head": 0}
    where |= {f"transformer.h.{i}": i // 6 for i in range(12)} | {"transformer.ln_f": 1}
    model = dispatch_model(model, where)
    tokens = torch.randint(0, 50257, (batch, seq), device="cuda:0")
    return host_seconds(
        training_step(model, torch.optim.AdamW(model.parameters(), foreach=True), tokens)
    )


single = times["one process", 8]["value"]
rows, gains = (
    [["one card", told(single, seconds), "", "", times["one process", 8]["label"]]],
    {},
)
took, peaks = mapped() if two else (None, (None, None))
if two:
    measuring.release()
ways = {"device_map": (took, peaks)}
for count in (1, 4, 8):
    sides = ranks.run(piped, micro_batches=count) if two else None
    longest = max(side["seconds"] or 0 for side in sides) or None if two else None
    ways[f"pipeline, {count} micro-batches"] = (
        longest,
        [side["allocated_bytes"] for side in sides] if two else (None, None),
    )
for name, (took, peaks) in ways.items():
    step = known("step", took, "s", f"{name}, 8 x 512")
    both = [
        known("peak", peaks[c], "bytes", f"{name}, 8 x 512, card {c}")["value"] for c in (0, 1)
    ]
    gains[name] = single / step["value"] if single and step["value"] else None
    cells = [told(step["value"], seconds), told(gains[name], lambda g: f"{g:.2f} times")]
    rows.append([name, *cells, " + ".join(told(b, show) for b in both), step["label"]])
lab.table(
    ["GPT-2 124M, 8 x 512", "step", "tokens/s of one card", "peaks, card 0 + card 1", "from"],
    rows,
)
bubble = {m: 1 / (m + 1) for m in (1, 4, 8)}
print(
    "idle by the formula: " + ", ".join(f"{m} micro-batches {b:.0%}" for m, b in bubble.items())
)
lab.answer("layers", measured=gains["device_map"], formula=1.0, source=there)
if gains["device_map"] is not None:
    fed = (4, 8)  # one micro-batch is no pipeline: the cards work one after the other
    count = max(fed, key=lambda m: gains[f"pipeline, {m} micro-batches"] or 0)
    best_pipe = gains[f"pipeline, {count} micro-batches"] or 0
    lab.settle(
        "layers",
        measured=f"{gains['device_map']:.2f} times the tokens/s of one card; the best pipeline "
        f"{best_pipe:.2f} times ({count} micro-batches)",
        verdict="holds"
        if gains["device_map"] > 1.3
        else "holds when a pipeline feeds them"
        if best_pipe > 1.1
        else "does not hold",
        source=there,
        scope=times["one process", 8]["capability"],
    )
else:
    lab.settle("layers", measured="no reference row", verdict="not measured here")

# %% [markdown]
# *What to see:* whether more micro-batches help. They shorten the bubble, but each of them launches all kernels again.
# In the reference rows more of them take longer, probably for that reason.
#
# A split by layers sends little: one activation of (batch, seq, width) a cut and direction, not all gradients. So it
# suits cards that are poorly connected, and models whose weights do not fit one card.
#
# ## Account
#
# What does a rank hold, and what does it send? The counts from the beginning of the lesson beside the formulas, in
# bytes a parameter, for 2 ranks. FSDP2 gathers its embeddings' group once and the others twice.

# %% name="account"
width, W = SMALL.get("n_embd", 768), 2
in_blocks = (
    layers * (12 * width**2 + 13 * width) / parameters
)  # the part that is gathered twice
all_reduce, one_way = 4 * 2 * (W - 1) / W, 4 * (W - 1) / W
formulas = {
    "one process": (16, 0),
    "DDP": (20, all_reduce),
    "DDP, bucket views": (16, all_reduce),
    "FSDP2": (16 / W, one_way * (1 + in_blocks) + one_way),  # gathers, and the scatter
}
rows = []
for way, (holds, sends) in formulas.items():
    found = (
        sum(counts[way]["held"].values()) / parameters,
        counts[way]["link_bytes"] / parameters,
    )
    rows.append(
        [
            way,
            holds,
            f"{found[0]:.4f}",
            f"{found[0] - holds:+.4f}",
            f"{sends:.4f}",
            f"{found[1]:.4f}",
        ]
    )
lab.table(["way", "holds, formula", here, "unexplained", "sends, formula", here], rows)
lab.plots.show(
    lab.plots.grouped(
        {
            way: [round(counts[way]["held"][term] / parameters, 2) for term in terms]
            for way in WAYS
        },
        labels=terms,
        unit="bytes a parameter",
        title="What a rank holds when the optimizer steps",
        source=f"{here}, 2 ranks, {parameters / 1e6:.1f}M parameters",
    )
)

# %% [markdown]
# *What to see:* in plain DDP gradients and buckets are two bars of the same length; with views one of them is gone.
# Under FSDP2 all bars are half as long.
#
# What is left unexplained are AdamW's step counters, 4 bytes for each tensor, and what sharding must fill up where a
# tensor cannot be cut evenly.
#
# ## Equivalence
#
# All ways must give the gradients of one process that has the whole batch. Each rank here takes its half of the same
# 8 sequences (the pipeline takes 4 micro-batches of 2). Sums are taken in another order, so the last bits differ: the
# largest difference, relative to the largest value of the same gradient, must stay below 2000 rounding errors of fp32.


# %% name="equivalence"
def differences(ways):
    """For each way, the largest difference of any gradient from one process with the whole batch."""
    place = parallel.join()
    settings = {**SMALL, "tie_word_embeddings": False}
    reference = network(place, **settings)
    tokens = torch.randint(0, reference.config.vocab_size, (8, 64)).to(
        place.device
    )  # in all ranks
    reference(input_ids=tokens, labels=tokens).loss.backward()
    truth = {name: p.grad for name, p in reference.named_parameters()}
    mine = tokens.chunk(place.world)[place.rank]
    found = {}
    for way in ways:
        model = network(place, **settings)
        if way == "pipeline":
            part, schedule = pipeline(model, place, micro_batches=4)
            fed(schedule, tokens, place)
        elif way == "DDP, no_sync":
            model = DDP(model)
            with model.no_sync():
                (model(input_ids=mine[:2], labels=mine[:2]).loss / 2).backward()
            (model(input_ids=mine[2:], labels=mine[2:]).loss / 2).backward()
        else:
            model = parallelised(model, way, place)
            model(input_ids=mine, labels=mine).loss.backward()
        off = 0.0
        for name, p in getattr(model, "module", model).named_parameters():
            if p.grad is not None:
                whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                off = max(
                    off, float((whole - truth[name]).abs().max() / truth[name].abs().max())
                )
        found[way] = off
    return found


COMPARED = [*WAYS[1:], "DDP, no_sync", "pipeline"]
both = ranks.run(differences, ways=COMPARED, timeout=120)
allowed = 2000 * torch.finfo(torch.float32).eps
rows = []
for way in COMPARED:
    off = max(row[way] for row in both)
    lab.fact("gradient difference", off, what=way, source=here)
    rows.append([way, f"{off:.1e}", off < allowed])
lab.table(
    [
        f"gradients of 2 ranks against one process ({here})",
        "largest difference",
        f"below {allowed:.1e}",
    ],
    rows,
)
worst = max(row[way] for row in both for way in COMPARED[:2])
lab.settle(
    "same",
    measured=f"largest relative difference {worst:.1e} in fp32",
    verdict="holds when all ranks have equal numbers of tokens"
    if worst < allowed
    else "does not hold",
    source=here,
    scope="every card",
)

# %% [markdown]
# The condition is part of the verdict. DDP takes the mean of the ranks' gradients, and each rank's loss is a mean over
# its own tokens. With padding, ranks have different numbers of real tokens, and a token in the emptier rank counts
# more. The cure is that of lesson 09: sum the losses, divide by the tokens of *all* ranks, and multiply by W, because
# DDP divides by it.
#
# ## Negative control
#
# Where sharding must not help: when activations fill the card. FSDP2 cuts what belongs to parameters; every rank still
# keeps the activations of its own batch. The two cases from above again. At the start of backward a rank of two has 6
# bytes a parameter less (half of 12), and what is gathered comes back on top; so the account gives a lower bound.


# %% name="negative-control"
rows, kept = [], {}
for case, report in alone.items():
    whole, t = report.steady.requested_bytes, report.timeline
    moment = max(range(len(t.totals)), key=t.totals.__getitem__)
    by = {c: row[moment] for c, row in zip(t.categories, t.by_category, strict=True)}
    of_parameters = by["parameter"] + by["gradient"] + by["optimizer state"]
    bound = (whole - of_parameters / 2) / whole
    found = ranked["FSDP2", case]
    kept[case] = (bound, found / whole if found else None)
    cells = [f"{of_parameters / whole:.0%}", f"{bound:.2f}"]
    rows.append(
        [
            case,
            show(whole),
            *cells,
            told(found, show),
            told(kept[case][1], lambda k: f"{k:.2f}"),
        ]
    )
head = [f"one process ({lesson.source})", "for parameters", "at least (account)"]
lab.table(["on each card", *head, f"a rank of FSDP2 ({there})", "of one process"], rows)
halves = [sum(counts[way]["held"].values()) for way in ("FSDP2", "one process")]
share = halves[0] / halves[1]
print(f"weights, gradients and state alone: {share:.2f} of one process (counted above, {here})")
bound, real = kept[late]
verdict = "does not hold"
if share < 0.55:
    verdict = "holds when only weights, gradients and state are meant"
lab.settle(
    "shards",
    measured=f"parameters' part {share:.2f}, whole peak with {late} "
    f"{f'at least {bound:.2f}' if real is None else f'{real:.2f}'} of one process",
    verdict="holds" if real is not None and real < 0.6 else verdict,
    source=there if real else lesson.source,
)

# %% [markdown]
# ## Pitfalls
#
# **It hangs.** A collective waits for all ranks. When one of them takes another branch, runs out of memory or has a
# batch less, the others wait until the timeout of the process group: ten minutes with NCCL and thirty with gloo, unless
# `init_process_group` is told otherwise. The cell makes rank 1 leave out an all-reduce; `launching` ends all ranks
# after 2 seconds, and asks those that had not answered where they were.


# %% name="hang"
def uneven():
    place = parallel.join()
    if place.rank == 0:  # "only the first rank logs the loss"
        dist.all_reduce(torch.zeros(1, device=place.device))
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return {}


try:
    ranks.run(uneven, timeout=2)
except TimeoutError as error:
    print(str(error).replace(" < ", "\n    called by "))
ranks.close()

# %% [markdown]
# **Out of memory on several cards where one card was enough.** Each rank of DDP has buckets on top
# (transformers#10952), and processes that forget `torch.cuda.set_device(local_rank)` all open a context on card 0.
# When the first step went through and the second did not: DDP arranges its buckets anew in between, and PyTorch keeps
# the old ones until NCCL's watchdog has looked, which it does every 100 ms (ProcessGroupNCCL.cpp). Where every byte
# counts, wait 0.2 s after the first step and call `dist.barrier()`; the peaks in this lesson are taken after that.
#
# **Each process believes that it is alone.** accelerate finds no card, or `torch.distributed` was not initialised:
# `rank 0 of 1` twice, and two models that never meet. Print rank and world size at the start.
#
# **The loss is that of one rank.** What a rank prints is the mean over its own part of the batch. All-reduce it before
# you log it, in all ranks.
#
# **Every rank sees the same data.** Give the loader a `DistributedSampler`, and call `set_epoch` before each epoch, or
# the order never changes. accelerate does both.
#
# **"Expected to have finished reduction in the prior iteration".** A parameter got no gradient in this step, and its
# bucket never filled. Take it out of the model, or set `find_unused_parameters=True`, which walks the graph each time.
#
# **A checkpoint has `module.` in all its names.** Save `model.module.state_dict()`. Under FSDP2 each rank has shards:
# use `torch.distributed.checkpoint`.
#
# **`device_map="auto"` and then a Trainer under torchrun.** The map is for one process that has all cards; under DDP
# each process has one. It is one or the other.
#
# **On a T4 or RTX 20** bf16 is emulated: reduce in fp16 or fp32. No such card was at hand.
#
# ## Exercise 1
#
# *4 min, easy.* GPT-2 medium (354.8 million parameters) trains with DDP on **4** cards, gradients in fp32. How many
# **MiB** does each rank send in one step, by the ring algorithm?
#
# <details><summary>Hint</summary>
#
# An all-reduce is a reduce-scatter and an all-gather. Which part of the gradients does a rank send in each of them,
# when there are four?
#
# </details>

# %% answer="sent_mib"
sent_mib = ...
### BEGIN SOLUTION
sent_mib = 2 * (4 - 1) / 4 * 4 * 354.8e6 / 2**20
### END SOLUTION

# %% check="sent_mib" points=1
lab.check.number(
    "sent_mib",
    sent_mib,
    2 * 3 / 4 * 4 * 354.8e6 / 2**20,
    unit="MiB",
    tolerance=0.01,
    mistakes={  # the gradients are 4 x 354.8e6 bytes
        4 * 354.8e6 / 2**20: (
            "This is the size of the gradients, or what each of two ranks sends. There are four."
        ),
        3 * 354.8e6 / 2**20: (
            "Half of it: an all-reduce has two halves, and a gradient in fp32 has 4 bytes.",
            0.5,
        ),
        8 * 354.8e6 / 2**20: (
            "A rank keeps its own part: how many of the four parts does it send on?"
        ),
        24 * 354.8e6 / 2**20: "Each message is a fourth of the gradients, not all of them.",
        9 * 354.8e6 / 2**20: "This is what full sharding sends.",
    },
    hint="Two halves, each (W - 1) / W of the gradients' bytes.",
)

# %% [markdown]
# ## Exercise 2
#
# *12 min, medium.* Write `split_layers(sizes, cards)`. `sizes` are the bytes of a model's layers, in order; return a
# list with the card of each layer (0, 1, ...). Layers may not change their order, so the cards of the list never
# decrease, and the **fullest card must have as little as possible**. (Filling card after card to an equal share is not
# enough: a large layer at the border can go either way.)
#
# <details><summary>Hint</summary>
#
# Turn it around: for a given limit, how many cards does it take when each is filled until the next layer would cross
# the limit? The smallest limit that needs no more than `cards` cards is what you look for, and it is the sum of some
# run of layers.
#
# </details>


# %% answer="split_layers"
def split_layers(sizes, cards):
    ### BEGIN SOLUTION
    def filled(limit):
        where, card, held = [], 0, 0
        for size in sizes:
            if held + size > limit and held:
                card, held = card + 1, 0
            held += size
            where.append(card)
        return where

    sums = {sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)}
    for limit in sorted(s for s in sums if s >= max(sizes)):
        if max(filled(limit)) < cards:
            return filled(limit)
    ### END SOLUTION


# %% check="split_layers" points=2
def layers_of(sizes, cards, least):
    def verdict(got):
        if not isinstance(got, (list, tuple)) or not all(type(card) is int for card in got):
            return "a list of whole numbers is asked for, the card of each layer. Is there a `return`?"
        if len(got) != len(sizes):
            return f"{len(sizes)} layers, but {len(got)} cards in the list: one for each layer is asked for."
        if not all(0 <= card < cards for card in got):
            return f"a card that is none: with {cards} cards they are 0 to {cards - 1}."
        if any(later < earlier for earlier, later in itertools.pairwise(got)):
            return "a layer lies on an earlier card than the one before it."
        fullest = max(
            sum(s for s, c in zip(sizes, got, strict=True) if c == card) for card in set(got)
        )
        return (
            True
            if fullest <= least
            else f"the fullest card has {fullest} where {least} is possible."
        )

    return lab.check.case(list(sizes), cards, expect=verdict)


lab.check.code(
    "split_layers",
    split_layers,
    [
        layers_of([4, 4, 4, 4], 2, 8),
        layers_of([9, 2, 2, 2, 2, 9], 3, 9),
        layers_of([1, 1, 1, 9], 2, 9),
        layers_of([3, 5, 4, 6, 2, 7], 3, 10),
        layers_of([5, 3], 4, 5),
        layers_of([9, 8, 8, 9, 5, 1], 3, 16),
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *6 min, medium.* Three jobs, two cards of 8 GiB each, connected by PCIe:
#
# ```
# A  124M parameters, batch 1 x 128 on a card; a step takes 18 ms, and 62 ms with DDP on both cards
# B  774M parameters, AdamW in fp32; out of memory on one card in its first optimizer step, at any batch size
# C  124M parameters, batch 8 x 512 fits one card; a step takes 310 ms, and the epoch a day
# ```
#
# For which of them is DDP, as it is, the cure? And what do the other two need, and why?
#
# <details><summary>Hint</summary>
#
# What does DDP add to a step, and can it be hidden behind backward in each of them? What does each rank of DDP hold?
#
# </details>

# %% answer="copied"
copied = ...
### BEGIN SOLUTION
copied = "C"
### END SOLUTION

# %% check="copied" points=1
lab.check.choice(
    "copied",
    copied,
    "C",
    of=("A", "B", "C"),
    mistakes={
        "A": "Compare the two times of A: what do both cards together do in 62 ms?",
        "B": "How many copies of the model are there with DDP, and how large is each?",
    },
)

# %% answer="why_copied" points=2
why_copied = ...
### BEGIN SOLUTION
why_copied = """A: the gradients of 124M parameters take longer to cross the bus than the tiny batch takes to
compute. It needs a larger batch on each card, or accumulation with no_sync; else it stays on one card.
B: DDP has a whole copy in each rank, so it does not fit there either. It must be sharded with FSDP2 (16 bytes a
parameter over two cards, 5.8 GiB), or its layers split over the cards."""
### END SOLUTION

# %% check="why_copied"
lab.check.words(
    "why_copied",
    why_copied,
    {
        r"gradient|all-?reduce|send|sent|communicat|bus|pcie|transfer|traffic": (
            "What does DDP do in A that takes 44 ms?"
        ),
        r"(larg|bigg|more|great|increas)[^.]*(batch|sequences|tokens)|batch[^.]*(larg|bigg|grow)|accumul|no_sync|"
        r"(one|single) card": (
            "What can be changed in A, so that a step has more to compute for the same bytes?"
        ),
        r"copy|copies|replica|whole model|everything|each (rank|card) (has|holds|needs)|all of (it|them)": (
            "What does each rank of DDP hold in B?"
        ),
        r"shard|fsdp|zero|split|pipeline|layers|device_map|offload|8-?bit": "What makes B fit two cards?",
    },
    against={
        r"(do not|don't) know|no idea": "Say what you do know: what does each rank hold, and what does it send?",
        r"\bb\b[^.]*(smaller batch|accumul)": "B's weights, gradients and state alone are too large: is it the batch?",
        r"(bucket views?|checkpointing)[^.]*\bfits?\b": "What do B's weights, gradients and state take all the same?",
        r"dataparallel (is|would be|makes)": "DataParallel copies the model in every step, too.",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. DDP copies: it makes training faster when each card computes long enough to hide 2 (W - 1) / W times the
#    gradients, and it makes no larger model fit. Bucket views on; `no_sync` while accumulating; DataParallel not at
#    all.
# 2. FSDP2 cuts 16 bytes a parameter by W and leaves activations as they are, for at most 1.5 times the bytes.
# 3. A split by layers sends least; alone it uses one card at a time, and a pipeline lets both work. How many
#    micro-batches pay depends on what it costs to launch them.

# %% name="finish"
lab.finish(
    "Fits one card: DDP with bucket views, and the largest batch per card. Does not fit: FSDP2, then 16 bits or the "
    "host. Poor link: split by layers, with a pipeline. A timeout on every job."
)
