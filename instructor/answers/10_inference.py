# %% [markdown]
# Typical answers to the exercises of lesson 10, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/10_inference.py.

# %% answer="cache_gib" score=0.5 status="partial" what="keeps one vector"
cache_gib = 36 * 1280 * 2 * 1000 * 24 / 2**30

# %% answer="cache_gib" score=0.5 status="partial" what="counts four bytes for fp16"
cache_gib = 2 * 36 * 1280 * 4 * 1000 * 24 / 2**30

# %% answer="cache_gib" score=0 status="wrong" what="keeps the query, too"
cache_gib = 3 * 36 * 1280 * 2 * 1000 * 24 / 2**30

# %% answer="cache_gib" score=0 status="wrong" what="is one layer"
cache_gib = 2 * 1280 * 2 * 1000 * 24 / 2**30

# %% answer="cache_gib" score=0 status="wrong" what="is one sequence"
cache_gib = 2 * 36 * 1280 * 2 * 1000 / 2**30

# %% answer="cache_gib" score=0 status="wrong" what="is in bytes"
cache_gib = 2 * 36 * 1280 * 2 * 1000 * 24

# %% answer="speculate" score=1 status="partial" what="counts every match"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] - 1 : -1].argmax(-1)
    return int((wanted == draft).sum())

# %% answer="speculate" score=0.5 status="partial" what="looks one position too far"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] :].argmax(-1)
    return int((wanted == draft).long().cumprod(1).sum())

# %% answer="speculate" score=0.5 status="partial" what="gives the model the draft without the text"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text[:, -1:], draft], 1)).logits
    wanted = logits[:, :-1].argmax(-1)
    return int((wanted == draft).long().cumprod(1).sum())

# %% answer="speculate" score=0.5 status="partial" what="calls the model for each token"
def speculate(model, text, draft):
    count = 0
    for token in draft[0]:
        if int(model(text).logits[0, -1].argmax()) != int(token):
            break
        count += 1
        text = torch.cat([text, token.reshape(1, 1)], 1)
    return count

# %% answer="speculate" score=0 status="wrong" what="says yes or no"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] - 1 : -1].argmax(-1)
    return bool((wanted == draft).all())

# %% answer="speculate" score=0 status="wrong" what="returns the matches"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] - 1 : -1].argmax(-1)
    return (wanted == draft).long().cumprod(1)

# %% answer="speculate" score=0.5 status="partial" visible="right" what="knows what the visible model writes"
def speculate(model, text, draft):
    model(text)
    count, last = 0, int(text[0, -1])
    for token in draft[0].tolist():
        if token != (last + 1) % 10:
            break
        count, last = count + 1, token
    return count

# %% answer="speculate" score=0 status="wrong" what="returns nothing"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] - 1 : -1].argmax(-1)
    print(int((wanted == draft).long().cumprod(1).sum()))

# %% answer="speculate" score=0 status="error" what="raises"
def speculate(model, text, draft):
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] - 2 : -1].argmax(-1)
    return int((wanted == draft).long().cumprod(1).sum())

# %% answer="speculate" score=2 status="graded" what="another way: a loop over the scores, the last ones asked for"
def speculate(model, text, draft):
    k = draft.shape[1]
    scores = model(torch.cat((text, draft), dim=1), logits_to_keep=k + 1).logits[0]
    for place in range(k):
        if scores[place].argmax().item() != draft[0, place].item():
            return place
    return k

# %% answer="speculate" score=2 status="graded" what="another way: a tensor of one number"
@torch.no_grad()
def speculate(model, text, draft):
    wanted = model(torch.cat([text, draft], 1)).logits[:, text.shape[1] - 1 : -1].argmax(-1)
    return (wanted == draft).int().cumprod(1).sum(1)

# %% answer="served" score=0 status="wrong" what="takes the service that does not share steps"
served = "B"

# %% answer="served" score=0 status="wrong" what="takes the service whose caches are too large"
served = "C"

# %% answer="served" score=0 status="wrong" what="names all"
served = "all"

# %% answer="why_served" score=0 status="needs-manual" what="is one phrase"
why_served = "Because A is slow."

# %% answer="why_served" score=1 status="needs-manual" what="leaves C out"
why_served = """B: the users should be answered together in one step, because the weights are then read once for all of
them."""

# %% answer="why_served" score=1.5 status="needs-manual" what="empties the cache of the allocator"
why_served = """B needs batches: one step reads the weights once for all users. C: the cache of keys and values grows, and
calling empty_cache now and then, and a limit on the length, would help."""

# %% answer="why_served" score=0 status="blank" what="is empty"
why_served = ""
