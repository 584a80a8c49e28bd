# ---
# jupyter:
#   labkit:
#     title: Eight bits
#     question: Which bytes can shrink to a quarter, and what does it cost?
#     after: say which of the two techniques called "8-bit" saves what, count it byte by byte, and measure what it costs
#     minutes: {gpu: 2, cpu: 0.6}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom]
#     fetch: [smollm2-135m]
# ---

# %% name="begin"
import contextlib
import copy
import io
import logging
import math
import tempfile

import torch

import labkit as lab
from labkit import extras, measuring, quantising, quiet, training

quiet.transformers()  # imported now, without its complaints
import bitsandbytes as bnb
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

lesson = lab.begin("04_eight_bit")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
device = lab.device()
on_card = device.type == "cuda"
MiB, GiB = 2**20, 2**30
show = lab.show_bytes  # 1536 MiB -> "1.50 GiB"
for name in ("bitsandbytes", "accelerate"):  # they say for each layer and model what they do
    logging.getLogger(name).setLevel(logging.ERROR)
transformers.logging.disable_progress_bar()

# what this card computes in 16 bits by itself; cards before Ampere only emulate bf16
emulated = on_card and not torch.cuda.is_bf16_supported(including_emulation=False)
HALF = torch.float16 if emulated else torch.bfloat16
pretrained = lab.models.has("smollm2-135m")
if not on_card:
    torch.set_num_threads(1)  # most models here are so small that a second core would only wait
LITTLE = {  # a GPT-2 that reads bytes, for what a processor has to train
    "n_layer": 1,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# %% [markdown]
# ## Claims
#
# Two different techniques are called "8-bit". One keeps the *optimizer's state* in 8 bits and is for training. The
# other keeps the *weights* in 8 bits and is for running a model. They are confused so often that the table of claims
# has both.
#
# Words that this lesson uses all the time:
#
# | word | meaning |
# | --- | --- |
# | quantise | replace numbers by the nearest of a few levels, and store only which level it was |
# | absmax | the largest absolute value of a block; all levels are multiples of it |
# | block | neighbouring numbers that share one absmax (the *scale*) |
# | int8 | one byte: 255 levels at equal distances, from minus to plus the absmax |
# | NF4 | 16 levels, closer together near zero, where most weights are ("normal float") |
# | optimizer state | the two running averages (*moments*) that AdamW keeps for each parameter |
# | perplexity | e to the mean loss a token: as uncertain as a fair choice among so many tokens |
# | LoRA | train two thin matrices beside each large one, which stays as it is |
# | QLoRA | LoRA beside weights in 4 bits |
# | managed memory | memory that the driver moves between card and host, page by page |

# %% name="claims"
lab.claim(
    "state",
    "8-bit optimizer states cut the optimizer's memory by 75 %.",
    said_by="documentation, blog posts",
)
lab.claim(
    "paged", "A paged optimizer saves GPU memory.", said_by="forum answers, documentation"
)
lab.claim(
    "xl",
    "int8 weights make GPT-2 XL fit a consumer card.",
    said_by="blog posts",
)
lab.claim("slight", "... at a slight loss of accuracy.", said_by="blog posts")
lab.claim(
    "cure",
    "Where accuracy drops too far, quantise only the optimizer.",
    said_by="a log in the field",
)
lab.claim("speed", "int8 weights make the model faster.", said_by="forum questions")
lab.claim("conv1d", "GPT-2 cannot be loaded in 4 bits.", said_by="forum answers, before 2023")
lab.claims()

# %% [markdown]
# ## Experiment
#
# First the optimizer. bitsandbytes' `AdamW8bit` takes the place of `torch.optim.AdamW` in one line; weights and
# gradients stay as they are, in fp32. `PagedAdamW8bit` keeps the same state in managed memory. The batch is small, one
# sequence of 128 tokens, so that the optimizer is what one sees.

# %% name="guess-state"
lab.guess(
    "state_saved",
    None,
    "How much of AdamW's state does `AdamW8bit` save on GPT-2 124M, to a tenth of a percent?",
    unit="%",
)
lab.guess("peak_saved", None, "And how much of the peak of this small step?", unit="%")

# %% name="optimizers"
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW8bit": bnb.optim.AdamW8bit,
    "PagedAdamW8bit": bnb.optim.PagedAdamW8bit,
}


def full_training(device, optimizer="AdamW", batch=1, seq=128, model="gpt2"):
    with device:
        model = lab.models.gpt2(model, attention="sdpa").train()
        tokens = torch.randint(0, 50257, (batch, seq))
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


by_optimizer = {
    name: lab.measure(
        full_training,
        budget=BUDGET,
        name=f"GPT-2, {name}",
        optimizer=name,
        repeats=5,
        stateless=True,
    )
    for name in OPTIMIZERS
}
for report in by_optimizer.values():
    print(report)
lab.plots.bars(list(by_optimizer.values()))

# %% [markdown]
# *What to see:* the stripe of the optimizer's state shrinks to a quarter. It is only a part of the peak: weights and
# gradients stay, so the peak shrinks by far less than 75 %. In the third bar the stripe is gone: not from the card,
# only from PyTorch's counters. We come back to that.
#
# ### How a number is kept in one byte
#
# Cut a tensor into blocks of 256, keep the largest absolute value of each in fp32, divide by it, and round each number
# to the nearest of 256 levels. bitsandbytes does not space the levels evenly: they are dense near zero (its *dynamic*
# map), because a second moment spans many powers of ten and Adam divides by its root. The cell takes a real second
# moment, that of a small GPT-2's embedding after ten steps of `AdamW`, and keeps it in 8 bits in four ways.

# %% name="levels"
from bitsandbytes import functional

torch.manual_seed(0)
model = lab.models.gpt2("gpt2", attention="sdpa", **LITTLE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
training.train(model, optimizer, lab.data.byte_blocks(seq=64, count=80).split(8))
second = optimizer.state[model.transformer.wte.weight]["exp_avg_sq"].flatten()


def round_trip(values, levels, block):
    codes, state = functional.quantize_blockwise(values, code=levels, blocksize=block)
    return functional.dequantize_blockwise(codes, state)


dynamic = functional.create_dynamic_map(signed=False)  # 256 levels from 0 to 1
even = torch.linspace(0, 1, 256)
rows = []
for name, levels, block in (
    ("even levels, blocks of 4096", even, 4096),
    ("even levels, blocks of 256", even, 256),
    ("dynamic levels, blocks of 4096", dynamic, 4096),
    ("dynamic levels, blocks of 256", dynamic, 256),
):
    back = round_trip(second, levels, block)
    wrong = ((back - second).abs() / second).median()
    rows.append((name, f"{float((back == 0).float().mean()):.1%}", f"{float(wrong):.1%}"))
print(f"{second.numel():,} values from {float(second.min()):.1e} to {float(second.max()):.1e}")
lab.table(("8 bits with", "become zero", "median relative error"), rows)

# %% [markdown]
# A second moment that becomes zero is the dangerous one: Adam divides by its root. Dynamic levels keep small numbers
# apart; small blocks help because one outlier spoils only its own block.

# %% [markdown]
# ## Account
#
# AdamW keeps 8 bytes a parameter. `AdamW8bit` keeps 2, plus two fp32 scales for each block of 256. Tensors with fewer
# than 4096 elements (biases, LayerNorms) keep 32-bit states: they are small, and sensitive (bitsandbytes'
# documentation). Two tables of 256 levels are shared by all. The saving is then a little less than 75 %: each parameter
# of a large tensor takes 2 + 2 · 4 / 256 bytes, of a small one all 8.

# %% name="account"
with torch.device("meta"):  # shapes without memory
    shapes = lab.models.gpt2("gpt2")
elements = [p.numel() for p in shapes.parameters()]
N = sum(elements)
whole = quantising.adam_state_bytes(elements, bits=32)["moments"]
parts = quantising.adam_state_bytes(elements)
formula = sum(parts.values())


def state_of(report):
    """Bytes of the optimizer's state that were alive at the peak."""
    return report.held_by()["optimizer state"]


kept = {name: state_of(report) for name, report in by_optimizer.items()}
small = [n for n in elements if n < quantising.STATE_SMALLEST]
print(
    f"{len(small)} of {len(elements)} tensors are small; together {sum(small):,} of {N:,} parameters"
)
rows = [(f"AdamW: 8 N, N = {N:,}", f"{whole:,}", f"{kept['AdamW']:,}")]
rows += [(f"8 bits: {part}", f"{nbytes:,}", "") for part, nbytes in parts.items()]
rows += [("AdamW8bit", f"{formula:,}", f"{kept['AdamW8bit']:,}")]
rows += [("unexplained", "", f"{kept['AdamW8bit'] - formula:,}")]
lab.table(("bytes", "formula", lesson.source), rows)

# the same with real tensors: one block of GPT-2, one step
block = lab.models.gpt2("gpt2", **LITTLE | {"n_embd": 768}).transformer.h[0].to(device)
optimizer = bnb.optim.AdamW8bit(block.parameters())
block(torch.randn(1, 8, 768, device=device))[0].sum().backward()
optimizer.step()
tensors = {
    t.data_ptr(): t.numel() * t.element_size()
    for state in optimizer.state.values()
    for t in state.values()
    if isinstance(t, torch.Tensor)
}
expected = sum(quantising.adam_state_bytes(p.numel() for p in block.parameters()).values())
print(
    f"one block, really stepped: {sum(tensors.values()):,} bytes, by the formula {expected:,}"
)
del block, optimizer  # or they would be alive in all that is measured below

saved = 1 - kept["AdamW8bit"] / kept["AdamW"]
of_peak = 1 - by_optimizer["AdamW8bit"].peak_bytes / by_optimizer["AdamW"].peak_bytes
lab.answer(
    "state_saved",
    measured=100 * saved,
    formula=100 * (1 - formula / whole),
    note="Scales and small tensors take what is missing to 75 %.",
)
lab.answer(
    "peak_saved",
    measured=100 * of_peak,
    note="AdamW's `foreach` update also makes a temporary copy of the model, which bitsandbytes does not need.",
)
lab.settle(
    "state",
    measured=f"{saved:.2%} of the state, {of_peak:.0%} of the peak of a step with 128 tokens",
    verdict="holds" if abs(saved - 0.75) < 0.01 else "does not hold",
)

# %% [markdown]
# ### Paged: gone from the counters, not from the card
#
# A paged optimizer asks the driver for *managed memory* instead of asking PyTorch's allocator. When the card is full,
# the driver moves it to the host, page by page, and back when it is used (bitsandbytes' documentation; it is not tried
# here, because it takes a whole card). PyTorch's counters never see it, and neither does the budget. The cell asks
# three counters about the same training: PyTorch's, the driver's for this process (what nvidia-smi lists by process),
# and how much less is free on the whole card. Tensors under 100,000 elements are not paged.


# %% name="paged"
def lying_where(name):
    """Bytes that a training takes beyond what was taken before: of this process by the driver, and of the card."""
    if not on_card:
        return None, None
    measuring.release()

    def counters():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return lab.machine.device_bytes(), total - free

    before = counters()
    step = full_training(device, optimizer=name)
    for _ in range(3):
        step()
    return tuple(now - then for now, then in zip(counters(), before, strict=True))


managed = {"PagedAdamW8bit": 2 * sum(n for n in elements if n >= 100_000)}
rows, beyond = [], {}
for name in OPTIMIZERS:
    process, whole_card = lying_where(name)
    process = lab.known("bytes of the process", process, "bytes", what=name)
    whole_card = lab.known("bytes of the card", whole_card, "bytes", what=name)
    counted = (by_optimizer[name].steady.allocated_bytes, process["value"], whole_card["value"])
    cells = (show(n) if n else "–" for n in counted)
    rows.append((name, show(managed.get(name, 0)), *cells, whole_card["label"]))
    if process["value"]:
        beyond[name] = whole_card["value"] - process["value"]
head = (
    "managed, by the formula",
    f"allocated ({lesson.source})",
    "process",
    "whole card",
    "from",
)
lab.table(("optimizer", *head), rows)
hidden = managed["PagedAdamW8bit"]
# alone on the card: what the others leave is in the process's number; then the pages are either there or gone
alone = len(beyond) == 3 and all(abs(beyond[n]) < 0.2 * hidden for n in ("AdamW", "AdamW8bit"))
there = alone and abs(beyond["PagedAdamW8bit"] - hidden) < 0.5 * hidden
gone = alone and abs(beyond["PagedAdamW8bit"]) < 0.2 * hidden
if there or gone:
    lab.settle(
        "paged",
        measured=f"{show(hidden)} leave PyTorch's counters and the process's; the card has "
        f"{show(max(0, beyond['PagedAdamW8bit']))} more in use than the process shows",
        verdict="holds"
        if gone
        else "does not hold: while there is room, the pages lie on the card",
        source=None if on_card else "reference",
        scope=whole_card.get("capability"),
    )
else:
    why_not = "another process uses the card" if beyond else "only a driver can tell"
    lab.settle("paged", measured=why_not, verdict="not measured here")

# %% [markdown]
# ### Does it train as well?
#
# The same training twice, with `AdamW` and with `AdamW8bit`, from the same weights and on the same batches, for three
# seeds. On a card it is SmolLM2-135M that goes on learning, from the source of Python's standard library; without one
# it is a very small GPT-2 that reads bytes. Learning rate and weight decay are the same for both.

# %% name="training"
SEEDS = (0, 1, 2)
real = on_card and pretrained
steps, seq, batch, lr = (20, 256, 4, 5e-5) if real else (8, 64, 8, 3e-3)
count = steps * batch
if real:
    words = lab.models.tokenizer("smollm2-135m")
    start = lab.models.pretrained("smollm2-135m", device=device)

    def blocks(count, **where):
        return lab.data.token_blocks(words, seq=seq, count=count, **where)
else:

    def blocks(count, **where):
        return lab.data.byte_blocks(seq=seq, count=count, **where)


held_out = blocks(16, split="held-out")
batches = {seed: blocks(count, seed=seed).split(batch) for seed in SEEDS}


def trained(optimizer, seed):
    """Losses of each step, and the held-out loss at the end, in nats a token."""
    torch.manual_seed(seed)
    if real:
        model = copy.deepcopy(start)
    else:
        model = lab.models.gpt2("gpt2", attention="sdpa", **LITTLE).to(device)
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=lr, weight_decay=0.01)
    history = training.train(model, optimizer, batches[seed])
    return history.losses, training.evaluate(model, held_out)


curves, final = {}, {}
for name in ("AdamW", "AdamW8bit"):
    runs = [trained(name, seed) for seed in SEEDS]
    curves[name] = list(zip(*(losses for losses, _ in runs), strict=True))  # by step
    final[name] = training.Spread.of(loss for _, loss in runs)
    values = {"values": final[name].values, "steps": steps}
    lab.fact("held-out loss", final[name].mean, "nats", what=name, **values)
    print(f"{name:10s} held-out loss {final[name]}")
gaps = [b - a for a, b in zip(final["AdamW"].values, final["AdamW8bit"].values, strict=True)]
start = None  # not alive in what is measured below, either
print("AdamW8bit minus AdamW, seed by seed:", *(f"{gap:+.4f}" for gap in gaps))
across = list(range(1, steps + 1))
by_seed = zip(
    zip(*curves["AdamW8bit"], strict=True), zip(*curves["AdamW"], strict=True), strict=True
)
lab.plots.lines(
    {
        f"seed {seed}": (across, [b - a for b, a in zip(eight_bits, whole_bits, strict=True)])
        for seed, (eight_bits, whole_bits) in zip(SEEDS, by_seed, strict=True)
    },
    x="step",
    y="nats a token",
    title="training loss, AdamW8bit minus AdamW",
    source="measured" if on_card else "cpu",
)
# %% [markdown]
# *What to see:* the trainings begin alike and then part a little, to both sides of zero. The printed lines say how that
# compares with the difference between seeds, which have batches and, without a card, weights of their own.
#
# ### Weights in 8 and 4 bits
#
# Now the other technique, for running a model. What shrinks when, for GPT-2 124M, by arithmetic from the shapes:

# %% name="pair"
matrices = quantising.products(shapes)
lora = sum(
    16 * (inputs + outputs) for inputs, outputs in matrices.values()
)  # rank 16 beside each
eight = {
    scheme: sum(quantising.weight_bytes(shapes, scheme).values()) for scheme in ("fp32", "int8")
}
rows = [
    ("AdamW, fp32 weights", eight["fp32"], 4 * N, whole, "yes, all"),
    ("AdamW8bit, fp32 weights", eight["fp32"], 4 * N, formula, "yes, all"),
    ("int8 weights", eight["int8"], 0, 0, "no: they only run"),
    (
        "int8 weights, LoRA, AdamW",
        eight["int8"] + 4 * lora,
        4 * lora,
        8 * lora,
        f"{lora / N:.1%}",
    ),
]
lab.table(
    ("", "weights", "gradients", "optimizer state", "trains"),
    [(name, *map(show, nbytes), trains) for name, *nbytes, trains in rows],
)

# %% [markdown]
# transformers loads a model quantised when `quantization_config` asks for it (the argument `load_in_8bit=` that older
# texts give to `from_pretrained` is gone). `device_map` says where each part goes. Only the matrices inside the blocks
# are quantised; embeddings, head, LayerNorms and biases stay.
#
# On cards before Ampere (Turing: RTX 20, T4) int8 works as well, but they only emulate bf16: give `torch.float16` as
# `dtype` and as `bnb_4bit_compute_dtype`, as the first cell of this lesson does by itself. No such card was at hand.
#
# A rise of the perplexity by less than 2 % is called *slight* below. And 8-bit states count as a *cure* when what they
# change is less than a tenth of what NF4 weights do.

# %% name="guess-quality"
lab.guess(
    "int8_quality", None, "By how many percent does int8 raise SmolLM2's perplexity?", unit="%"
)
lab.guess("nf4_quality", None, "And NF4?", unit="%")

# %% name="quality"
work = HALF if on_card else torch.float32  # for the products; a processor is fastest in fp32
SCHEMES = {
    "fp32": {"dtype": torch.float32},
    "bf16": {},  # the model in fp32, rounded
    "int8": {"dtype": work, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "nf4": {
        "dtype": work,
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=work
        ),
    },
}


def score(model, text):
    """Loss of each token (nats), and the logits of the first block."""
    losses, first = [], None
    with torch.no_grad():
        for part in text.split(4):
            part = part.to(device)
            logits = model(input_ids=part, use_cache=False).logits.float()
            first = logits[0] if first is None else first
            scores, targets = logits[:, :-1].flatten(0, 1), part[:, 1:].flatten()
            losses.append(torch.nn.functional.cross_entropy(scores, targets, reduction="none"))
    return torch.cat(losses), first


def in_bf16(model):
    """A copy with its weights rounded to bf16; tables of positions stay as they are."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


if pretrained:
    words = lab.models.tokenizer("smollm2-135m")
    count, seq = (32, 512) if on_card else (1, 32)
    text = lab.data.token_blocks(words, seq=seq, count=count, split="held-out")
    rows = []
    plain_model = lab.models.pretrained(
        "smollm2-135m", device_map={"": device}, **SCHEMES["fp32"]
    )
    for scheme, how in SCHEMES.items():
        if scheme == "fp32":
            model = plain_model
        elif scheme == "bf16":
            model = in_bf16(plain_model)
        else:
            model = lab.models.pretrained("smollm2-135m", device_map={"": device}, **how)
        held = sum(quantising.held_bytes(model).values())
        if scheme == "bf16" and (emulated or not on_card):
            model.float()  # rounded weights, products in fp32: what this machine does fast
        losses, logits = score(model, text)
        if scheme == "fp32":
            plain_losses, plain_logits = losses, logits
        more = losses - plain_losses
        found = {
            "tokens": len(losses),
            "more": float(more.mean()),
            "error": float(more.std() / len(more) ** 0.5),
            "logits": float((logits - plain_logits).norm() / plain_logits.norm()),
            "largest": float((logits - plain_logits).abs().max()),
            "bytes": held,
        }
        rows.append(lab.fact("loss", float(losses.mean()), "nats", what=scheme, **found))
        del model, logits
    del plain_logits
else:
    rows = []
    print("SmolLM2-135M is not here: `labkit fetch` brings it.")


def changes(loss):
    """How much larger the perplexity is when the loss is larger by so much."""
    return math.exp(loss) - 1


def line(row):
    changed = f"{changes(row['more']):+.2%} ± {math.exp(row['more']) * row['error']:.2%}"
    held, perplexity = show(row["bytes"]), f"{math.exp(row['value']):.3f}"
    distance = f"{row['logits']:.1%}", f"{row['largest']:.2f}"
    return row["what"], held, perplexity, changed, *distance, f"{row['tokens']:,}", row["label"]


known = [row for row in lab.reference("loss") if not on_card]
order = {scheme: i for i, scheme in enumerate(SCHEMES)}
known.sort(key=lambda row: (row["card"], order[row["what"]]))
head = ("weights", "bytes", "perplexity", "change", "logits differ by", "largest", "tokens", "")
lab.table(head, [line(row) for row in (*rows, *known)])

# %% [markdown]
# *Change* is against fp32, ± its standard error: the four models score the same tokens, so the difference is known
# better than the perplexity. With as few tokens as a processor can do here, it is still too coarse to judge int8 by.
# (The perplexity is high there because the first tokens of a text are the hardest to guess.)
#
# The weights of this SmolLM2 come from a file in 4 bits (blocks of 32 numbers with 16 even levels each), de-quantised
# once. So *fp32* here is not the model as it was trained, and what was lost then shows in no row: read changes, not
# perplexities. The next cell looks whether the history helps NF4, whose levels are others: then NF4 would change these
# weights less than it changes random numbers.


# %% name="history"
def nf4_error(values):
    packed, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    back = functional.dequantize_4bit(packed, state)
    return float((back - values).norm() / values.norm())


if pretrained:
    weight = plain_model.model.layers[10].mlp.up_proj.weight.data
    distinct = max(len(block.unique()) for block in weight.reshape(-1, 32)[:1000])
    print(f"one matrix of SmolLM2: at most {distinct} different values in a block of 32")
    print(
        f"NF4 changes it by {nf4_error(weight):.2%}, normal random numbers by {nf4_error(torch.randn_like(weight)):.2%}"
    )
    del plain_model

# %% name="settle-quality"
decisive = {row["what"]: row for row in rows if on_card} or {row["what"]: row for row in known}
decisive = decisive or {row["what"]: row for row in rows}
if "nf4" in decisive:
    told = decisive["nf4"]
    source = "reference" if told["label"].startswith("reference") else told["source"]
    where = {"source": source, "scope": told.get("capability")}
    change = {scheme: changes(row["more"]) for scheme, row in decisive.items()}
    for scheme in ("int8", "nf4"):
        lab.answer(f"{scheme}_quality", measured=100 * change[scheme], source=source)
    slight = 0.02  # what we call slight
    coarse = decisive["int8"]["error"] > slight / 4  # too few tokens cannot tell
    lab.settle(
        "slight",
        measured=f"perplexity: int8 {change['int8']:+.1%}, NF4 {change['nf4']:+.1%}, of SmolLM2-135M; "
        f"slight: below {slight:.0%}",
        verdict="not measured here: too few tokens"
        if coarse
        else "holds"
        if change["int8"] < slight
        else "does not hold",
        **where,
    )
    runs = {row["what"]: row["values"] for row in lab.reference("held-out loss")}
    if source != "reference" or len(runs) < 2:
        runs = {name: spread.values for name, spread in final.items()}
    gap = sum(runs["AdamW8bit"]) / len(SEEDS) - sum(runs["AdamW"]) / len(SEEDS)
    cured = abs(changes(gap)) < 0.1 * change["nf4"]
    lab.settle(
        "cure",
        measured=f"perplexity: NF4 weights {change['nf4']:+.1%}, 8-bit state {changes(gap):+.2%}",
        verdict="holds when memory is short in training: the weights stay as large as they were"
        if cured
        else "does not hold",
        **where,
    )
else:
    for scheme in ("int8", "nf4"):
        lab.answer(f"{scheme}_quality", measured=None)
    for key in ("slight", "cure"):
        lab.settle(key, measured="needs SmolLM2", verdict="not measured here")

# %% [markdown]
# ### GPT-2 and its Conv1D
#
# GPT-2's matrices are of a class of transformers' own, `Conv1D`, with rows and columns exchanged. Until 2023
# bitsandbytes' loader only knew `nn.Linear` and found nothing to replace. The cell saves a small GPT-2, loads it in 4
# bits and lists which classes it has now.

# %% name="conv1d"
little = lab.models.gpt2("gpt2", attention="sdpa", **LITTLE)
with tempfile.TemporaryDirectory() as folder:
    little.save_pretrained(folder)
    in_4_bits = AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": device}, **SCHEMES["nf4"]
    )
before = {name: type(module).__name__ for name, module in little.named_modules()}
after = {name: type(module).__name__ for name, module in in_4_bits.named_modules()}
shown = [
    name
    for name in before
    if name.endswith(("wte", "wpe", "c_attn", "c_fc", "c_proj", "lm_head"))
]
lab.table(("module", "was", "is"), [(name, before[name], after[name]) for name in shown])
conv1d = [name for name in before if before[name] == "Conv1D"]
replaced = [name for name in conv1d if after[name] == "Linear4bit"]
lab.settle(
    "conv1d",
    measured=f"{len(replaced)} of {len(conv1d)} Conv1D became Linear4bit",
    verdict="does not hold" if replaced == conv1d else "holds",
    source="measured" if on_card else "cpu",
)

# %% [markdown]
# ### GPT-2 XL under the budget
#
# 1.56 billion parameters. The arithmetic follows from the shapes; the run builds the model with random weights in 16
# bits, quantises the blocks one matrix after the other, and reads 1024 tokens. (It holds 16 bits for a moment; with
# weights from a file, `from_pretrained` reads and quantises one matrix at a time.)

# %% name="guess-xl"
lab.guess("xl_nf4", None, "Weights of GPT-2 XL in NF4 (embeddings in 16 bits)?", unit="GiB")


# %% name="xl"
def quantised_xl(device, scheme, model="gpt2-xl"):
    dtype = {"fp32": torch.float32, "int8": torch.float16}.get(scheme, HALF)
    config = lab.models.config(model, use_cache=False)
    model = lab.models.causal_lm(config, device=device, dtype=dtype).eval()
    if scheme in ("int8", "nf4"):
        quantising.quantise_blocks(model, scheme)  # what quantization_config does, in place
    return model


def reading(device, scheme="bf16", seq=1024):
    """Run a model without training it: logits of one sequence."""
    model = quantised_xl(device, scheme)
    with device:
        tokens = torch.randint(0, 50257, (1, seq))

    def step():
        with torch.no_grad():
            return model(input_ids=tokens).logits[0, -1, 0]

    step.tokens = seq
    return step


with torch.device("meta"):
    xl = lab.models.gpt2("gpt2-xl")
quick = {"budget": BUDGET, "stateless": True, "nearest": False, "repeats": 0}
reading_xl, rows = {}, []
for scheme in quantising.SCHEMES:
    counted = quantising.weight_bytes(xl, scheme)
    report = lab.measure(reading, name=f"GPT-2 XL, {scheme}", scheme=scheme, **quick)
    reading_xl[scheme] = report
    parts_gib = (f"{counted[part] / GiB:.2f}" for part in ("blocks", "scales", "rest"))
    peak = f"{report.peak_bytes / GiB:.2f}" if report.ok else "out of memory"
    rows.append((scheme, *parts_gib, f"{sum(counted.values()) / GiB:.2f}", peak))
print("GPT-2 XL reads 1024 tokens; all numbers in GiB, the peak", lesson.source)
lab.table(("weights", "blocks", "scales", "the rest", "together", "peak"), rows)
in_nf4 = reading_xl["nf4"].held_by()
lab.answer(
    "xl_nf4",
    measured=(in_nf4["parameter"] + in_nf4["input"]) / GiB if reading_xl["nf4"].ok else None,
    formula=sum(quantising.weight_bytes(xl, "nf4").values()) / GiB,
    note="Half a byte for each weight in the blocks, 4 bytes for each 64 of them, 2 bytes for the rest.",
)
peaks = {scheme: report.peak_bytes for scheme, report in reading_xl.items() if report.ok}
said = ", ".join(f"{scheme} {show(nbytes)}" for scheme, nbytes in peaks.items())
if "bf16" in peaks:
    lab.settle(
        "xl",
        measured=f"reading 1024 tokens peaks at: {said}; budget {show(BUDGET)}",
        verdict=f"holds when the budget lies between {show(peaks['int8'])} and {show(peaks['bf16'])}: above that "
        "16 bits fit as well"
        if "int8" in peaks
        else "does not hold",
    )
else:
    lab.settle("xl", measured="too small a budget to build it", verdict="not measured here")
lab.plots.bars(list(reading_xl.values()))

# %% [markdown]
# *What to see:* nearly the whole bar is weights (what is called *input* under NF4 are their scales, which are no
# parameters of the model). Training is another matter: gradients and state come on top, and int8 weights do not train
# at all (see *Negative control*).
#
# ### int8 is for fitting, not for speed
#
# One forward pass, for one token (as when a model writes a text) and for 1024 (as when it reads one).


# %% name="speed"
def seconds(scheme):
    """Of one forward pass, for 1 and for 1024 tokens."""
    if not on_card:
        return {1: None, 1024: None}
    measuring.release()
    times = {}
    with lab.budget(BUDGET), torch.no_grad():
        model = quantised_xl(device, scheme)
        for seq in (1, 1024):
            tokens = torch.zeros(1, seq, dtype=torch.long, device=device)
            timing = lab.time_step(
                lambda tokens=tokens: model(input_ids=tokens),
                device=device,
                repeats=20,
                max_seconds=1.0,
            )
            times[seq] = timing.median_seconds
    return times


took, rows = {}, []
for scheme in ("bf16", "int8", "nf4"):
    for seq, value in seconds(scheme).items():
        took[scheme, seq] = lab.known("forward", value, "s", what=f"{scheme}, {seq} tokens")
    if took[scheme, 1]["value"]:
        shown = (lab.show_seconds(took[scheme, n]["value"]) for n in (1, 1024))
        rows.append((scheme, *shown, took[scheme, 1]["label"]))
if rows:
    lab.table(("GPT-2 XL", "1 token", "1024 tokens", "from"), rows)
    ratio = {n: took["int8", n]["value"] / took["bf16", n]["value"] for n in (1, 1024)}
    faster = [n for n in ratio if ratio[n] < 1]
    lab.settle(
        "speed",
        measured=f"int8 takes {ratio[1]:.1f} times as long as 16 bits for 1 token, "
        f"{ratio[1024]:.1f} times for 1024",
        verdict="holds"
        if len(faster) == 2
        else f"holds when {faster[0]} tokens are read at once"
        if faster
        else "does not hold",
        source=None if on_card else "reference",
        scope=took["int8", 1].get("capability"),
    )
else:
    lab.settle("speed", measured="time needs a card", verdict="not measured here")

# %% [markdown]
# int8 products quantise the inputs as well, in every forward pass, and treat columns with *outliers* (inputs above 6)
# apart, in 16 bits (the LLM.int8() method); NF4 products unpack the weight first. That is work on top of the product.
# It pays where reading the weights is all that takes time, and only if unpacking is cheaper than reading them.
#
# ### When even that is too large: some layers on the host
#
# `device_map` may put modules on the host. Beside int8 that needs `llm_int8_enable_fp32_cpu_offload=True`: what lies on
# the host is not quantised, and each forward pass brings it to the card. It is for running, not for training.


# %% name="spill"
def spilled(layers_on_card):
    """SmolLM2 in int8 with its last layers on the host: bytes on the card, seconds of a forward pass, two classes."""
    ends = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(ends, 0)
    for i in range(30):
        places[f"model.layers.{i}"] = 0 if i < layers_on_card else "cpu"
    measuring.release()
    before = torch.cuda.memory_allocated()
    model = lab.models.pretrained(
        "smollm2-135m",
        dtype=torch.float16,
        device_map=places,
        quantization_config=BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=True
        ),
    )
    held = torch.cuda.memory_allocated() - before
    kinds = [type(model.model.layers[i].mlp.up_proj).__name__ for i in (0, 29)]

    def step():
        with torch.no_grad():
            return model(input_ids=text[:1].to(device), use_cache=False).logits

    took = lab.time_step(step, device=device, repeats=3).median_seconds
    return held, took, f"{kinds[0]}, {kinds[1]}"


rows, spent = [], {}
for layers_on_card in (30, 20):
    here = spilled(layers_on_card) if real else (None, None, None)
    what = f"{layers_on_card} of 30 layers on the card"
    held = lab.known("spilled bytes", here[0], "bytes", what=what, classes=here[2])
    timed = lab.known("spilled seconds", here[1], "s", what=what)
    if held["value"]:
        spent[layers_on_card] = timed["value"]
        cells = (show(held["value"]), lab.show_seconds(timed["value"]), held["classes"])
        rows.append((what, *cells, held["label"]))
if rows:
    lab.table(("int8", "held on the card", "512 tokens", "first and last layer", "from"), rows)
    if spent[20] < spent[30]:
        print(
            "With layers on the host it is faster here: their products are plain 16-bit ones. Bringing"
            "\nthese small matrices over seems to cost less than the int8 method does with them."
        )
else:
    print("A card and SmolLM2 are needed, and there is no reference row.")

# %% [markdown]
# ### Embeddings in 8 bits
#
# An embedding is a table that is looked up, not multiplied: int8 values and one scale for each row are enough. But
# GPT-2 and SmolLM2 use the same table once more as the head (*tied* weights). Who quantises the embedding alone has the
# table twice afterwards, and the model has grown.

# %% name="embedding"
table = torch.randn(4096, 576) * 0.02
in_int8 = bnb.nn.Embedding8bit(*table.shape)
in_int8.weight.data = table.clone()
in_int8 = in_int8.to(device)  # it quantises when it is moved
back = in_int8(torch.arange(4096, device=device)).cpu()
held = quantising.held_bytes(in_int8)
print(
    f"Embedding8bit: {held['quantised'] + held['scales']:,} bytes for {table.numel():,} values,"
)
print(f"which differ by {float((back - table).norm() / table.norm()):.2%}")
words_, width = xl.config.vocab_size, xl.config.n_embd
in_16, in_8 = 2 * words_ * width, words_ * width + 4 * words_
rows = [
    ("one table for both, 16 bits", in_16),
    ("embedding in int8, head in 16 bits", in_8 + in_16),
    ("one table for both, int8", in_8),
]
lab.table(("embedding and head of GPT-2 XL", "bytes"), [(what, show(n)) for what, n in rows])

# %% [markdown]
# ### Training with the rounding in it
#
# *Quantisation-aware training* (QAT) rounds the weights in each forward pass, as the quantised model will, and lets the
# gradient through as if nothing had been rounded. The weights settle where rounding hurts less. torchao does it with
# one call. The model is the smallest that has an embedding: it guesses the next byte from the last one.

# %% name="qat"
from torchao.quantization import quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

BITS = {8: torch.int8, 4: torch.int4, 2: torch.int2}
seen = lab.data.byte_blocks(seq=129, count=256)
unseen = lab.data.byte_blocks(seq=129, count=64, split="held-out")


def rounding(model, bits):
    """`model` with its embedding rounded to so many bits in each forward pass, 32 numbers to a scale."""
    config = IntxFakeQuantizeConfig(BITS[bits], granularity=PerGroup(32), is_symmetric=True)
    quantize_(
        model,
        QATConfig(weight_config=config, step="prepare"),
        filter_fn=lambda module, name: isinstance(module, torch.nn.Embedding),
    )
    return model


def next_byte_loss(model, blocks):
    scores = model(blocks[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(scores, blocks[:, 1:].flatten())


def taught(bits=None, steps=48):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
    model = rounding(model, bits) if bits else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for step in range(steps):
        next_byte_loss(model, seen[step % 16 :: 16]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


with_all_bits = taught()
with torch.no_grad():
    base = float(next_byte_loss(with_all_bits, unseen))
rows = []
for bits in BITS:
    ways = {"afterwards": rounding(copy.deepcopy(with_all_bits), bits), "aware": taught(bits)}
    with torch.no_grad():
        more = {way: float(next_byte_loss(model, unseen)) - base for way, model in ways.items()}
    lab.fact(
        "embedding, rounded afterwards",
        more["afterwards"],
        "nats",
        what=f"{bits} bits",
        source="cpu",
    )
    lab.fact(
        "embedding, rounded in training",
        more["aware"],
        "nats",
        what=f"{bits} bits",
        source="cpu",
    )
    rows.append((f"{bits} bits", *(f"{n:+.4f}" for n in more.values())))
print(
    f"held-out loss with 32 bits: {base:.4f} nats (on the processor); with a rounded embedding it is more by"
)
lab.table(("embedding in", "rounded after training", "rounded in training (QAT)"), rows)

# %% [markdown]
# With 8 bits there is nothing that QAT could win back, with 4 bits little; with 2 bits (four levels) there is.
#
# ### What calibrated methods add: GPTQ and AWQ
#
# int8 and NF4 look at the weights alone. *GPTQ* (Frantar et al., 2022) also looks at inputs, from a calibration text:
# it rounds a matrix column by column and changes the columns that are left, so that they make up for the error. *AWQ*
# (Lin et al., 2023) finds channels with large inputs and scales their weights up before it rounds. The cell has the
# core of both, on one matrix with made-up inputs: neighbouring channels go together and a few are strong, as in a
# transformer. Errors are those on inputs that were not used for calibration.


# %% name="gptq"
def rounded(weight, bits=4, scale=None):
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / most if scale is None else scale
    return (weight / scale).round().clamp(-most - 1, most) * scale


def gptq(weight, inputs, bits=4):
    weight, scale = weight.clone(), weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    hessian = inputs.T @ inputs
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    for j in range(weight.shape[1]):
        column = weight[:, j : j + 1].clone()
        weight[:, j : j + 1] = rounded(column, bits, scale)
        error = (column - weight[:, j : j + 1]) / inverse[j, j]
        weight[:, j + 1 :] -= error * inverse[j, j + 1 :]
    return weight


def awq(weight, inputs, bits=4):
    candidates = []
    for power in (0, 0.25, 0.5, 0.75):
        factor = inputs.abs().mean(0) ** power
        changed = rounded(weight * factor, bits) / factor
        candidates.append((float((inputs @ (changed - weight).T).norm()), power, changed))
    return min(candidates, key=lambda found: found[0])[2]


torch.manual_seed(0)
strength = torch.ones(256)
strength[torch.randperm(256)[:6]] = 20
mix = torch.eye(256) + torch.randn(256, 256) / 16
calibration, other = ((torch.randn(2048, 256) @ mix) * strength).split(1024)
weight = torch.randn(256, 256) / 16
wanted = other @ weight.T
rows = []
for name, changed in (
    ("rounded to the nearest", rounded(weight)),
    ("AWQ", awq(weight, calibration)),
    ("GPTQ", gptq(weight, calibration)),
):
    rows.append((name, f"{float((other @ changed.T - wanted).norm() / wanted.norm()):.1%}"))
lab.table(("4 bits", "output differs by"), rows)

if extras.has("gptq") and pretrained:
    from labkit import fetch

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from gptqmodel import GPTQModel, QuantizeConfig

        model = GPTQModel.load(
            str(fetch.path("smollm2-135m")),
            QuantizeConfig(bits=4, group_size=64),
            device=str(device),
        )
        examples = [source[:4000] for _, source in lab.data.stdlib("train").files[:64]]
        model.quantize(examples, batch_size=1)
        with tempfile.TemporaryDirectory() as folder:
            model.save(folder)
            model = GPTQModel.load(folder, device=str(device))
        losses, _ = score(model.model, text)
    row = lab.fact("loss in GPTQ", float(losses.mean()), "nats", tokens=len(losses))
    print(f"GPTQ, 4 bits: perplexity {math.exp(row['value']):.3f} on {len(losses):,} tokens")
    del model
else:
    extras.missing("gptq", "GPTQ of a whole model is not measured")

# %% [markdown]
# ## Equivalence
#
# Nothing in this lesson computes the same thing; it must compute *nearly* the same, and how near follows from the
# levels.
#
# **One product.** Rounding to steps of size q changes a number by q / √12 on average (root of the mean square). In a
# row of int8 weights q is the absmax / 127. The inputs are rounded in the same way, row by row, and errors that have
# nothing to do with each other add up like the sides of a right triangle. We tolerate a tenth more than that.
#
# **One step of Adam.** The update is computed in fp32 from the moments as they were stored. Before the first step they
# are zero, which is one of the levels: the first step is exact. Later ones carry the error of the stored moments, a
# few percent of a step; it does not add up, because each step rounds anew. Tolerance: fp32 rounding for the first
# step, 5 % for all steps together.


# %% name="equivalence"
class Matrix(torch.nn.Module):
    """A model whose only block is one matrix, for `quantise_blocks`."""

    def __init__(self, layer):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(copy.deepcopy(layer))])


def rounding_error(values):
    """Mean error of int8 rounding, row by row, relative to the size of the numbers."""
    q = values.abs().amax(1) / 127
    return float((q / math.sqrt(12)).square().mean().sqrt() / values.square().mean().sqrt())


torch.manual_seed(0)
inputs = torch.randn(256, 768, device=device)
layer = torch.nn.Linear(768, 768, bias=False, device=device)
torch.nn.init.normal_(layer.weight, std=0.02)
rows = []
with torch.no_grad():
    exact = layer(inputs)
    quantised = quantising.quantise_blocks(Matrix(layer), "int8").eval().blocks[0](inputs)
    differs = float((quantised - exact).norm() / exact.norm())
    bound = 1.1 * math.hypot(rounding_error(layer.weight), rounding_error(inputs))
rows.append(("product with int8 weights", f"{differs:.2%}", f"{bound:.2%}", differs <= bound))


def way(optimizer, steps):
    """How far a matrix is moved by so many steps, with the same gradients for every optimizer."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(256, 256, device=device) * 0.02)
    chosen = OPTIMIZERS[optimizer]([weight], lr=1e-3, weight_decay=0.01)
    start = weight.detach().clone()
    for _ in range(steps):
        weight.grad = torch.randn(256, 256, device=device) * 10 ** torch.randn(
            256, 1, device=device
        )
        chosen.step()
    return weight.detach() - start


for steps_, bound in ((1, 1e-4), (2, 0.05), (10, 0.05), (50, 0.05)):
    exact, eight_bit = way("AdamW", steps_), way("AdamW8bit", steps_)
    differs = float((eight_bit - exact).norm() / exact.norm())
    name = f"AdamW8bit, moved after {steps_} step{'s' if steps_ > 1 else ''}"
    rows.append(
        (
            name,
            f"{differs:.2g}",
            f"{bound:.0e}" if steps_ == 1 else f"{bound}",
            differs <= bound,
        )
    )
lab.table(("", "differs by", "tolerance", "within"), rows)

# %% [markdown]
# Perplexity is the third measure: its change by scheme stands above, with the tolerance that we called slight, 2 %.
#
# ## Negative control
#
# LoRA is the other way to fit: the large weights are frozen and have neither gradients nor state; only thin matrices
# beside them train. QLoRA keeps the frozen weights in NF4. What is left for 8-bit states to save? GPT-2 XL, one
# sequence of 512 tokens.

# %% name="guess-lora"
lab.guess(
    "lora_saved",
    None,
    "QLoRA on GPT-2 XL: by how many percent do 8-bit states lower the peak?",
    unit="%",
)

# %% name="lora"
from peft import LoraConfig, get_peft_model


def adapters(device, weights="nf4", optimizer="AdamW", batch=1, seq=512, model="gpt2-xl"):
    config = lab.models.config(model, use_cache=False)
    model = lab.models.causal_lm(config, device=device, dtype=HALF)
    if weights == "nf4":
        quantising.quantise_blocks(model, "nf4")
    lora = LoraConfig(
        r=16,
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=weights != "nf4",  # Conv1D has rows and columns exchanged
    )
    with (
        device,
        contextlib.redirect_stderr(io.StringIO()),
    ):  # where peft names what will be renamed
        tokens = torch.randint(0, 50257, (batch, seq))
        model = get_peft_model(model, lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[optimizer](trained, lr=1e-4)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


qlora = {
    name: lab.measure(adapters, name=f"GPT-2 XL, QLoRA, {name}", optimizer=name, **quick)
    for name in ("AdamW", "AdamW8bit")
}
rows = [
    (r.name, show(r.peak_bytes), show(state_of(r))) if r.ok else (r.name, "out of memory", "")
    for r in qlora.values()
]
lab.table(("1 x 512", f"peak, {lesson.source}", "optimizer state"), rows)
many = sum(p.numel() for p in xl.parameters())
in_16, in_nf4 = (
    sum(quantising.weight_bytes(xl, scheme).values()) for scheme in ("bf16", "nf4")
)
print(
    f"By the shapes: LoRA beside weights in 16 bits takes {show(in_16 - in_nf4)} more;\n"
    f"training all weights with AdamW takes {show(16 * many)} before the first activation, "
    f"{show(8 * many)} of it state."
)
both = qlora["AdamW"].ok and qlora["AdamW8bit"].ok
lab.answer(
    "lora_saved",
    measured=100 * (1 - qlora["AdamW8bit"].peak_bytes / qlora["AdamW"].peak_bytes)
    if both
    else None,
    formula=100
    * (state_of(qlora["AdamW"]) - state_of(qlora["AdamW8bit"]))
    / qlora["AdamW"].peak_bytes
    if both
    else None,
    note="The state is that of a few thin matrices. Its three quarters are next to nothing.",
)

# %% [markdown]
# ## Pitfalls
#
# **"I load in 8 bits, and training still runs out."** Quantised weights save weights. What training adds is gradients,
# state and activations, and quantised weights do not train. For the state, change the optimizer; to train beside
# quantised weights, add LoRA.
#
# **Under a paged optimizer nvidia-smi's total is larger than everything that PyTorch counts.** Managed memory is in no
# counter of PyTorch, and not in the driver's number for the process either. (bitsandbytes#801)
#
# **int8 is several times slower than 16 bits.** Its kernels were made to fit a model, not to be fast at small batches.
# If 16 bits fit, use them. (bitsandbytes#490)
#
# **"no linear modules were found" on GPT-2.** `Conv1D`, with a version from before 2023: upgrade. For LoRA on GPT-2 in
# 16 bits set `fan_in_fan_out=True`; on its quantised layers, which are `Linear`, leave it. (bitsandbytes#629)
#
# **"can't train a model loaded in 8-bit with CPU or disk offload".** Device maps are for running. To train, keep the
# whole model on the card, or offload the optimizer (lesson 05). (textgen#3368)
#
# **The loss changed with the optimizer.** `Adam8bit` decays no weights by default, `AdamW8bit` and `torch.optim.AdamW`
# do (0.01). Set `weight_decay` yourself when you compare.
#
# **Training is unstable with 8-bit states.** The embedding is the first suspect (bitsandbytes' documentation): keep its
# state in 32 bits with `bnb.optim.GlobalOptimManager.get_instance().register_module_override(module, "weight",
# {"optim_bits": 32})`, before the optimizer is made.

# %% [markdown]
# ## Exercise 1
#
# *4 min, medium.* A linear layer of GPT-2 medium has a weight of 1024 x 4096 and a bias of 4096. How many **KiB** does
# `AdamW8bit` keep for these two tensors? The tables that all tensors share do not count.
#
# <details><summary>Hint</summary>
#
# Per tensor: one byte for each value and moment, and for each moment one fp32 scale for each 256 values. Is the bias
# *under* 4096 elements? Divide by 1024.
#
# </details>

# %% answer="state_kib"
state_kib = ...
### BEGIN SOLUTION
weight_, bias_ = 1024 * 4096, 4096  # the bias has 4096 elements, which is not under 4096
state_kib = sum(2 * n + 2 * 4 * n / 256 for n in (weight_, bias_)) / 1024
### END SOLUTION

# %% check="state_kib" points=1
lab.check.number(
    "state_kib",
    state_kib,
    (1024 * 4096 + 4096) * (2 + 8 / 256) / 1024,
    unit="KiB",
    tolerance=0.0005,
    mistakes={
        (1024 * 4096 + 4096) * 2 / 1024: ("The scales are missing.", 0.5),
        (1024 * 4096 * (2 + 8 / 256) + 8 * 4096) / 1024: (
            "This has 32-bit states for the bias: which tensors keep them?",
            0.5,
        ),
        1024 * 4096 * (2 + 8 / 256) / 1024: ("The bias is missing.", 0.5),
        (1024 * 4096 + 4096) * (2 + 4 / 256) / 1024: (
            "Each moment has scales of its own.",
            0.5,
        ),
        (1024 * 4096 * 2 + 8 * 4096)
        / 1024: "Two things are off: the scales are missing, and look at the bias again.",
        (1024 * 4096 + 4096) * (1 + 4 / 256) / 1024: "This is one moment: how many has Adam?",
        (1024 * 4096 + 4096) / 1024: "This is one moment, without scales.",
        (1024 * 4096 + 4096) * 8 / 1024: "This is AdamW with 32-bit states.",
        (1024 * 4096 + 4096) * (2 + 8 / 64) / 1024: "Blocks of 64 are those of NF4 weights.",
        (1024 * 4096 + 4096)
        * (2 + 8 / 4096)
        / 1024: "4096 is the size below which a tensor stays in 32 bits; how long is a block?",
    },
    hint="One byte for each value and moment, and the scales.",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* Write `int8_rows(weight)` for a float matrix: it returns `codes`, an int8 tensor of the same shape,
# and `scales`, one number for each row, such that `codes * scales[:, None]` is as near to `weight` as 255 even levels
# from -127 to 127 allow. A row of zeros must come back as zeros.
#
# <details><summary>Hint</summary>
#
# The largest absolute value of a row becomes 127. `round()` before you turn it into int8: `.to(torch.int8)` only cuts
# off. What do you divide by in a row of zeros?
#
# </details>


# %% answer="int8_rows"
def int8_rows(weight):
    ### BEGIN SOLUTION
    scales = weight.abs().amax(dim=1) / 127
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (weight / divisor[:, None]).round().to(torch.int8)
    return codes, scales
    ### END SOLUTION


# %% check="int8_rows" points=2
def nearly(weight):
    """What `lab.check.code` asks about the codes and scales of `weight`: True, or what is wrong with them."""

    def verdict(found):
        if found is None:
            return "returns nothing: is there a `return`?"
        if not isinstance(found, tuple) or len(found) != 2:
            return "return two tensors: `return codes, scales`."
        if not all(isinstance(part, torch.Tensor) for part in found):
            return "codes and scales must both be tensors."
        codes, scales = found
        if codes.dtype != torch.int8:
            return f"codes are {str(codes.dtype).removeprefix('torch.')}, not int8."
        if codes.shape != weight.shape:
            return f"codes have the shape {tuple(codes.shape)}, the weight has {tuple(weight.shape)}."
        if scales.numel() == 1 and len(weight) > 1:
            return "this is one scale for the whole matrix: each row needs its own."
        if scales.numel() != len(weight):
            return f"there are {scales.numel()} scales for {len(weight)} rows."
        back, scales = (
            codes.float() * scales.float().reshape(-1, 1),
            scales.float().reshape(-1, 1),
        )
        if not bool(torch.isfinite(back).all()):
            return "some numbers come back as nan or inf: what happens in a row of zeros?"
        step = weight.abs().amax(1, keepdim=True) / 127
        off = (back - weight).abs()
        if bool((off > 64 * step).any()):
            return "some numbers come back with the wrong sign or size: does 128 fit into int8?"
        if bool((off > 0.51 * step).any()):
            return "some numbers are off by more than half a step: rounded, and with all of -127 to 127?"
        return True

    return verdict


torch.manual_seed(0)
plain_rows = torch.randn(6, 40)
unlike_rows = torch.randn(4, 40) * torch.tensor([[1e-3], [1.0], [50.0], [1e-6]])
negative_rows = -torch.rand(3, 40) - 0.5
with_zeros = torch.cat([torch.zeros(1, 40), torch.randn(2, 40)])
lab.check.code(
    "int8_rows",
    int8_rows,
    [
        lab.check.case(rows_.clone(), expect=nearly(rows_), raw=True)
        for rows_ in (plain_rows, unlike_rows, negative_rows, with_zeros)
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *5 min, medium.* Three runs do not fit into 12 GiB:
#
# ```
# A  all weights of gpt2-large (774 million) trained in fp32 with AdamW, 1 x 128:  out of memory in the optimizer
# B  gpt2-xl with LoRA on 16-bit weights, AdamW, 8 x 1024:                         out of memory in forward
# C  a model with 7 billion parameters in 16 bits, only to run:                   out of memory while it is loaded
# ```
#
# Which of them does `AdamW8bit` cure? And why not the other two: what fills the memory there, and what would help?
#
# <details><summary>Hint</summary>
#
# For each run: how many bytes of optimizer state are there? For A multiply: 4 bytes each for weights and gradients,
# and 8 for the state, or a quarter of it.
#
# </details>

# %% answer="cured"
cured_run = ...
### BEGIN SOLUTION
cured_run = "A"
### END SOLUTION

# %% check="cured" points=1
lab.check.choice(
    "cured",
    cured_run,
    "A",
    of=("A", "B", "C"),
    mistakes={
        "B": "With LoRA only a few million parameters have a state. Where did B run out, and what is alive there?",
        "C": "C does not train. Does a model that only runs have an optimizer?",
    },
)

# %% answer="why" points=2
why = ...
### BEGIN SOLUTION
why = """A: weights and gradients take 5.8 GiB, the state of AdamW 5.8 GiB more; with 8-bit states 1.5 GiB instead.
B: under LoRA the state is small already. Activations of 8 x 1024 tokens fill the memory: fewer sequences or
checkpointing would help.
C: it only runs, so it has no optimizer at all; 14 GB of weights must shrink, to int8 or NF4."""
### END SOLUTION

# %% check="why"
lab.check.words(
    "why",
    why,
    {
        r"activation|batch|sequence|token|logits|checkpoint": "What fills the memory of B, and what makes it smaller?",
        r"(no|not|without|never|neither)[^.!?]*(optimi[sz]er|state|train|gradient|adam)"
        r"|only (run|infer)|inference": "Why does an optimizer not matter in C?",
        r"int8|nf4|(8|4|eight|four)[- ]?bit(s)?[^.!?]*weight|weight[^.!?]*(8|4|eight|four)[- ]?bit|quanti": (
            "What would make the weights of C smaller?"
        ),
    },
    against={
        r"(?<!not )(?<!n't )(?<!never )(?<!cannot )\bcures? (b|c|all|both|every|a and)": "Does it cure B or C?",
        r"\b(it|adamw8bit) (also )?helps (b|c)\b": "Have B and C what `AdamW8bit` makes smaller?",
        r"\bpaged\b": "A paged optimizer moves the state. How much of it have B and C?",
        r"(both|neither)[^.]{0,30}(optimi[sz]er|state)s? (is|are) too": "How much state has B, and has C any?",
        r"lora has no optimi|no optimi[sz]er is in b\b|neither trains": "B trains something: what does LoRA train?",
        r"\bb\b[^.;]{0,40}because the weights|\bb\b[^.;]{0,60}weights (are|is) too|gradients? of all": (
            "How large are B's weights in 16 bits, and how many of them have a gradient?"
        ),
        r"checkpoint\w* (would help|helps) (both|c|it)\b": "C only runs: what would checkpointing save there?",
        r"(do not|don't) know|no idea": "Say what you do know: what is alive in B, and in C?",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. Two techniques are called 8-bit. 8-bit *states* are for training all weights: 2 bytes a parameter and a bit instead
#    of 8, and the loss does not notice. 8-bit *weights* are for running, or for training LoRA beside them.
# 2. int8 costs little accuracy and much time, NF4 fits more and costs more accuracy on a small model. If 16 bits fit,
#    neither is needed.
# 3. Look at what is alive first: without an optimizer's state there is nothing for 8-bit states to save.
#
# Next: lesson 05, offloading: what does not fit moves to the host. The claims, as this run found them:

# %% name="finish"
lab.finish(
    "Is the optimizer's state a large part of the peak? Then 8-bit states. Are weights, and you only run the model or "
    "train LoRA? Then int8 or NF4, after 16 bits."
)
