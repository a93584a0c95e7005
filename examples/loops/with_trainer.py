"""The same with transformers' Trainer: ``with_trainer.py first.example.org:7400 0``, and ``... 1``."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire

address, rank = sys.argv[1], int(sys.argv[2])
shared = thinwire.local_steps_callback("thinwire", peers=lambda: thinwire.meet(address, rank, replicas=2))

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)  # or a model of yours by from_pretrained, with adapters of peft
rows = torch.arange(256)[:, None] * 7 % 64 + torch.arange(16)
data = [{"input_ids": row % 64, "labels": row % 64} for row in rows][rank::2]  # this site's share

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=60, learning_rate=3e-3, eval_strategy="steps", eval_steps=20, save_strategy="no",
        report_to=[], disable_tqdm=True, logging_steps=20,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:16], callbacks=[shared])
    loss = trainer.train().training_loss

print(f"loss {loss:.4f}, weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
