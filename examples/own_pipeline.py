import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import distributed

import thinwire

store, rank, world = next(distributed.rendezvous("env://"))  # torchrun --nproc-per-node 2 own_pipeline.py
peers = thinwire.connect_mesh(
    rank, world, store
)  # off loopback: host="192.0.2.1", token=thinwire.read_token()

torch.manual_seed(0)  # a tiny model of random weights; yours: FluxPipeline.from_pretrained(...)
widths = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32, "attention_head_dim": 16}
layers = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "axes_dims_rope": (4, 6, 6)}
model = FluxTransformer2DModel(**widths, **layers).eval()
pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, model)
prompt = {"prompt_embeds": torch.randn(1, 7, 32), "pooled_prompt_embeds": torch.randn(1, 32)}

with thinwire.parallel(pipe.transformer, peers, "compact") as parallel:  # the same calls on all ranks
    noise = torch.Generator().manual_seed(0)  # on the CPU, of one seed
    steps = {"num_inference_steps": 8, "output_type": "latent", "generator": noise}
    picture = pipe(**prompt, height=96, width=96, **steps)
    print(f"rank {rank}: mean {picture.images.mean():.6f}, sent {parallel.tally.nbytes} bytes")

for peer in peers.values():
    peer.close()
