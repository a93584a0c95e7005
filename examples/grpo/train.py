"""GRPO whose rollouts are made elsewhere: start this, then ``worker.py`` as often as you like.

``train.py [HOST [STEPS]]`` listens at HOST, ports 7200 (weights) and 7201 (prompts); off this machine with
the token in THINWIRE_TOKEN. ``thinwire report runs/grpo`` draws how old the weights of each batch were.
"""

import sys

from datasets import Dataset
from toy import PROMPTS, new_model, new_tokenizer, reward
from trl import GRPOConfig, GRPOTrainer

import thinwire
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.hosts.trl_rollouts import TrlRollouts
from thinwire.uses.following.run.rollout_recorder import RolloutRecorder

host, steps, *_ = *sys.argv[1:], *("127.0.0.1", "30")[len(sys.argv) - 1 :]
token, model = thinwire.read_token(), new_model()
arguments = GRPOConfig(
    "runs/grpo",
    per_device_train_batch_size=16,
    num_generations=16,
    max_completion_length=16,
    learning_rate=1e-3,
    max_steps=int(steps),
    beta=0.0,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)
with (
    thinwire.Publisher(model, host, 7200, token, dtype="bf16") as publisher,
    RolloutPool(host, 7201, token, max_age=1, record=RolloutRecorder("runs/grpo", publisher)) as pool,
):
    trainer = GRPOTrainer(
        model,
        reward,
        arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 100}),
        processing_class=new_tokenizer(),
        rollout_func=TrlRollouts(pool, publisher),
    )
    trainer.train()
    for note in pool.notes:
        print(note)
    for age in pool.ages:
        print(
            f"batch {age.batch}: {age.samples} samples by version {age.version}, {age.behind} behind, ",
            end="",
        )
        print(f"{age.age:.2f} s old, after {age.waited:.2f} s of waiting, at {age.worker}")
