# %% [markdown]
# Typical answers to the exercises of lesson 07, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/07_compile.py.

# %% answer="caught_up" score=0.5 status="partial" what="forgets the recompilation"
caught_up = (64.4 - 0.4) / (0.480 - 0.400)

# %% answer="caught_up" score=0 status="wrong" what="divides by the time of a step"
caught_up = (64.4 - 0.4 + 16) / 0.400

# %% answer="caught_up" score=0 status="wrong" what="begins again at the recompilation"
caught_up = 250 + (64.4 - 0.4 + 16) / (0.480 - 0.400)

# %% answer="caught_up" score=0 status="wrong" what="mixes seconds and milliseconds"
caught_up = (64 + 16) / 80

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="is as it was"
def clipped_in_one_graph(x, limit):
    norm = x.norm()
    if norm > limit:
        x = x * (limit / norm)
    return x

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="reads the norm on the host"
def clipped_in_one_graph(x, limit):
    return x * min(1.0, limit / max(x.norm().item(), 1e-12))

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="always scales"
def clipped_in_one_graph(x, limit):
    return x * (limit / x.norm())

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="never scales"
def clipped_in_one_graph(x, limit):
    return x * 1.0

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="clips each element"
def clipped_in_one_graph(x, limit):
    return torch.clamp(x, -limit, limit)

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="has the two cases the wrong way round"
def clipped_in_one_graph(x, limit):
    norm = x.norm()
    return torch.where(norm > limit, x, x * (limit / norm))

# %% answer="clipped_in_one_graph" score=1.5 status="partial" what="has nan for zeros"
def clipped_in_one_graph(x, limit):
    norm = x.norm()
    scaled = x * (limit / norm)
    return torch.where(norm > limit, scaled, x + 0 * scaled)

# %% answer="clipped_in_one_graph" score=0 status="wrong" visible="right" what="knows the limits of the visible cases"
def clipped_in_one_graph(x, limit):
    largest = 1.0 if limit == 1.0 else 0.5
    norm = x.norm()
    return torch.where(norm > largest, x * (largest / norm), x)

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="returns nothing"
def clipped_in_one_graph(x, limit):
    norm = x.norm()
    x = torch.where(norm > limit, x * (limit / norm), x)

# %% answer="clipped_in_one_graph" score=0 status="wrong" what="returns the norm"
def clipped_in_one_graph(x, limit):
    return torch.clamp(x.norm(), max=limit)

# %% answer="clipped_in_one_graph" score=0 status="error" what="raises"
def clipped_in_one_graph(x, limit):
    return torch.where(x.norm() > limit, x * limit / x.norms(), x)

# %% answer="clipped_in_one_graph" score=2 status="graded" what="another way: a factor of at most 1, by clamp"
def clipped_in_one_graph(x, limit):
    return x * torch.clamp(limit / x.norm(), max=1.0)

# %% answer="clipped_in_one_graph" score=2 status="graded" what="another way: a factor of at most 1, with a small number"
def clipped_in_one_graph(x, limit):
    return x * torch.minimum(limit / (x.norm() + 1e-12), torch.ones(()))

# %% answer="gains" score=0 status="wrong" what="takes the model of large products"
gains_most = "A"

# %% answer="gains" score=0 status="wrong" what="takes the model that waits for the host"
gains_most = "C"

# %% answer="gains" score=0 status="wrong" what="names all"
gains_most = "all"

# %% answer="why_little" score=0 status="needs-manual" what="is one phrase"
why_little = "Because A is slow."

# %% answer="why_little" score=1.3333 status="needs-manual" what="leaves C out"
why_little = """A is mostly matrix products, which are one kernel in the library; there fusion has almost nothing to do.
That is what I think of it."""

# %% answer="why_little" score=1.3333 status="needs-manual" what="leaves A out"
why_little = """In C every layer calls item, so the card must wait for the host, which breaks everything that is there.
That is what I think of it."""

# %% answer="why_little" score=0 status="blank" what="is empty"
why_little = ""
