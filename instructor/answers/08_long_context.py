# %% [markdown]
# Typical answers to the exercises of lesson 08, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/08_long_context.py.

# %% answer="tokens_read" score=0 status="wrong" what="leaves out the overlap"
tokens_read = 10 * 1024

# %% answer="tokens_read" score=0 status="wrong" what="has one chunk too few"
tokens_read = 12 * 1024

# %% answer="tokens_read" score=0.5 status="partial" what="has a part of a chunk"
tokens_read = (1 + (10_000 - 1024) / 768) * 1024

# %% answer="tokens_read" score=0.5 status="partial" what="is the number of chunks"
tokens_read = 13

# %% answer="tokens_read" score=0 status="wrong" what="is the text's length"
tokens_read = 10_000

# %% answer="packed" score=0.5 status="partial" what="forgets the texts"
def packed(lengths, window):
    def mask(batch, head, query, key):
        return (key <= query) & (query - key < window)

    return mask

# %% answer="packed" score=0.75 status="partial" what="forgets the window"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask(batch, head, query, key):
        return (owner[query] == owner[key]) & (key <= query)

    return mask

# %% answer="packed" score=0.25 status="partial" what="looks ahead"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask(batch, head, query, key):
        return (owner[query] == owner[key]) & ((query - key).abs() < window)

    return mask

# %% answer="packed" score=0.75 status="partial" what="sees one token too many"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask(batch, head, query, key):
        return (owner[query] == owner[key]) & (key <= query) & (query - key <= window)

    return mask

# %% answer="packed" score=0 status="wrong" what="returns a table"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(sum(lengths))
    query, key = at[:, None], at[None, :]
    return (owner[query] == owner[key]) & (key <= query) & (query - key < window)

# %% answer="packed" score=0 status="wrong" what="combines conditions with and"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask(batch, head, query, key):
        return owner[query] == owner[key] and key <= query and query - key < window

    return mask

# %% answer="packed" score=0.5 status="partial" visible="right" what="knows the texts of the visible cases"
def packed(lengths, window):
    ends = {(3, 4): [3], (5, 1, 6): [5, 6], (2, 2, 2): [2, 4]}.get(tuple(lengths), [])

    def mask(batch, head, query, key):
        seen = (key <= query) & (query - key < window)
        for end in ends:
            seen = seen & ((query < end) == (key < end))
        return seen

    return mask

# %% answer="packed" score=0 status="wrong" what="returns nothing"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask(batch, head, query, key):
        near = (key <= query) & (query - key < window)
        return near & (owner[query] == owner[key])

# %% answer="packed" score=0 status="error" what="raises"
def packed(lengths, window):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def mask(batch, head, query, key):
        return (key <= query) & (query - key < window) & (owner[query] == owner[key])

    return mask

# %% answer="packed" score=2 status="graded" what="another way: the first token of each text, looked up"
def packed(lengths, window):
    starts, at = [], 0
    for length in lengths:
        starts += [at] * length
        at += length
    first = torch.tensor(starts)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx >= first[q_idx]) & (kv_idx > q_idx - window)

    return mask

# %% answer="packed" score=2 status="graded" what="another way: a table that is looked up"
def packed(lengths, window):
    n = sum(lengths)
    table = torch.zeros(n, n, dtype=torch.bool)
    start = 0
    for length in lengths:
        for query in range(start, start + length):
            table[query, max(start, query - window + 1) : query + 1] = True
        start += length
    return lambda batch, head, query, key: table[query, key]

# %% answer="change" score=0 status="wrong" what="makes the window smaller"
change = "window"

# %% answer="change" score=0 status="wrong" what="cuts the loss"
change = "chunks"

# %% answer="change" score=0 status="wrong" what="names something else"
change = "sdpa"

# %% answer="why_12" score=0 status="needs-manual" what="is one phrase"
why_12 = "Because of the mask."

# %% answer="why_12" score=1.3333 status="needs-manual" what="does not say how large it is"
why_12 = """The mask that SDPA gets is kept in every block and nobody frees it until backward has come by."""

# %% answer="why_12" score=1.3333 status="needs-manual" what="thinks that a smaller window helps"
why_12 = """A dense mask of 16384 x 16384 is kept by each of the 24 blocks, and a smaller window helps with it."""

# %% answer="why_12" score=0 status="blank" what="is empty"
why_12 = ""
