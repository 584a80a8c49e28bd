# %% [markdown]
# Typical answers to the exercises of lesson 02, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/02_mixed_precision.py.

# %% answer="break_even" score=0 status="wrong" what="counts one byte for a 16-bit copy"
break_even = (12 * 1024**2 * 24 + 1024 * 50257) / (28 * 1024 * 24)

# %% answer="break_even" score=0.5 status="partial" what="forgets the head"
break_even = 2 * 12 * 1024**2 * 24 / (28 * 1024 * 24)

# %% answer="break_even" score=0 status="wrong" what="takes what AMP keeps for what it saves"
break_even = 2 * (12 * 1024**2 * 24 + 1024 * 50257) / (86 * 1024 * 24)

# %% answer="break_even" score=0 status="wrong" what="takes the sizes of gpt2"
break_even = 2 * (12 * 768**2 * 12 + 768 * 50257) / (28 * 768 * 12)

# %% answer="break_even" score=0 status="wrong" what="is text"
break_even = "1024 tokens"

# %% answer="careful_step" score=0 status="wrong" what="clips with the scale on"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)

# %% answer="careful_step" score=0.5 status="partial" what="clips after the step"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)

# %% answer="careful_step" score=0.5 status="partial" what="adds the losses up and takes no mean"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)

# %% answer="careful_step" score=0 status="wrong" what="does not update the scale"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return float(norm)

# %% answer="careful_step" score=0 status="wrong" what="leaves the gradients"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return float(norm)

# %% answer="careful_step" score=1.5 status="partial" what="lets the optimizer step without the scaler"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)

# %% answer="careful_step" score=0 status="wrong" what="returns nothing"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

# %% answer="careful_step" score=0 status="wrong" visible="right" what="knows the scale of the visible cases"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        (1024 * micro_loss(model, batch) / len(batches)).backward()
    for p in model.parameters():
        p.grad /= 1024
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if torch.isfinite(norm):
        optimizer.step()
    scaler.scale(torch.ones(()))
    scaler.update(2048.0 if torch.isfinite(norm) else 512.0)
    optimizer.zero_grad(set_to_none=True)
    return float(norm)

# %% answer="careful_step" score=0 status="error" what="raises"
def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return float(norm)

# %% answer="careful_step" score=2 status="graded" what="another way: clips by hand, warns, and leaves zeros"
import warnings


def micro_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    total = 0
    for batch in batches:
        loss = micro_loss(model, batch)
        total += loss.item()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        gradient.div_(len(batches))
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
    if norm > clip:
        warnings.warn("clipped")
        for gradient in gradients:
            gradient.mul_(clip / norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    return norm.item()

# %% answer="scaled" score=0 status="wrong" what="takes the run that overflows in forward"
scaled_run = "B"

# %% answer="scaled" score=0 status="wrong" what="takes the run that is the same in fp32"
scaled_run = "C"

# %% answer="scaled" score=0 status="wrong" what="names all"
scaled_run = "all"

# %% answer="diagnosis" score=0 status="needs-manual" what="is one phrase"
diagnosis = "It is A because of underflow."

# %% answer="diagnosis" score=0.6667 status="needs-manual" what="has C underflow"
diagnosis = """In C there is underflow and the scale must go up. B overflows, so one uses bf16 there, with more range."""

# %% answer="diagnosis" score=0.6667 status="needs-manual" what="blames the scale for the overflow"
diagnosis = """B overflows in forward because the loss scale is too high, so lower the scale to 2**8. C has activations of
small variance, so use bf16 there."""

# %% answer="diagnosis" score=0 status="blank" what="is empty"
diagnosis = ""
