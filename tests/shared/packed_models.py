"""A tiny model that has learned a text, for tests of packing."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.models.tokenizer import trained_bpe

TEXT = "".join(f"the {a} of the {b} saw a {c}.\n" for a in "abcdefgh" for b in "stuvw" for c in "xyzk")
SEQ = 32
CONFIGS = {
    "llama": transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=300, n_embd=48, n_layer=2, n_head=4, n_positions=SEQ, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "mixtral": transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=SEQ,
        bos_token_id=0, eos_token_id=0,
    ),
    "gptj": transformers.GPTJConfig(
        vocab_size=300, n_embd=32, n_layer=1, n_head=2, rotary_dim=4, n_positions=SEQ, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.1,
    ),
    "opt": transformers.OPTConfig(
        vocab_size=300, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=SEQ, word_embed_proj_dim=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ),
}  # fmt: skip


def train(model, ids, steps: int, rate: float = 3e-3) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(ids) - SEQ, (8,), generator=draw)
        batch = torch.stack([ids[s : s + SEQ] for s in starts.tolist()])
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


def learned(folder: Path, kind: str = "llama", steps: int = 60):
    """Save a model that has learned ``TEXT``, and the text, to a folder; return the model and its tokens."""
    tokenizer = trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    train(model, ids, steps)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.md").write_text(TEXT)
    return model, ids
