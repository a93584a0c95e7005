"""What the trainer and its workers have in common: a small GPT-2 of letters, and what it is rewarded for."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PROMPTS = ["the ", "a cat ", "we see "]


def new_model() -> GPT2LMHeadModel:
    """Return the model with random weights, the same wherever it is made."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(LETTERS) + 2, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = len(LETTERS) + 1
    return GPT2LMHeadModel(config)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters."""
    letters = {letter: i for i, letter in enumerate(LETTERS)}
    own = Tokenizer(models.WordLevel({**letters, "[pad]": len(letters), "[end]": len(letters) + 1}, "[pad]"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[pad]", eos_token="[end]")


def reward(completions: list[str], **_: object) -> list[float]:
    """Return the share of vowels in each completion."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]
