"""A site in a framework's loop, whole and resumed: ``resumed_host.py KIND ADDRESS RANK FOLDER``.

It says whether both end with the same bits, and a digest of these.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire

KIND, ADDRESS, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
FOLDER = Path(sys.argv[4]) / f"{KIND}-{RANK}"
STEPS, SAVED = 10, 5
RECIPE = "sparseloco:every=3"


def meet() -> Any:
    return thinwire.meet(ADDRESS, RANK, 2, patience=60.0)


def digest(model: nn.Module) -> str:
    trained = [p.detach().numpy().tobytes() for p in model.parameters() if p.requires_grad]
    return hashlib.sha256(b"".join(trained)).hexdigest()


def by_trainer(resumes: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 1}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if KIND == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    rows = torch.arange(64)[:, None] * 7 % 32 + torch.arange(8)
    data = [{"input_ids": row % 32, "labels": row % 32} for row in rows][RANK::2]
    shared = thinwire.local_steps_callback(RECIPE, peers=meet)
    args = TrainingArguments(
        str(FOLDER), max_steps=STEPS, learning_rate=3e-3, save_steps=SAVED, logging_steps=5,
        per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=[shared])
    place = FOLDER / f"checkpoint-{SAVED}"
    trainer.train(resume_from_checkpoint=str(place) if resumes else None)
    if KIND == "lora":  # nothing else is exchanged
        from safetensors.torch import load_file

        named = [name for name in load_file(place / f"thinwire-{RANK}.safetensors") if ".shared." in name]
        assert named and all("lora_" in name for name in named)
    return model


def by_lightning(resumes: bool) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    class Mirror(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))

        def training_step(self, batch: Any, number: int) -> Any:
            return (self.net(batch) - batch.flip(1)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(0)
    model = Mirror()
    data = torch.randn(2 * SAVED * 4, 8, generator=torch.Generator().manual_seed(1))[RANK::2]
    kept = ModelCheckpoint(FOLDER, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
    shared = thinwire.local_steps_lightning(RECIPE, peers=meet)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=STEPS // SAVED, callbacks=[shared, kept], accelerator="cpu", **quiet
    )
    place = FOLDER / f"step={SAVED}.ckpt" if resumes else None
    trainer.fit(model, DataLoader(data, 4), ckpt_path=place)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    train = by_lightning if KIND == "lightning" else by_trainer
    whole, again = (digest(train(resumes)) for resumes in (False, True))
    print("same" if whole == again else "APART", whole)
