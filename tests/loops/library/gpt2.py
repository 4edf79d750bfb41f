"""A Hugging Face GPT-2, trained by hand"""

import torch
from ordinary import shuffled
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import holdfast

TEXT = torch.randint(0, 32, (40, 12), generator=torch.Generator().manual_seed(0))
CONFIG = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2,
    attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip


def plain():
    model = GPT2LMHeadModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 5)
    model.train()
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=5)):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = GPT2LMHeadModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    model.train()
    for _ in run.steps(5):
        for text in run.microbatches(TEXT):
            loss = model(input_ids=text, labels=text).loss
            run.backward(loss)
            run.log(loss=loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer)
        scheduler.step()
