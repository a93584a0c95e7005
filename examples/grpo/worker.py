"""A rollout worker for ``train.py``: ``worker.py [HOST]``, elsewhere with the token in THINWIRE_TOKEN."""

import sys

import torch
from toy import new_model, new_tokenizer

import thinwire
from thinwire.uses.following.hosts.rollout_worker import RolloutWorker, transformers_generate

host, token = (sys.argv[1:] or ["127.0.0.1"])[0], thinwire.read_token()
model = new_model().to(torch.bfloat16).eval()
pad = new_tokenizer().pad_token_id
with thinwire.Follower(host, 7200, token) as follower:
    bring_up = lambda: follower.apply_to(model)  # noqa: E731
    RolloutWorker(follower, bring_up, transformers_generate(model, pad), host, 7201, token).serve(idle=120)
