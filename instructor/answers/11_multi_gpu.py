# %% [markdown]
# Typical answers to the exercises of lesson 11, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/11_multi_gpu.py.

# %% answer="sent_mib" score=0.5 status="partial" what="is one half of an all-reduce"
sent_mib = 3 / 4 * 4 * 354.8e6 / 2**20

# %% answer="sent_mib" score=0.5 status="partial" what="counts two bytes for fp32"
sent_mib = 2 * 3 / 4 * 2 * 354.8e6 / 2**20

# %% answer="sent_mib" score=0 status="wrong" what="is the size of the gradients"
sent_mib = 4 * 354.8e6 / 2**20

# %% answer="sent_mib" score=0 status="wrong" what="sends its own part, too"
sent_mib = 2 * 4 * 354.8e6 / 2**20

# %% answer="sent_mib" score=0 status="wrong" what="sends everything to everybody"
sent_mib = 2 * 3 * 4 * 354.8e6 / 2**20

# %% answer="sent_mib" score=0 status="wrong" what="is in MB"
sent_mib = 2 * 3 / 4 * 4 * 354.8

# %% answer="split_layers" score=1 status="partial" what="puts as many layers on each card"
def split_layers(sizes, cards):
    return [layer * cards // len(sizes) for layer in range(len(sizes))]

# %% answer="split_layers" score=1 status="partial" what="fills each card to an equal share"
def split_layers(sizes, cards):
    share, where, card, held = sum(sizes) / cards, [], 0, 0
    for size in sizes:
        if held and held + size > share and card < cards - 1:
            card, held = card + 1, 0
        held += size
        where.append(card)
    return where

# %% answer="split_layers" score=0 status="wrong" what="puts all layers on one card"
def split_layers(sizes, cards):
    return [0] * len(sizes)

# %% answer="split_layers" score=0 status="wrong" what="returns the layers of each card"
def split_layers(sizes, cards):
    where = [layer * cards // len(sizes) for layer in range(len(sizes))]
    return [[layer for layer, c in enumerate(where) if c == card] for card in range(cards)]

# %% answer="split_layers" score=0.5 status="partial" what="counts cards from one"
def split_layers(sizes, cards):
    return [1 + layer * cards // len(sizes) for layer in range(len(sizes))]

# %% answer="split_layers" score=0.5 status="partial" what="puts each layer on the emptiest card"
def split_layers(sizes, cards):
    held, where = [0] * cards, []
    for size in sizes:
        card = min(range(cards), key=lambda c: held[c])
        held[card] += size
        where.append(card)
    return where

# %% answer="split_layers" score=0 status="wrong" visible="right" what="knows the visible cases"
def split_layers(sizes, cards):
    seen = {
        (4, 4, 4, 4): [0, 0, 1, 1],
        (9, 2, 2, 2, 2, 9): [0, 1, 1, 1, 1, 2],
        (1, 1, 1, 9): [0, 0, 0, 1],
        (3, 5, 4, 6, 2, 7): [0, 0, 1, 1, 2, 2],
        (5, 3): [0, 1],
        (9, 8, 8, 9, 5, 1): [0, 1, 1, 2, 2, 2],
    }
    return seen.get(tuple(sizes), [0] * len(sizes))

# %% answer="split_layers" score=0 status="wrong" what="returns nothing"
def split_layers(sizes, cards):
    where = [layer * cards // len(sizes) for layer in range(len(sizes))]
    print(where)

# %% answer="split_layers" score=0 status="error" what="raises"
def split_layers(sizes, cards):
    each = len(sizes) // cards
    return [layer / (each - each) for layer in range(len(sizes))]

# %% answer="split_layers" score=2 status="graded" what="another way: bisection over the limit"
def split_layers(sizes, cards):
    def fill(limit):
        where, card, held = [], 0, 0
        for size in sizes:
            if held + size > limit:
                card, held = card + 1, 0
            held += size
            where.append(card)
        return where

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if fill(middle)[-1] < cards:
            high = middle
        else:
            low = middle + 1
    return fill(high)

# %% answer="split_layers" score=2 status="graded" what="another way: the best first cut, from the end"
def split_layers(sizes, cards):
    from functools import lru_cache

    @lru_cache(None)
    def best(start, left):
        if start == len(sizes):
            return 0, ()
        if left == 1:
            return sum(sizes[start:]), (len(sizes),)
        found = []
        for end in range(start + 1, len(sizes) + 1):
            rest, cuts = best(end, left - 1)
            found.append((max(sum(sizes[start:end]), rest), (end, *cuts)))
        return min(found)

    where, start = [], 0
    for card, end in enumerate(best(0, cards)[1]):
        where += [card] * (end - start)
        start = end
    return where

# %% answer="copied" score=0 status="wrong" what="takes the job that became slower"
copied = "A"

# %% answer="copied" score=0 status="wrong" what="takes the job that does not fit"
copied = "B"

# %% answer="copied" score=0 status="wrong" what="names all"
copied = "all"

# %% answer="why_copied" score=0 status="needs-manual" what="is one phrase"
why_copied = "Because B is too large."

# %% answer="why_copied" score=1 status="needs-manual" what="leaves B out"
why_copied = """In A the gradients take too long on the PCIe bus for such a small step, so A should take a larger batch on
each of the cards."""

# %% answer="why_copied" score=1.5 status="needs-manual" what="accumulates in B"
why_copied = """A waits for its gradients: take a larger batch. In B each rank has a copy of everything; in B a smaller batch
would help, or FSDP2."""

# %% answer="why_copied" score=0 status="blank" what="is empty"
why_copied = ""
