# ---
# jupyter:
#   labkit:
#     title: Texts that are too long
#     question: What do you do with a text that is longer than the model, or than the card?
#     after: read a text longer than the model in chunks, say what it costs, and let time grow with the length only
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom, 06_attention]
#     fetch: [smollm2-135m]
# ---

# %% name="begin"
import dataclasses
import math
import subprocess
import sys

import torch
import torch.nn.functional as F

import labkit as lab
from labkit import longcontext, quiet

quiet.transformers()  # imported now, silently
if lab.device().type == "cuda":
    import torch._inductor.compile_fx  # the compiler, which FlexAttention needs
lesson = lab.begin("08_long_context")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
on_card = lab.device().type == "cuda"
MiB, GiB = 2**20, 2**30
show = lab.show_bytes  # 1536 MiB -> "1.50 GiB"
capability = lesson.machine.capability or lab.machine.preset().capability
# Turing cards (sm_75) only emulate bfloat16, and have no FlexAttention
ampere = capability >= (8, 0)
HALF = torch.bfloat16 if ampere else torch.float16
FLEX = on_card and ampere


# %% [markdown]
# ## Claims
#
# Six sentences about long texts. This run fills in the empty columns of the table, at the end of the lesson.
#
# | word | meaning |
# | --- | --- |
# | position | the number of a token in its text; GPT-2 has a learned vector for each of 1024 of them and none beyond |
# | context | the tokens before a token, from which the model predicts it |
# | chunk | a piece of a text that the model reads in one go |
# | window | how many tokens are read together (chunks), or how far back attention looks (sliding window) |
# | overlap | tokens that a chunk repeats from the one before, only to have context |
# | perplexity | e to the power of the mean loss: as uncertain as a fair choice among so many tokens |
# | attention score | how much one token (the *query*) looks at another (the *key*), before the softmax |
# | mask | a table of true and false: which query may look at which key; *causal*: at itself and backwards only |
# | block | 128 queries x 128 keys: the piece of the score table that a kernel computes or skips as a whole |
# | O(n), O(n²) | grows with the length n; grows with its square |

# %% name="claims"
lab.claim(
    "lossless",
    "A model with too few positions reads a longer text in chunks; with overlap, nothing is lost.",
    said_by="blog posts",
)
lab.claim("half", "An overlap of half a window is enough.", said_by="documentation")
lab.claim(
    "topk",
    "Keep only the highest-scoring pairs: attention becomes cheaper and stays as good.",
    said_by="blog posts, papers",
)
lab.claim(
    "window",
    "Sliding-window attention costs O(n w) instead of O(n²).",
    said_by="papers, blog posts",
)
lab.claim(
    "made",
    "A model made with a sliding window is cheap on long texts.",
    said_by="model cards, blog posts",
)
lab.claim(
    "chunked",
    "Chunked cross-entropy saves 16 % (torchtune) to 30 % (TRL) of the peak, and costs nothing.",
    said_by="documentation",
)
lab.claims()

# %% [markdown]
# ## Experiment
#
# ### GPT-2 stops at 1024
#
# GPT-2 looks up a vector for each position in a table of 1024 rows. What happens with token 1025? On a processor the
# lookup is checked. On a card the check runs inside a kernel, some time after Python has gone on. The cell starts a
# second Python process for that, because the process that meets this error cannot use its card any more; we look at
# what it says when it has finished, below.

# %% name="too-long"
PROBE = """
import torch
table = torch.nn.Embedding(1024, 8, device="cuda")
position = torch.tensor([1024], device="cuda")
for attempt in ("look up row 1024", "anything else on the card"):
    try:
        table(position) if attempt.startswith("look") else torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        print(attempt + ": works")
    except Exception as error:
        print(attempt + ": " + type(error).__name__ + ": " + str(error).splitlines()[0])
"""
if on_card:  # it starts while this process goes on
    probe = subprocess.Popen([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, text=True)
small = lab.models.gpt2("gpt2", n_layer=1, n_embd=64, n_head=2)
try:
    small(input_ids=torch.zeros(1, 1025, dtype=torch.long))
except IndexError as error:
    print(f"on a processor: IndexError: {error}")

# %% [markdown]
# The message names no position and no length.
#
# A longer table is no cure: its new rows would have to be trained. Models with *rotary positions* (RoPE), which turn
# queries and keys by an angle instead of adding a vector, give no error beyond their length; what they predict there is
# another matter, and is measured below. So for GPT-2 the text must become shorter pieces.
#
# ### Chunk, process, merge
#
# Cut the text into chunks of `window` tokens, where each repeats the last `overlap` tokens of the one before. The
# model reads every chunk. From each chunk only what is new is kept: the repeated tokens are there to be context. The
# whole of it is the function below. `longcontext.chunks` gives the same plan as a list, so that chunks can be drawn,
# counted, and read many at a time; `longcontext.merge` puts the results together.


# %% name="plan"
def read_long(read, text, window, overlap):
    """One result for each token of a long text; `read` takes at most `window` tokens and gives one for each."""
    found, start, done = [], 0, 0
    while done < len(text):
        stop = min(start + window, len(text))
        start = max(
            0, stop - window
        )  # the last chunk moves to the left: all have the same length
        found.append(read(text[start:stop])[done - start :])  # only what is new
        start, done = stop - overlap, stop
    return torch.cat(found)


plan = longcontext.chunks(length=26, window=10, overlap=4)
for chunk in plan:
    read = "".join("." if at < chunk.keep else "#" for at in range(chunk.start, chunk.stop))
    print(f"{' ' * chunk.start}{read}{' ' * (26 - chunk.stop)}   {chunk}")
text = torch.arange(26)
pieces = longcontext.split(text, plan)  # (chunks, window): one batch for the model
print("merged again:", torch.equal(longcontext.merge(pieces, plan), text))
print("by read_long:", torch.equal(read_long(lambda chunk: chunk, text, 10, 4), text))

WINDOW, STEP, LENGTH, COUNT = (256, 32, 4096, 8) if on_card else (32, 8, 96, 1)
lab.guess(
    "twice",
    None,
    "4096 tokens in chunks of 1024 that overlap by 512: how many times as many tokens does the model read?",
    unit="x",
)
lab.guess(
    "gap",
    None,
    f"Chunks of {WINDOW} tokens without overlap, against a whole text of {LENGTH}: "
    "how many per cent higher is the perplexity?",
    unit="%",
)

# %% [markdown]
# (`.` is read for context only, `#` is kept. The last chunk moves to the left, so that all have the same length.)
#
# How much overlap is needed? GPT-2 cannot tell, because it cannot read the whole text to compare. SmolLM2-135M can: it
# was trained for 8192 positions. We let it read held-out text, the source of Python's standard library, in chunks much
# shorter than that, and once as a whole. Without a card the lengths are small, because every token is really computed.

# %% name="read"
has_model = lab.models.has("smollm2-135m")
if has_model:
    model = lab.models.pretrained("smollm2-135m", device=lab.device())
    tokenizer = lab.models.tokenizer("smollm2-135m")
    texts = lab.data.token_blocks(tokenizer, seq=LENGTH, count=COUNT, split="held-out")
    texts = texts.to(lab.device())
else:
    print("SmolLM2-135M is not here; `labkit fetch` brings it. Below: what a card measured.")


def read_in_chunks(text, plan, known):
    """The loss of each token in each chunk. `known` holds chunks that were read before: start -> losses."""
    new = [chunk for chunk in plan if chunk.start not in known]
    for first in range(0, len(new), 64):
        batch = new[first : first + 64]
        losses = longcontext.token_losses(model, longcontext.split(text, batch))
        known.update(zip([chunk.start for chunk in batch], losses, strict=True))
    return torch.stack([known[chunk.start] for chunk in plan])


def difference(losses, others):
    """Mean difference of two readings in nats a token, and its standard error, over tokens that both predict."""
    gaps = (losses - others).flatten()
    gaps = gaps[~gaps.isnan()]
    return float(gaps.mean()), float(gaps.std() / math.sqrt(len(gaps)))


def full(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


seen = []  # queries, keys and values of every block, for later


def full_and_seen(query, key, value):
    seen.append((query, key, value))
    return full(query, key, value)


overlaps = [part * WINDOW // 8 for part in (0, 1, 2, 4, 6, 7) if part * WINDOW // 8 % STEP == 0]
rows, merged, factors = [], {}, {}
if has_model:
    with longcontext.attending(model, full_and_seen):  # the same attention, and it is recorded
        whole = [longcontext.token_losses(model, texts[:1])]
    whole = torch.cat(
        whole + [longcontext.token_losses(model, text[None]) for text in texts[1:]]
    )
    known = [{} for _ in texts]
    for overlap in overlaps:
        plan = longcontext.chunks(LENGTH, WINDOW, overlap)
        losses = [read_in_chunks(text, plan, k) for text, k in zip(texts, known, strict=True)]
        merged[overlap] = torch.stack([longcontext.merge(part, plan) for part in losses])
        factors[overlap] = len(plan) * WINDOW / LENGTH
        rows.append((overlap, factors[overlap], *difference(merged[overlap], whole)))
    reached = float(whole.nanmean())
    overlap_row = lab.fact(
        "gap by overlap",
        rows[0][2],
        "nats a token",
        table=[list(row) for row in rows],
        half_more=list(difference(merged[WINDOW // 2], merged[overlaps[-1]])),
        whole=reached,
        window=WINDOW,
        length=LENGTH,
        count=COUNT,
        **lab.data.stdlib("held-out").provenance(),
    )
    print(f"the whole text: {reached:.3f} nats a token, perplexity {math.exp(reached):.2f}")

# %% [markdown]
# By now the second process, which read position 1024 on a card, has finished:

# %% name="too-long-on-a-card"
said = probe.communicate(timeout=120)[0].strip() if on_card else None
row = lab.known("position 1024 on a card", said, "text")
print(f"on a card ({row['label']}):\n{row['value'] or '-'}")

# %% [markdown]
# Here, too, no position and no length; and after it nothing works any more. When you see *index out of range* or a
# *device-side assert*, compare the length of the text with `config.max_position_embeddings` first.
#
# Back to the chunks.
# In the table, *gap* is the loss above that of the whole text, token by token, and ± its standard error (as if tokens
# did not depend on each other; they do, so read it as a lower bound). *Tokens read* counts what the model computes for
# each token of the text: 2 means that every token is read twice on average. *Perplexity* is its rise, e^gap - 1.

# %% name="overlap"
overlap_rows = [overlap_row] if has_model else []
overlap_rows += [] if on_card else lab.reference("gap by overlap")
curves = {f"chunks of {r['window']}, {r['label']}": r["table"] for r in overlap_rows}
lab.table(
    ["read", "overlap", "tokens read", "gap (nats a token)", "perplexity"],
    [
        (label, str(h), f"{f:.2f}", f"{g:.3f} ± {e:.3f}", f"{math.expm1(g):+.1%}")
        for label, table in curves.items()
        for h, f, g, e in table
    ],
)
if curves:
    figure = lab.plots.lines(
        {
            label: ([r[1] for r in table], [r[2] for r in table])
            for label, table in curves.items()
        },
        x="tokens that the model computes, for each token of the text",
        y="loss above the whole text (nats a token)",
        title="What overlap buys, and what it costs",
        source="SmolLM2-135M, standard library, held-out",
        zero=True,
    )
    lab.plots.show(figure)

count = len(longcontext.chunks(4096, 1024, 512))
lab.answer(
    "twice",
    measured=count * 1024 / 4096,
    formula=(1 + (4096 - 1024) / 512) * 1024 / 4096,
    source="cpu",
    note="Chunks: 1 + (n - w) / (w - h), rounded up; each of w tokens. For long texts w / (w - h).",
)
if has_model:
    gap = math.expm1(overlap_row["value"])
    lab.answer("gap", measured=100 * gap, source=overlap_row["source"])
    half = WINDOW // 2
    plan = longcontext.chunks(LENGTH, WINDOW, half)
    pieces = [read_in_chunks(text, plan, k) for text, k in zip(texts, known, strict=True)]
    average = torch.stack([longcontext.merge(part, plan, "mean") for part in pieces])
    worse, error = difference(average, merged[half])
    print(
        f"Overlap {half}, the mean of both chunks' losses instead of the later chunk's: "
        f"{worse:+.3f} ± {error:.3f} nats a token."
    )
else:
    lab.answer("gap", measured=None)


def source_of(row):
    """Where a verdict that rests on this row comes from, as `lab.settle` wants it."""
    if row["label"].startswith("reference"):
        return {"source": "reference", "scope": row["capability"]}
    return {"source": row["source"]}


if overlap_rows:
    row = overlap_rows[-1]  # the card's, where there is one: it reads far more text
    (_, _, gap, gap_error), *_, (most, factor, rest, error) = row["table"]
    said = f"perplexity {math.expm1(gap):+.1%} without overlap, {math.expm1(rest):+.1%} "
    said += f"(loss {rest:+.3f} ± {error:.3f}) with {most} of {row['window']}"
    verdict = "holds" if gap < 2 * gap_error else "does not hold"
    if verdict != "holds" and rest < 2 * error:
        verdict = f"holds when {most / row['window']:.0%} of each chunk overlap"
    lab.settle("lossless", measured=said, verdict=verdict, **source_of(row))
    left, error = row["half_more"]
    [half_factor] = [f for h, f, *_ in row["table"] if 2 * h == row["window"]]
    said = f"half a window: perplexity {math.expm1(left):+.1%} (loss {left:+.3f} ± {error:.3f}) above "
    said += (
        f"{most / row['window']:.0%}, at {half_factor:.1f} instead of {factor:.1f} tokens read"
    )
    verdict = "does not hold"  # more than 5 % of perplexity is a large price
    if math.expm1(left) < 0.01 or left < 2 * error:
        verdict = "holds"
    elif math.expm1(left) < 0.05:
        verdict = f"holds when {math.expm1(left):.1%} of perplexity do not matter"
    lab.settle("half", measured=said, verdict=verdict, **source_of(row))
else:
    for key in ("lossless", "half"):
        lab.settle(key, measured="SmolLM2-135M is not here", verdict="not measured here")

# %% [markdown]
# *What to see:* the first overlap buys most. To the right the curve becomes flat while the cost grows without bound,
# and it does not reach zero: what lies further back than one window stays unseen.
#
# Below the table: taking the mean of what both chunks say is worse than keeping the later chunk, because in a causal
# model the later chunk has more context for the tokens that both have read. (An encoder such as BERT looks both ways;
# there the chunk in whose middle a token lies is the better one.)
#
# ### Beyond the trained length
#
# SmolLM2 was trained for 8192 positions, with RoPE. Nothing stops it from reading 16384. *RoPE scaling* slows the
# rotation down, so that more tokens fit into the angles seen in training; YaRN is one such rule (Peng et al., 2023). A
# configuration entry is enough, no weight changes. Only a card is fast enough here. The table has the loss by the place
# in texts of 16384 tokens.


# %% name="extrapolation"
def losses_by_place(**rope):
    """Mean loss in each quarter of four texts of 16384 tokens."""
    longer = lab.models.pretrained("smollm2-135m", device=lab.device(), dtype=HALF, **rope)
    # from the other files: hardly any held-out one is so long
    long_texts = lab.data.token_blocks(tokenizer, seq=16384, count=4, split="train")
    losses = [
        longcontext.token_losses(longer, text[None].to(lab.device())) for text in long_texts
    ]
    return [float(part.nanmean()) for part in torch.cat(losses).split(4096, dim=1)]


YARN = {"rope_type": "yarn", "rope_theta": 100000.0, "factor": 2.0}
YARN["original_max_position_embeddings"] = 8192
ways = {
    "as trained": {},
    "YaRN, factor 2": {"rope_parameters": YARN, "max_position_embeddings": 16384},
}
rows = []
for what, rope in ways.items():
    losses = losses_by_place(**rope) if on_card and has_model else None
    more = {"by_quarter": losses} if losses else {}
    row = lab.known("loss at 12288 to 16383", losses and losses[3], "nats", what=what, **more)
    rows.append((what, row["label"], *[f"{loss:.2f}" for loss in row.get("by_quarter") or ()]))
rows = [(*row, *["-"] * (6 - len(row))) for row in rows]
lab.table(["SmolLM2-135M", "source", "0 to 4095", "to 8191", "to 12287", "to 16383"], rows)

# %% [markdown]
# Read the last two columns against the second one. Scaling is promised to repair what breaks beyond the trained length;
# how well it does depends on the model, the factor and the text, so measure it on yours. Fine-tuning at the new length
# is part of the recipe in the papers.
#
# ### Attention to the highest-scoring pairs
#
# A query gives most of its weight to few keys. So: keep only the `k` highest scores of each query, and drop the rest
# before the softmax. The cell compares the result with full attention, on queries, keys and values of three blocks of
# SmolLM2 on real text, and on random numbers of the same shape.


# %% name="topk"
def scores_of(query, key):
    """Causal attention scores (batch, heads, seq, seq)."""
    seq = query.shape[-2]
    later = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu(1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(later, float("-inf"))


def topk_attention(query, key, value, k):
    scores = scores_of(query, key)
    least = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]  # the k-th highest
    scores = scores.masked_fill(scores < least, float("-inf"))
    return scores.softmax(-1) @ value


def error_of(triples, k):
    """How far top-k attention is from full attention: norm of the difference over norm of the result, mean."""
    errors = []
    for query, key, value in triples:
        wanted = full(query, key, value)
        errors.append(
            float((topk_attention(query, key, value, k) - wanted).norm() / wanted.norm())
        )
    return sum(errors) / len(errors)


lab.guess(
    "topk",
    None,
    f"SmolLM2, {LENGTH} tokens, 16 keys for each query: error of attention's result, in per cent?",
    unit="%",
)
ks = [k for k in (4, 8, 16, 32, 64, 128, 256) if k < LENGTH]
if has_model:
    real = seen[::10]  # blocks 0, 10 and 20
    torch.manual_seed(0)
    noise = [[torch.randn_like(t) for t in real[0]]]
    errors = {
        "SmolLM2, blocks 0, 10, 20": [100 * error_of(real, k) for k in ks],
        "random numbers": [100 * error_of(noise, k) for k in ks],
    }
    seen.clear()
    del real, noise
    error_16 = errors["SmolLM2, blocks 0, 10, 20"][ks.index(16)]
    lab.answer("topk", measured=error_16, source=None if on_card else "cpu")
    more = {"ks": ks, "errors": errors, "length": LENGTH}
    error_rows = [lab.fact("top-k error", error_16, "%", what="k=16", **more)]
else:
    error_rows = []
    lab.answer("topk", measured=None)
error_rows += [] if on_card else lab.reference("top-k error")
for row in error_rows:
    title = f"Attention to the k highest-scoring keys, {row['length']} tokens"
    figure = lab.plots.lines(
        {label: (row["ks"], values) for label, values in row["errors"].items()},
        x="keys kept for each query",
        y="error of the result (%)",
        title=title,
        source=row["label"],
        log="xy",
    )
    lab.plots.show(figure)

# %% [markdown]
# *What to see:* a trained model concentrates, random numbers do not, so judge this approximation on a trained model
# only. (An error above 100 % is possible: full attention over thousands of random values is nearly zero, a few of them
# are not.) The longer the text, the more is left out by the same k. What top-k saves is measured further below.
#
# ### Masks that are known beforehand
#
# A *sliding window* lets each token see itself and the w - 1 tokens before it. Information still travels further: block
# after block, w - 1 tokens each. *Longformer* adds a few *global* tokens that everybody sees, *BigBird* some blocks at
# random, so that any two tokens are few steps apart. Here are their causal forms. Each mask is a function of query and
# key, which is what FlexAttention wants:
#
# ```python
# from torch.nn.attention.flex_attention import create_block_mask, flex_attention
#
# def window(batch, head, query, key):
#     return (key <= query) & (query - key < 512)
#
# blocks = create_block_mask(window, None, None, 4096, 4096, device="cuda")
# attend = torch.compile(flex_attention, dynamic=True)  # once for all lengths; uncompiled it forms all scores
# out = attend(query, key, value, block_mask=blocks)
# ```
#
# On a processor FlexAttention has no backward; there it only runs forward in this lesson.

# %% name="masks"
lab.guess(
    "skipped",
    None,
    "16384 tokens, a window of 512: what share of the blocks does the window touch, in per cent?",
    unit="%",
)
pictured = {
    "causal": longcontext.causal(),
    "window": longcontext.sliding_window(16),
    "Longformer-like": longcontext.global_and_window(16, 4),
    "BigBird-like": longcontext.big_bird(16, 4, length=96, links=1, block=8),
}
lab.plots.show(longcontext.picture(pictured, 96))
masks = {
    "causal": longcontext.causal(),
    "window 512": longcontext.sliding_window(512),
    "window 512 + 64 global": longcontext.global_and_window(512, 64),
    "window 512 + 64 global + 2 random": longcontext.big_bird(512, 64, length=4096, links=2),
}
print("blocks of 128 x 128 that must be computed:")
rows = []
for name, mask in masks.items():
    short, long = (longcontext.block_counts(mask, n) for n in (2048, 4096))
    growth = f"x {long.touched / short.touched:.2f}"
    rows.append((name, str(short.touched), str(long.touched), growth, f"{long.density:.0%}"))
lab.table(["mask", "2048 tokens", "4096 tokens", "growth", "share of all"], rows)

# %% [markdown]
# *What to see:* dark is computed, white is skipped. In the table, causal attention needs about four times as many
# blocks for twice the length, a window about twice as many.
#
# ### What a trained model makes of it
#
# We put each of these into every block of SmolLM2, which was trained with full attention. The table has the loss of
# those tokens that have more text before them than the window; chunks of the same length stand there for comparison.

# %% name="on-trained"
attention_rows = []
if has_model:

    def top_16(query, key, value):
        return topk_attention(query, key, value, 16)

    def masked_by(mask):
        table = longcontext.dense(mask, LENGTH, lab.device())
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=table)

    rules = {
        "top 16": top_16,
        f"window of {WINDOW}": masked_by(longcontext.sliding_window(WINDOW)),
        f"4 global + window of {WINDOW - 4}": masked_by(
            longcontext.global_and_window(WINDOW - 4, 4)
        ),
    }
    found = {f"chunks of {WINDOW}, overlap {WINDOW // 2}": merged[WINDOW // 2][:1]}
    for what, rule in rules.items():
        with longcontext.attending(model, rule):
            found[what] = longcontext.token_losses(model, texts[:1])
    for what, losses in found.items():
        gap, error = difference(losses[:, WINDOW:], whole[:1, WINDOW:])
        more = {"error": error, "length": LENGTH}
        attention_rows.append(
            lab.fact("loss by attention", gap, "nats a token", what=what, **more)
        )
    by_place = torch.stack([part for k in known for part in k.values()]).nanmean(dim=0).cpu()
    merged = {overlap: losses.cpu() for overlap, losses in merged.items()}
    del (
        model,
        known,
        rules,
        whole,
        texts,
        found,
        losses,
    )  # the card is to be empty for what follows
attention_rows += [] if on_card else lab.reference("loss by attention")
lab.table(
    ["SmolLM2, in each block", "length", "source", "above full attention (nats a token)"],
    [
        (
            row["what"],
            str(row["length"]),
            row["label"],
            f"{row['value']:+.3f} ± {row['error']:.3f}",
        )
        for row in attention_rows
    ],
)

# %% [markdown]
# The plain window does far more harm than chunks of the same length. Trained models put attention that they have no use
# for on the first tokens (*attention sinks*, Xiao et al., 2023); a window takes these away. Chunks keep a first token
# each. Four global tokens give most of it back. A window is no switch to be thrown after training.
#
# ### What it costs
#
# Attention alone, forward and backward, for two sequences and the 12 heads of GPT-2, in 16 bits. Five ways: *full* is
# SDPA's causal kernel; *eager* forms the table of scores; *top-k* is the function above; *dense mask* gives SDPA a
# table of true and false for a window of 512; *FlexAttention* gets the same window as a function, and skips every
# block that the window does not touch.


# %% name="attention"
def attention_alone(device, way="full", seq=4096, window=512, batch=2):
    with device:
        query, key, value = (torch.randn(batch, 12, seq, 64, dtype=HALF) for _ in range(3))
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask = longcontext.sliding_window(window)
    if way == "dense mask":
        table = longcontext.dense(mask, seq, device)
    if way == "FlexAttention":
        attend = longcontext.flex(device)  # on a card compiled as above
        blocks = longcontext.block_mask(mask, seq, device)  # as create_block_mask makes it

    def step():
        if way == "full":
            out = full(query, key, value)
        elif way == "eager":
            out = scores_of(query, key).softmax(-1) @ value
        elif way == "top-k":
            out = topk_attention(query, key, value, k=64)
        elif way == "dense mask":
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=table)
        elif way == "FlexAttention":
            out = attend(query, key, value, block_mask=blocks)
        out.sum().backward()
        query.grad = key.grad = value.grad = None

    step.tokens = batch * seq
    return step


def reports_of(experiment, name, lengths, here=True, **sizes):
    """One report for each length: run here if that is possible, else what a card measured in this lesson."""
    found = []
    for seq in lengths:
        called = f"{name}, {seq}"
        if here:
            quick = {"repeats": 6, "trace": False, "nearest": False, "stateless": True}
            report = lab.measure(
                experiment, budget=BUDGET, name=called, seq=seq, **sizes, **quick
            )
            # of the later steps: in a first one the compiler tries things out, and takes memory for it
            found.append(dataclasses.replace(report, first=None))
            continue
        for row in lab.reference(called, kind="report")[:1]:
            report = lab.Report.from_dict(row)
            found.append(dataclasses.replace(report, first=None, source="reference"))
    return lab.with_times(found)


LENGTHS = {
    "full": [512, 4096, 16384, 32768, 65536],
    "FlexAttention": [512, 4096, 16384, 32768, 65536],
    "dense mask": [4096, 8192, 16384],
    # with tables of n² scores, 8192 tokens are too many already
    "eager": [1024, 2048, 4096, 8192],
    "top-k": [1024, 2048, 4096, 8192],
}
alone = {
    way: reports_of(attention_alone, way, lengths, here=FLEX or way != "FlexAttention", way=way)
    for way, lengths in LENGTHS.items()
}
alone = {way: reports for way, reports in alone.items() if reports}
if "FlexAttention" not in alone:
    print("FlexAttention: no card that runs it here, and no reference row.")
lab.plots.show(lab.plots.sweep(alone, x="seq", y="requested", log=True, fit=False))
timed = {way: [r for r in reports if r.timing] for way, reports in alone.items()}
timed = {way: reports for way, reports in timed.items() if reports}
if timed:
    lab.plots.show(lab.plots.sweep(timed, x="seq", y="time", log=True, fit=False))
clocks = dict.fromkeys(r.timing.clock for reports in timed.values() for r in reports)
print("time:", *(clocks or ["no card here, and no reference row"]))

# %% [markdown]
# *What to see:* both axes are logarithmic, so a power of the length is a straight line and its slope is the exponent.
# Eager and top-k rise with the square and run out of memory early: **top-k saves no memory, because the scores must be
# there to find the highest**. The dense mask starts low and bends upwards: it is a table of n² entries. Full attention
# through a fused kernel has memory in n already; only its time has n². In time, look where FlexAttention crosses full
# attention: for shorter texts both are bound by starting kernels, and the window gains nothing.
#
# The exponents in the table come from the three longest texts of each way, so that constants cancel: memory that is
# there anyway, the time of starting kernels. (An exponent above 2 is no law: the shortest of the three texts was too
# short to keep the card busy, so its time was the host's, and the rise after it looks steeper. Longer texts would show
# 2, but these run out of memory.)


# %% name="exponents"
def power(reports, quantity):
    """p of a + b n^p, from the three longest texts, each as many times longer than the one before; else nan."""
    points = sorted((r.settings["seq"], quantity(r)) for r in reports if r.ok)[-3:]
    if len(points) < 3 or points[1][0] ** 2 != points[0][0] * points[2][0]:
        return math.nan
    first, second, third = (value for _, value in points)
    rise = (third - second) / (second - first) if second != first else 0
    return math.log(rise) / math.log(points[1][0] / points[0][0]) if rise > 0 else math.nan


def law(exponent):
    return "-" if math.isnan(exponent) else f"n^{exponent:.2f}"


def seconds(report):
    return report.timing.median_seconds


def requested(report):
    return report.steady.requested_bytes


def peak(reports, seq):
    """Requested bytes at the peak for this length; None where memory ran out."""
    return {r.settings["seq"]: requested(r) for r in reports if r.ok}.get(seq)


at = {way: {r.settings["seq"]: seconds(r) for r in reports} for way, reports in timed.items()}
powers = {way: power(reports, seconds) for way, reports in timed.items()}
rows = []
for way, reports in alone.items():
    longest = max((r.settings["seq"] for r in reports if r.ok), default=0)
    memory, time = power(reports, requested), powers.get(way, math.nan)
    took = at.get(way, {}).get(16384)
    rows.append(
        (
            way,
            f"{longest:,}",
            law(memory),
            law(time),
            f"{1e3 * took:.2f} ms" if took else "-",
        )
    )
lab.table(["way", "longest that ran", "memory", "time", "time of 16384 tokens"], rows)

touched = sum(min(row + 1, 512 // 128 + 1) for row in range(128))
lab.answer(
    "skipped",
    measured=100 * touched / 128**2,
    formula=100 * 5 / 128,
    source="cpu",
    note="Of 128 blocks in a row, 5: w / 128, and one more because the window's edge cuts through a block.",
)
if not math.isnan(powers.get("FlexAttention", math.nan)) and "dense mask" in powers:
    said = ", ".join(
        f"{way} n^{powers[way]:.2f}" for way in ("FlexAttention", "dense mask", "full")
    )
    said = f"time {said}; 16384 tokens: "
    said += ", ".join(f"{way} {1e3 * at[way][16384]:.1f} ms" for way in at if 16384 in at[way])
    linear = {way: powers[way] < 1.3 for way in ("FlexAttention", "dense mask")}
    verdict = "holds" if all(linear.values()) else "does not hold"
    if linear["FlexAttention"] and not linear["dense mask"]:
        verdict = "holds when the kernel skips blocks outside the window (FlexAttention); not as a dense mask"
    where = {"source": "measured"}
    if not FLEX:
        where = {
            "source": "reference",
            "scope": alone["FlexAttention"][-1].provenance["capability"],
        }
    lab.settle("window", measured=said, verdict=verdict, **where)
else:
    lab.settle(
        "window", measured="no card here, and no reference row", verdict="not measured here"
    )

tops = {way: peak(alone[way], 4096) for way in ("top-k", "eager", "full")}
top = [row for row in attention_rows if row["what"] == "top 16"]
if top and all(tops.values()):
    row = top[-1]  # the card's, where there is one
    lean, good = tops["top-k"] < 0.9 * tops["full"], row["value"] < max(0.01, 2 * row["error"])
    times = [at.get(way, {}).get(4096) for way in ("top-k", "full")]
    lean = lean or (None not in times and times[0] < 0.9 * times[1])
    said = f"4096 tokens: {', '.join(f'{way} {show(n)}' for way, n in tops.items())}; "
    if None not in times:
        said += f"in time top-k {1e3 * times[0]:.1f} ms, full {1e3 * times[1]:.1f} ms; "
    said += f"loss {row['value']:+.3f} ± {row['error']:.3f} with 16 of {row['length']} keys"
    verdict = "holds" if lean and good else "does not hold"
    if lean and not good:
        verdict = f"holds when {row['value']:.3f} nats a token do not matter"
    lab.settle("topk", measured=said, verdict=verdict)
else:
    lab.settle("topk", measured="too little could run here", verdict="not measured here")

# %% [markdown]
# The same window as a dense mask brings n² back into memory, and SDPA computes every masked pair. Methods that select
# keys by their content and do save (Reformer's hashing, or kernels with top-k built in) find the promising keys
# *without* forming all scores, and work on whole blocks: an approximation of the approximation.
#
# ### A model made for length
#
# Mistral-type models are trained with a window. Here is a small one built from its configuration: 4 blocks of width
# 768, 12 heads, a window of 1024. The step is mixed precision with AdamW, one sequence, and a chunked loss (see below),
# so that logits do not hide the rest. `sliding_window=None` is the same model with full attention.


# %% name="mistral"
def made_for_length(device, seq=4096, window=1024, attention="sdpa"):
    from transformers import MistralConfig

    config = MistralConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        sliding_window=window,
        use_cache=False,
    )
    model = lab.models.causal_lm(config, device=device, attention=attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler(device.type, enabled=HALF is torch.float16)
    tokens = torch.randint(0, config.vocab_size, (1, seq), device=device)

    def step():
        with torch.autocast(device.type, dtype=HALF):
            loss = lab.recipes.chunked_loss(model, tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = seq
    return step


lab.guess(
    "mistral",
    None,
    "16384 tokens, window of 1024, attention by SDPA: the peak, against the same model without a window, in per cent?",
    unit="%",
)

# %% name="made"
# FlexAttention is compiled for the first length, then once for all; for 16384 alone it takes minutes
lengths = [1024, 4096, 16384]
if FLEX:
    torch.compiler.reset()  # else what was compiled above is generalised to these shapes, which can hang
made = {
    "full, SDPA": reports_of(made_for_length, "Mistral-type, full, SDPA", lengths, window=None),
    "window, SDPA": reports_of(made_for_length, "Mistral-type, window, SDPA", lengths),
    "window, FlexAttention": reports_of(
        made_for_length,
        "Mistral-type, window, FlexAttention",
        lengths,
        here=FLEX,
        attention="flex_attention",
    ),
}
made = {name: reports for name, reports in made.items() if reports}
lab.plots.show(lab.plots.sweep(made, x="seq", y="requested", log=True, fit=False))


def session_of(name):
    """The run in which a card measured it: times of different runs are not compared."""
    rows = lab.reference(f"{name}, 16384", kind="report")
    return rows[-1]["session"] if rows else None


steps = {name: [r for r in reports if r.timing] for name, reports in made.items()}
one_run = session_of("Mistral-type, full, SDPA") == session_of(
    "Mistral-type, window, FlexAttention"
)
if steps.get("window, FlexAttention") and not (on_card or one_run):
    del steps["window, FlexAttention"]
    print(
        "FlexAttention was timed in another run of the card than SDPA: its time is not shown."
    )
steps = {name: reports for name, reports in steps.items() if reports}
if steps:
    lab.plots.show(lab.plots.sweep(steps, x="seq", y="time", log=True, fit=False))

FULL, DENSE, FLEXED = "full, SDPA", "window, SDPA", "window, FlexAttention"
tops = {name: peak(reports, 16384) for name, reports in made.items()}
both = tops[FULL] and tops[DENSE]
lab.answer(
    "mistral",
    measured=100 * tops[DENSE] / tops[FULL] if both else None,
    formula=100 * (1 + 4 * 2 * 16384**2 / tops[FULL]) if both else None,
    note=f"4 blocks x 2 bytes x 16384² = {4 * 2 * 16384**2 / MiB:,.0f} MiB of masks that full attention does not have.",
)
took = {
    name: next((seconds(r) for r in reports if r.settings["seq"] == 16384), None)
    for name, reports in steps.items()
}
lab.table(
    ["16384 tokens", "peak (requested)", "one step"],
    [
        (
            name,
            show(n) if n else "out of memory",
            f"{1e3 * took[name]:.1f} ms" if took.get(name) else "-",
        )
        for name, n in tops.items()
    ],
)
if both and all(took.get(name) for name in (FULL, DENSE, FLEXED)):
    said = f"16384 tokens, with SDPA: memory {tops[DENSE] / tops[FULL] - 1:+.0%} against full attention"
    said += f", time {took[DENSE] / took[FULL] - 1:+.0%}; with FlexAttention: "
    said += f"memory {tops[FLEXED] / tops[FULL] - 1:+.0%}, time {took[FLEXED] / took[FULL] - 1:+.0%}"
    cheaper = {}
    for name, kernel in ((DENSE, "SDPA"), (FLEXED, "FlexAttention")):
        cheaper[f"memory with {kernel}"] = tops[name] < 0.99 * tops[FULL]
        cheaper[f"time with {kernel}"] = took[name] < 0.97 * took[FULL]
    wins = [what for what, cheap in cheaper.items() if cheap]
    verdict = "holds" if all(cheaper.values()) else "does not hold"
    if wins and verdict != "holds":
        losses = [what for what, cheap in cheaper.items() if not cheap]
        verdict = f"holds when one means {' and '.join(wins)}; not {' or '.join(losses)}"
    lab.settle("made", measured=said, verdict=verdict)
else:
    why = (
        "FlexAttention has no time beside full attention's"
        if both
        else "16384 tokens do not fit"
    )
    lab.settle("made", measured=why, verdict="not measured here")

# %% [markdown]
# *What to see:* with SDPA the window costs memory: transformers hands SDPA a dense mask of n² entries, and each block
# keeps its own 16-bit copy for backward. Up to the window's length there is no mask, and no difference. To skip what
# lies outside the window needs a kernel that knows it: `attn_implementation="flex_attention"`, or FlashAttention where
# it is installed. And even then it is time that is saved: full attention through a fused kernel has no n² in memory.
#
# ### Chunked cross-entropy
#
# With long texts the loss is next: logits have `batch x seq x vocabulary` entries, and the loss needs several copies of
# them. But the loss is a sum over tokens. So take the hidden states in pieces, let head and loss run on one piece at a
# time, and let backward compute the piece's logits again (a checkpoint, lesson 03). `lab.recipes.chunked_loss` is this
# function with any number of chunks.


# %% name="chunked"
from torch.utils.checkpoint import checkpoint


def loss_in_chunks(model, tokens, chunks):
    hidden = model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    head = model.get_output_embeddings()

    def part(h, y):
        return F.cross_entropy(head(h).float(), y, reduction="sum")

    pieces = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(part, h, y, use_reentrant=False) for h, y in pieces) / targets.numel()


def training(device, size="gpt2", batch=4, seq=1024, chunks=0, vocab=50257):
    changes = {"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 0}
    changes["activation_function"] = "gelu_pytorch_tanh"
    with device:
        model = lab.models.gpt2(size, attention="sdpa", **changes).train()
        tokens = torch.randint(0, vocab, (batch, seq))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler(device.type, enabled=HALF is torch.float16)

    def step():
        with torch.autocast(device.type, dtype=HALF):
            if chunks:
                loss = loss_in_chunks(model, tokens, chunks)
            else:
                loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


lab.guess(
    "chunks",
    None,
    "GPT-2 124M, 4 x 1024, mixed precision: how many per cent of the peak do 8 chunks save?",
    unit="%",
)

# %% name="chunked-loss"
quick = {"budget": BUDGET, "repeats": 6, "trace": False, "nearest": False, "stateless": True}


def measured_with(counts, name, **sizes):
    """One report for each number of chunks; 0 is the model's own loss."""
    return lab.with_times(
        lab.measure(training, name=f"{name}, chunks: {c or 'none'}", chunks=c, **sizes, **quick)
        for c in counts
    )


def saving(before, after):
    """The share of the peak that is saved; None where one of the two ran out of memory."""
    if not (before.ok and after.ok):
        return None
    return 1 - after.steady.requested_bytes / before.steady.requested_bytes


def row_of(report):
    time = f"{report.timing}, {report.timing.clock}" if report.timing else "-"
    top = show(report.steady.requested_bytes) if report.ok else "out of memory"
    return report.name, top, f"{report.source} · {report.card}", time


whole_loss, *in_chunks = measured_with([0, 1, 8, 32], "gpt2, 4 x 1024")
larger = measured_with([0, 8], "gpt2-medium, 1 x 512", size="gpt2-medium", batch=1, seq=512)
lab.table(
    ["step", "peak (requested)", "source", "time"],
    [row_of(report) for report in (whole_loss, *in_chunks, *larger)],
)
fitting = [r for r in in_chunks if r.ok]
if fitting and whole_loss.ok:
    counts = [r.settings["chunks"] for r in fitting]
    figure = lab.plots.lines(
        {
            "in chunks": (counts, [r.steady.requested_bytes / GiB for r in fitting]),
            "the model's own loss": (
                counts,
                [whole_loss.steady.requested_bytes / GiB] * len(counts),
            ),
        },
        x="chunks",
        y="peak requested (GiB)",
        title="GPT-2 124M, 4 x 1024, mixed precision",
        source=f"{whole_loss.source} · {whole_loss.card}",
        log="x",
        zero=True,
    )
    lab.plots.show(figure)

eight = next(r for r in in_chunks if r.settings["chunks"] == 8)
saved, saved_larger = saving(whole_loss, eight), saving(*larger)
slower = (
    seconds(eight) / seconds(whole_loss) - 1 if eight.timing and whole_loss.timing else None
)
lab.answer("chunks", measured=None if saved is None else 100 * saved)
if saved is None or saved_larger is None or slower is None:
    said = (
        "no time: no card here, and no reference row"
        if saved
        else "too little fits this budget"
    )
    lab.settle("chunked", measured=said, verdict="not measured here")
else:
    said = f"8 chunks: {-saved:+.0%} (gpt2, 4 x 1024), {-saved_larger:+.0%} (gpt2-medium, 1 x 512); "
    noise = eight.timing.spread_seconds + whole_loss.timing.spread_seconds
    noise /= seconds(whole_loss)
    said += f"time {slower:+.1%} ± {noise:.1%}"
    enough, free = min(saved, saved_larger) >= 0.16, slower < 0.01
    conditions = [] if enough else ["logits are a large part of the peak"]
    price = (
        f"{slower:.1%} more time do"
        if slower > noise
        else "more time, here within its noise, does"
    )
    conditions += [] if free else [f"{price} not matter"]
    verdict = f"holds when {' and '.join(conditions)}" if conditions else "holds"
    lab.settle("chunked", measured=said, verdict=verdict if saved >= 0.16 else "does not hold")

# %% [markdown]
# *What to see:* the curve falls as 1 / chunks and then stays: beyond some ten chunks something else makes the peak. One
# chunk saves nothing. In the larger model with few tokens chunks save nothing either: there the peak is in the
# optimizer, where no logits are left.
#
# ## Account
#
# **Chunks of text.** n tokens in chunks of w with overlap h make 1 + (n - w) / (w - h) chunks, rounded up, of w tokens
# each: for long texts the model reads w / (w - h) times as many tokens. A token at place p of its chunk has p tokens of
# context. Let l(p) be the mean loss with p tokens of context. The first chunk keeps all its places, every other one the
# places h to w - 1: so the loss is w / n times the mean of all l, and (n - w) / n times the mean of l(h) ... l(w - 1).

# %% name="profile"
if has_model:
    edges = range(0, WINDOW + 1, WINDOW // 8)
    bins = [(a, a + WINDOW // 8) for a in edges[:-1]]
    figure = lab.plots.lines(
        {
            "in chunks": (
                [(a + b) / 2 for a, b in bins],
                [float(by_place[a:b].nanmean()) for a, b in bins],
            )
        },
        x="tokens of context",
        y="loss (nats a token)",
        title="Loss against context",
        source=f"{'measured' if on_card else 'cpu'}, {COUNT} x {LENGTH} tokens in chunks of {WINDOW}",
    )
    lab.plots.show(figure)
    share = WINDOW / LENGTH
    rows = []
    for h in overlaps:
        formula = share * by_place.nanmean() + (1 - share) * by_place[h:].nanmean()
        rows.append((str(h), f"{float(merged[h].nanmean()):.3f}", f"{float(formula):.3f}"))
    lab.table(["overlap", "loss as read", "from l(p)"], rows)

# %% [markdown]
# *What to see:* loss falls with context, steeply at first. What the formula leaves unexplained: l(p) is a mean over all
# chunks, but which tokens of the text fall on place p differs from overlap to overlap; with little text that is a lot.
#
# **Attention.** With b sequences and H heads of size d, in 16 bits: query, key, value, the result and their four
# gradients are 2 b H n d bytes each; flash's backward adds up the gradient of the query in fp32, which is as much as
# two more. That makes 10. Each table of scores is 2 b H n² bytes; eager has four of them at the peak. A dense mask is
# n² bytes of true and false and 2 n² more when SDPA turns it into numbers (sequences and heads share it). A window of
# w costs n w pairs, full causal attention n² / 2.
#
# **Logits.** V words, b sequences of s tokens: 4 b s V bytes for each copy in fp32. At the start of backward three are
# alive: log-probabilities, their gradient, and the logits' gradient. With c chunks each of them is 1 / c as long. What
# comes in return: the gradient of the head, 4 V d bytes, is now there before the blocks' activations are gone. The
# larger model with few tokens peaks elsewhere: in AdamW, when weights, gradients, two states and the `foreach` form's
# temporary copy are alive, 5 x 4 bytes a parameter (lesson 01).

# %% name="account"
square, linear = 4096**2, peak(alone["full"], 4096)
tensors = (peak(alone["full"], 16384) - linear) / (16384 - 4096) / (2 * 2 * 12 * 64)
print(f"full: each further token takes {tensors:.1f} x 2 b H d bytes; by formula 10")
rows = []
for way, formula in (("dense mask", 3), ("eager", 4 * 2 * 2 * 12)):
    measured = peak(alone[way], 4096)
    if measured:
        rest = measured - linear
        rows.append((way, show(rest), f"{rest / square:.1f} n²", f"{formula} n²"))
lab.table(["4096 tokens", "above full", "bytes", "by formula"], rows)

b, s, V, d = 4, 1024, 50257, 768
copies = 3 * 4 * b * s * V
print(
    f"one copy of the logits {show(4 * b * s * V)}, three {show(copies)}; head's gradient {show(4 * V * d)}"
)
rows = []
for report in in_chunks:
    c = report.settings["chunks"]
    if report.ok and whole_loss.ok and c > 1:
        less = whole_loss.steady.requested_bytes - report.steady.requested_bytes
        expected = round(copies * (1 - 1 / c) - 4 * V * d)
        rows.append((str(c), show(expected), show(less), show(less - expected)))
lab.table(["chunks", "saved, by formula", "saved", "unexplained"], rows)
medium = larger[0]
if medium.ok:
    formula, peak_is = show(5 * 4 * 354_823_168), show(medium.steady.requested_bytes)
    print(f"gpt2-medium, 1 x 512: in AdamW by formula {formula}, peak {peak_is}")
N = 124_439_808
again = 2 * V * d / (6 * N + 12 * 12 * d * s)
print(
    f"computed twice: the head's product, 2 d V operations a token: {again:.1%} of the step's operations"
)

# %% [markdown]
# ## Equivalence
#
# **Chunked loss and full loss** are the same sum in another order. We compare loss and all gradients in fp32, for
# several numbers of chunks, of which 7 makes chunks of different lengths and 248 gives each token its own. In exact
# arithmetic they are equal; the tolerance of 100 ε (ε = 1.2e-7 in fp32) is generous for a gradient that is a sum over
# 8 x 31 tokens. The last row must fail, or the comparison would be worth nothing: there the loss is the mean of the
# chunks' means, a common mistake, and seven chunks of 248 tokens cannot have the same length.


# %% name="equivalence-loss"
def mean_of_means(model, tokens, chunks):
    """Wrong where chunks differ in length: each chunk weighs the same, however many tokens it has."""
    hidden = model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    pieces = zip(hidden.chunk(chunks), tokens[:, 1:].flatten().chunk(chunks), strict=True)
    head = model.get_output_embeddings()
    return sum(F.cross_entropy(head(h), y) for h, y in pieces) / chunks


def loss_and_gradients(chunks, by=loss_in_chunks):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500, "bos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tiny = lab.models.gpt2("gpt2", **sizes, **no_dropout, eos_token_id=0).to(lab.device())
    tokens = torch.randint(0, 500, (8, 32), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(lab.device())
    if chunks:
        loss = by(tiny, tokens, chunks)
    else:
        logits = tiny(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), [p.grad for p in tiny.parameters()]


rows = []
wanted, gradients = loss_and_gradients(0)
compared = {str(chunks): (chunks, loss_in_chunks) for chunks in (1, 2, 7, 248)}
for label, how in {**compared, "7, mean of means": (7, mean_of_means)}.items():
    loss, found = loss_and_gradients(*how)
    worst = max(float((g - w).norm() / w.norm()) for g, w in zip(found, gradients, strict=True))
    off = float(abs(loss - wanted) / wanted)
    eps = torch.finfo(torch.float32).eps
    rows.append((label, f"{off:.1e}", f"{worst:.1e}", str(max(off, worst) < 100 * eps)))
lab.table(["chunks", "loss differs by", "gradients differ by", "within 100 ε (1.2e-5)"], rows)

# %% [markdown]
# **FlexAttention and a dense mask** compute the same attention. Both run in 16 bits, so both round; the truth is SDPA
# in fp64 with the dense table of the same mask. FlexAttention may be off by at most twice as much as SDPA in 16 bits.
# In the last row the truth is that of a window one token shorter, and it must fail.


# %% name="equivalence-flex"
def off_by(found, truth):
    """Relative difference of each tensor."""
    return [
        float((x.double() - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)
    ]


def results(attend, triple, backward):
    """The result of an attention, and its gradients for query, key and value."""
    triple = [t.detach().requires_grad_(backward) for t in triple]
    out = attend(*triple)
    grads = torch.autograd.grad(out.double().square().sum(), triple) if backward else []
    return [out.detach(), *grads]


def by_table(mask):
    table = longcontext.dense(mask, TOKENS, lab.device())
    return lambda *triple: F.scaled_dot_product_attention(*triple, attn_mask=table)


# on a card the sizes of the experiment, which are compiled already
BATCH, HEADS, TOKENS, WIDTH = (2, 12, 1024, 512) if on_card else (1, 2, 384, 100)
window = longcontext.sliding_window(WIDTH)
bird = longcontext.big_bird(100, 8, length=TOKENS, links=1, device=lab.device())
cases = {
    # name: mask, mask of the truth, with backward? A processor has none, and a further kernel takes long to compile
    f"window of {WIDTH}": (window, window, FLEX),
    "BigBird-like": (bird, bird, False),
    f"window of {WIDTH} against {WIDTH - 1}": (
        window,
        longcontext.sliding_window(WIDTH - 1),
        FLEX,
    ),
}
if FLEX or not on_card:
    attend, rows = longcontext.flex(lab.device()), []
    torch.manual_seed(0)
    triple = [
        torch.randn(BATCH, HEADS, TOKENS, 64, device=lab.device()).to(HALF) for _ in "qkv"
    ]
    exact = [t.double() for t in triple]
    for name, (mask, other, backward) in cases.items():
        truth = results(by_table(other), exact, backward)
        blocks = longcontext.block_mask(mask, TOKENS, lab.device())
        ways = lambda *t, b=blocks: attend(*t, block_mask=b), by_table(other)
        flexed, dense = (off_by(results(way, triple, backward), truth) for way in ways)
        gradients = f"{max(flexed[1:]):.1e} ({max(dense[1:]):.1e})" if backward else "-"
        near_enough = all(f < 2 * d for f, d in zip(flexed, dense, strict=True))
        rows.append((name, f"{flexed[0]:.1e} ({dense[0]:.1e})", gradients, str(near_enough)))
    head = ["mask", "result off by (SDPA)", "gradients off by (SDPA)", "as near as SDPA"]
    lab.table(head, rows)
    del triple, exact, truth, blocks, ways  # the card is to be empty for what follows
else:
    print("FlexAttention needs sm_80: use a dense mask, or chunks of the text.")

# %% [markdown]
# ## Negative control
#
# A window cannot help a text that is no longer than the window: the mask is the causal one, and no block is skipped.
# And a chunked loss cannot help where logits are small: here the vocabulary is 256 bytes.

# %% name="negative-control"
equal = torch.equal(
    longcontext.dense(longcontext.sliding_window(512), 512),
    longcontext.dense(longcontext.causal(), 512),
)
print(f"window of 512 on 512 tokens: the causal mask: {equal}")
short = []
for way in (
    "full",
    "FlexAttention",
):  # both from a card, or their difference would mean nothing
    at_512 = [r for r in alone.get(way, []) if r.settings["seq"] == 512]
    short += at_512 if FLEX else reports_of(attention_alone, way, [512], here=False, way=way)
bytes_only = measured_with([0, 8], "256 words", vocab=256)
lab.table(
    ["run", "peak (requested)", "source", "time"], [row_of(r) for r in (*short, *bytes_only)]
)
if saving(*bytes_only) is not None:
    print(f"chunks save {saving(*bytes_only):.1%} of the peak with 256 words")

# %% [markdown]
# ## Pitfalls
#
# **`index out of range in self`, or `device-side assert triggered`.** The text is longer than the position table. After
# the second, restart the kernel: every later call on the card fails with the same message.
#
# **A window that saves nothing.** A dense mask was built. Look at `attn_implementation`; with SDPA, a mask of n²
# entries is made and every pair is computed.
#
# **FlexAttention runs out of memory.** It was not compiled: uncompiled it forms all scores (and warns). Or
# `create_block_mask` was not: it forms n² numbers on the way, `torch.compile(create_block_mask)` does not
# (torch/nn/attention/flex_attention.py).
#
# **FlexAttention on an RTX 20 or T4.** Its kernels are written in Triton, which has no matrix product below sm_80.
# There, cut the text into chunks, or use SDPA with a dense mask at moderate lengths, both in fp16 (no such card was
# at hand).
#
# **Chunked loss without a saving.** The logits were formed before they were cut: the head must run inside the chunk,
# and the chunk inside a checkpoint, or all of them are kept for backward after all.
#
# **Chunked loss with another value.** Divide by the number of tokens, not by the number of chunks: chunks can have
# different lengths (the last row of the first table of equivalence).
#
# **The perplexity is not that of the paper.** Compare window and overlap first: without overlap it was tens of per cent
# higher in the first table.

# %% [markdown]
# ## Exercise 1
#
# *4 min, easy.* A text of 10,000 tokens is read by GPT-2 in chunks of 1024 with an overlap of 256. How many tokens does
# the model read in all, context included? All chunks have the same length.
#
# <details><summary>Hint</summary>
#
# The first chunk brings 1024 new tokens. How many new ones does each further chunk bring, and how many of them are
# needed for the rest? Chunks are whole.
#
# </details>

# %% answer="tokens_read"
tokens_read = ...
### BEGIN SOLUTION
more_chunks = math.ceil((10_000 - 1024) / (1024 - 256))
tokens_read = (1 + more_chunks) * 1024
### END SOLUTION

# %% check="tokens_read" points=1
lab.check.number(
    "tokens_read",
    tokens_read,
    13 * 1024,
    unit="tokens",
    tolerance=0.0001,
    mistakes={
        10 * 1024: "This is without overlap: how many new tokens does a chunk bring?",
        12 * 1024: "One chunk is missing: is the first one in, and is the last one whole?",
        14 * 1024: "One chunk too many: the first one brings more new tokens than the others.",
        (1 + (10_000 - 1024) / 768) * 1024: ("There is no part of a chunk: round up.", 0.5),
        10_000 * 1024 / 768: ("This is the long-text approximation; count whole chunks.", 0.5),
        13: ("This is the number of chunks.", 0.5),
        40 * 1024: "Each chunk brings 768 new tokens, not 256.",
        36 * 1024: "Each chunk brings 768 new tokens, not 256.",
        37 * 1024: "Each chunk brings 768 new tokens, not 256.",
        13 * 1024 / 10_000: (
            "This is how often a token is read; the tokens are asked for.",
            0.5,
        ),
        10_000 + 12 * 256: (
            "Here the last chunk is shorter; it moves to the left instead.",
            0.5,
        ),
        11 * 1024: "How many new tokens does a chunk bring after the first?",
    },
    hint="How many chunks did you count?",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* To waste no padding, several short texts are *packed* one after another into one sequence. Write
# `packed(lengths, window)`: it returns a mask for FlexAttention under which each token sees itself and the `window` - 1
# tokens before it, but never a token of another text. `packed([3, 4], 2)` is for a sequence of 7 tokens: three of the
# first text, four of the second.
#
# <details><summary>Hint</summary>
#
# A mask is a function `mask(batch, head, query, key)` of index tensors. Make a tensor first that says for every
# position which text it belongs to (`torch.repeat_interleave`), and look both query and key up in it. Combine
# conditions with `&`.
#
# </details>


# %% answer="packed"
def packed(lengths, window):
    ### BEGIN SOLUTION
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask(batch, head, query, key):
        near = (key <= query) & (query - key < window)
        return near & (owner[query] == owner[key])

    return mask
    ### END SOLUTION


# %% check="packed" points=2
def judge_mask(lengths, window):
    """What `lab.check.code` asks about a mask function: True, or what is wrong with it."""
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]

    def verdict(mask):
        if not callable(mask):
            return (
                "should return a function `mask(batch, head, query, key)`. Is there a `return`?"
            )
        try:
            table = longcontext.dense(mask, len(owner))
        except RuntimeError as error:  # `and` asks a whole tensor for one truth
            return f"the mask raises {str(error)[:60]!r}. Are conditions combined with `&`?"
        if not isinstance(table, torch.Tensor) or table.shape != (len(owner),) * 2:
            return "the mask does not give one entry for each query and key: does it use both?"
        for q in range(len(owner)):
            for k in range(len(owner)):
                found, near = bool(table[q, k]), k <= q and q - k < window
                if found and k > q:
                    return f"token {q} sees token {k}, which comes later."
                if found and owner[q] != owner[k]:
                    return f"token {q} sees token {k}, which belongs to another text."
                if found and not near:
                    return (
                        f"token {q} sees token {k}: more than {window} tokens, itself included."
                    )
                if near and owner[q] == owner[k] and not found:
                    return f"token {q} does not see token {k} of its own text."
        return True

    return verdict


lab.check.code(
    "packed",
    packed,
    [
        lab.check.case([3, 4], 2, expect=judge_mask([3, 4], 2), raw=True),
        lab.check.case([5, 1, 6], 4, expect=judge_mask([5, 1, 6], 4), raw=True),
        lab.check.case([6], 100, expect=judge_mask([6], 100), raw=True),
        lab.check.case([2, 2, 2], 1, expect=judge_mask([2, 2, 2], 1), raw=True),
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *5 min, medium.* Somebody adds `sliding_window=1024` to the configuration of a model with 24 blocks and trains it with
# SDPA, one sequence of 16384 tokens, under mixed precision. The peak *rises* by about 12 GiB. Which one change helps: a
# smaller window (`"window"`), `attn_implementation="flex_attention"` (`"flex"`), or more chunks in the loss
# (`"chunks"`)? And where do the 12 GiB come from?
#
# <details><summary>Hint</summary>
#
# What does SDPA get so that it knows the window, and how large is that for 16384 tokens in 16 bits? How many of them
# are kept for backward? What of that depends on the window?
#
# </details>

# %% answer="change"
change = ...
### BEGIN SOLUTION
change = "flex"
### END SOLUTION

# %% check="change" points=1
lab.check.choice(
    "change",
    change,
    "flex",
    of=("window", "flex", "chunks"),
    mistakes={
        "window": "How large is the table that SDPA gets, with a window of 1024 and with one of 256?",
        "chunks": "The loss was there before, and the peak rose with the window.",
    },
)

# %% answer="why_12" points=2
why_12 = ...
### BEGIN SOLUTION
why_12 = """SDPA is told the window by a dense mask of 16384 x 16384 entries, 2 bytes each: 512 MiB, whatever the
window. Each of the 24 blocks keeps its own copy for backward: 24 x 0.5 GiB = 12 GiB. FlexAttention gets the mask as a
function and a short list of blocks, and skips the blocks outside the window."""
### END SOLUTION

# %% check="why_12"
lab.check.words(
    "why_12",
    why_12,
    {
        r"\bmask|\btable|\bbias": "What does SDPA get that full attention does not need?",
        r"16384|16,384|16k|square|quadrat|n²|n\^2|n\*\*2|512 MiB|0\.5 GiB|half a GiB": "How large is one of them?",
        r"\b24\b|each (of the )?(block|layer)|every (block|layer)|per (block|layer)|(block|layer)s": (
            "Why so many times?"
        ),
    },
    against={
        r"smaller window (helps|saves|shrinks|reduces)|(depends on|grows with|proportional to) (the )?window": (
            "Does the size of the table depend on the window?"
        ),
        r"(table|matrix|keep|kept|save|store|form)\w* (of |all )*(the )?(attention )?(scores|weights)": (
            "Does SDPA form the scores? What else does it get?"
        ),
        r"scores.{0,50}(kept|saved|stored|formed)|keys and values|kv.?cache|logits|optimi[sz]er": (
            "Which of the tensors was not there before the window?"
        ),
        r"shared (by|between|among|across)|one mask for all|(only |just )once": (
            "If all blocks shared one, how much memory would it take?"
        ),
        r"(do not|don't) know|no idea": "Say what you do know: what is new in memory, and how large is one of it?",
    },
    points=2,
    least=15,
)

# %% [markdown]
# ## Take-away
#
# 1. Longer than the model: chunks with overlap. Count the tokens that are read, w / (w - h) times the text, against the
#    perplexity that they buy; what lies further back than a window stays lost.
# 2. Longer than the card: full attention through a fused kernel needs memory in n only. A window makes time linear,
#    too, but only in a kernel that skips blocks; a dense mask makes everything worse.
# 3. Logits in chunks: three copies shrink to 1 / c, for one more product of the head. It helps as far as logits are a
#    part of the peak.

# %% name="finish"
lab.finish(
    "Text longer than the model: chunks with overlap. Longer than the card: a fused kernel, a chunked loss, and a "
    "window only where the kernel skips blocks."
)
