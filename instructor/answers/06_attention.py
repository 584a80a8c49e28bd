# %% [markdown]
# Typical answers to the exercises of lesson 06, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/06_attention.py.

# %% answer="flash_mib" score=0.5 status="partial" what="leaves out the logsumexp"
flash_mib = 2 * 20 * 2048 * 4 * 2 * 64 / 2**20

# %% answer="flash_mib" score=0.5 status="partial" what="leaves out the output"
flash_mib = 2 * 20 * 2048 * (3 * 2 * 64 + 4) / 2**20

# %% answer="flash_mib" score=0 status="wrong" what="counts four bytes for bf16"
flash_mib = 2 * 20 * 2048 * (4 * 4 * 64 + 4) / 2**20

# %% answer="flash_mib" score=0 status="wrong" what="keeps the probabilities"
flash_mib = 2 * 20 * 2048 * (3 * 2 * 64 + 2 * 2048) / 2**20

# %% answer="flash_mib" score=0 status="wrong" what="takes the heads of gpt2"
flash_mib = 2 * 12 * 2048 * (4 * 2 * 64 + 4) / 2**20

# %% answer="merge" score=0 status="wrong" what="takes the plain mean"
def merge(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)

# %% answer="merge" score=0 status="wrong" what="takes the plain sum"
def merge(out_a, lse_a, out_b, lse_b):
    return out_a + out_b, torch.logaddexp(lse_a, lse_b)

# %% answer="merge" score=0 status="wrong" what="weighs by the logsumexp itself"
def merge(out_a, lse_a, out_b, lse_b):
    total = (lse_a + lse_b)[..., None]
    out = (lse_a[..., None] * out_a + lse_b[..., None] * out_b) / total
    return out, torch.logaddexp(lse_a, lse_b)

# %% answer="merge" score=1.2 status="partial" what="overflows"
def merge(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp()[..., None], lse_b.exp()[..., None]
    return (a * out_a + b * out_b) / (a + b), (a + b).log().squeeze(-1)

# %% answer="merge" score=1.2 status="partial" what="works without batch and heads only"
def merge(out_a, lse_a, out_b, lse_b):
    largest = torch.maximum(lse_a, lse_b)
    a, b = (lse_a - largest).exp(), (lse_b - largest).exp()
    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None], largest + (a + b).log()

# %% answer="merge" score=0 status="error" visible="right" what="knows the head size of the visible cases"
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    share_a = (lse_a - lse).exp()[..., None].expand(*lse.shape, 4)
    share_b = (lse_b - lse).exp()[..., None].expand(*lse.shape, 4)
    return share_a * out_a + share_b * out_b, lse

# %% answer="merge" score=0 status="wrong" what="returns the larger logsumexp"
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    out = (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b
    return out, torch.maximum(lse_a, lse_b)

# %% answer="merge" score=0 status="wrong" what="returns the output only"
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b

# %% answer="merge" score=0 status="wrong" what="returns nothing"
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    out = (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b

# %% answer="merge" score=0 status="error" what="raises"
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp() * out_a + (lse_b - lse).exp() * out_b, lse

# %% answer="merge" score=2 status="graded" what="another way: the larger one taken off, a list returned"
def merge(out_a, lse_a, out_b, lse_b):
    largest = torch.maximum(lse_a, lse_b)
    a, b = (lse_a - largest).exp(), (lse_b - largest).exp()
    out = (a.unsqueeze(-1) * out_a + b.unsqueeze(-1) * out_b) / (a + b).unsqueeze(-1)
    return [out, largest + (a + b).log()]

# %% answer="merge" score=2 status="graded" what="another way: with a sigmoid"
def merge(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    return torch.lerp(out_b, out_a, share), torch.stack([lse_a, lse_b]).logsumexp(0)

# %% answer="runs_flash" score=0 status="wrong" what="takes the call in float32"
runs_flash = "A"

# %% answer="runs_flash" score=0 status="wrong" what="takes the call with a mask"
runs_flash = "B"

# %% answer="runs_flash" score=0 status="wrong" what="names none"
runs_flash = "none"

# %% answer="refusals_why" score=0 status="needs-manual" what="is one phrase"
refusals_why = "Because of the mask."

# %% answer="refusals_why" score=1.3333 status="needs-manual" what="leaves A out"
refusals_why = """B has a mask tensor that flash does not look into; is_causal would do. So the memory-efficient one
runs."""

# %% answer="refusals_why" score=1.3333 status="needs-manual" what="has them fall back to math"
refusals_why = """A is float32, B has a mask and not is_causal; both fall back to the math backend, not the efficient."""

# %% answer="refusals_why" score=0 status="blank" what="is empty"
refusals_why = ""
