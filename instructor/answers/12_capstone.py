# %% [markdown]
# Typical answers to the exercises of lesson 12, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/12_capstone.py.

# %% answer="resident" score=0 status="wrong" what="leaves out the scales"
resident = 774.0e6 * (2 + 2) / 2**30

# %% answer="resident" score=0 status="wrong" what="has the gradients on the card"
resident = 774.0e6 * (2 + 2 + 2 + 2 * 4 / 64) / 2**30

# %% answer="resident" score=0 status="wrong" what="has one moment"
resident = 774.0e6 * (2 + 1 + 4 / 64) / 2**30

# %% answer="resident" score=0 status="wrong" what="has 32-bit states"
resident = 774.0e6 * (2 + 8) / 2**30

# %% answer="resident" score=0 status="wrong" what="is in gigabytes of 10⁹ bytes"
resident = 774.0e6 * (2 + 2 + 2 * 4 / 64) / 1e9

# %% answer="greedy" score=1.3333 status="partial" what="measures each switch alone, once"
def greedy(switches, peak, budget):
    saves = {switch: peak([]) - peak([switch]) for switch in switches}
    on = []
    for switch in sorted(switches, key=lambda s: -saves[s]):
        if peak(on) <= budget or saves[switch] <= 0:
            break
        on.append(switch)
    return on

# %% answer="greedy" score=0.3333 status="partial" what="takes them as they come"
def greedy(switches, peak, budget):
    on = []
    for switch in switches:
        if peak(on) <= budget:
            break
        on.append(switch)
    return on

# %% answer="greedy" score=0.6667 status="partial" what="does not stop when it fits"
def greedy(switches, peak, budget):
    on, left = [], list(switches)
    while left:
        best = min(left, key=lambda s: peak([*on, s]))
        if peak([*on, best]) >= peak(on):
            break
        on.append(best)
        left.remove(best)
    return on

# %% answer="greedy" score=1.6667 status="partial" what="takes switches that do not help"
def greedy(switches, peak, budget):
    on, left = [], list(switches)
    while peak(on) > budget and left:
        best = min(left, key=lambda s: peak([*on, s]))
        on.append(best)
        left.remove(best)
    return on

# %% answer="greedy" score=1.6667 status="partial" what="takes the last among equals"
def greedy(switches, peak, budget):
    on, left = [], list(switches)
    while peak(on) > budget and left:
        best = min(reversed(left), key=lambda s: peak([*on, s]))
        if peak([*on, best]) >= peak(on):
            break
        on.append(best)
        left.remove(best)
    return on

# %% answer="greedy" score=1.3333 status="partial" visible="right" what="knows which switches of the visible cases disturb each other"
def greedy(switches, peak, budget):
    saves = {switch: peak([]) - peak([switch]) for switch in switches}
    on = []
    for switch in sorted(switches, key=lambda s: -saves[s]):
        if peak(on) <= budget or saves[switch] <= 0:
            break
        if switch == "amp" and "checkpoint" in on:
            continue
        on.append(switch)
    return on

# %% answer="greedy" score=0 status="wrong" what="returns nothing"
def greedy(switches, peak, budget):
    on, left = [], list(switches)
    while peak(on) > budget and left:
        best = min(left, key=lambda s: peak([*on, s]))
        if peak([*on, best]) >= peak(on):
            break
        on.append(best)
        left.remove(best)

# %% answer="greedy" score=0 status="error" what="raises"
def greedy(switches, peak, budget):
    on = []
    while peak(on) >= 0:
        best = min(left, key=lambda s: peak([*on, s]))
        on.append(best)
    return on

# %% answer="greedy" score=2 status="graded" what="another way: a loop that compares"
def greedy(switches, peak, budget):
    on = []
    now = peak(on)
    while now > budget:
        best, lowest = None, now
        for switch in switches:
            if switch not in on and peak(on + [switch]) < lowest:
                best, lowest = switch, peak(on + [switch])
        if best is None:
            return on
        on, now = on + [best], lowest
    return on

# %% answer="in_order" score=0 status="wrong" what="takes the size of the weights"
in_order = "A"

# %% answer="in_order" score=0 status="wrong" what="takes the sum of the parts"
in_order = "B"

# %% answer="in_order" score=0 status="wrong" what="takes the drop"
in_order = "C"

# %% answer="in_order" score=0 status="wrong" what="takes a word for a letter"
in_order = "accumulation"

# %% answer="audit" score=0 status="needs-manual" what="is one phrase"
audit = "The numbers do not add up."

# %% answer="audit" score=1.8 status="needs-manual" what="leaves D and E out"
audit = """A: 120 million parameters in fp32 take 0.48 GB. B: the sum of the four is 11 GB, which the card does not have. C:
the drop is 3.5 of 7.8, that is 45 %. I found nothing else in the log."""

# %% answer="audit" score=1.2 status="needs-manual" what="finds no mistake in the numbers"
audit = """The numbers of the log are plausible for such a model. D is wrong because a list may not stand for a module, and E
is wrong because max_length takes a whole number and no lambda."""

# %% answer="audit" score=0 status="blank" what="is empty"
audit = ""
