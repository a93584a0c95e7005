"""SGLang's custom loader: a few bytes say what is wanted, the weights come from the trainer."""

import pytest
import torch
from fused_model import FusedModel, checkpoint

from thinwire.types import InputError
from thinwire.uses.following.hosts import sglang_loader
from thinwire.uses.following.hosts.sglang_loader import load, wanted
from thinwire.uses.following.push.publisher import Publisher


def test_a_worker_is_brought_to_the_version_that_is_wanted() -> None:
    tensors, model, expected = checkpoint(), FusedModel(1), FusedModel(1)
    with Publisher(tensors) as publisher:
        address = f"127.0.0.1:{publisher.port}"
        for step in range(3):
            tensors["model.layers.0.mlp.up_proj.weight"][step:] *= 2
            version = publisher.publish().number
            load(model, wanted(address, version))
            expected.load_weights(tensors.items())
            assert all(
                torch.equal(x, y) for x, y in zip(model.parameters(), expected.parameters(), strict=True)
            )
        sglang_loader.close()


def test_tensors_that_are_no_request_are_refused() -> None:
    with pytest.raises(InputError, match="is not what wanted"):
        load(FusedModel(), checkpoint().items())
    with pytest.raises(InputError, match="is no version"):
        wanted("127.0.0.1:7200", -1)
