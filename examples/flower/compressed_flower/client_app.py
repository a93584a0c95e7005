"""The client: a train function as any of Flower's, and one mod."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from compressed_flower.task import network, samples, train
from thinwire.uses.federated.flower.mod import compression_mod

app = ClientApp(mods=[compression_mod])


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train on this client's samples from the weights in the message."""
    model, config = network(), message.content["config"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(int(context.node_config["partition-id"]))
    steps, rate = config.get("thinwire.steps", 5), config.get("thinwire.rate", 0.5)
    loss = train(model, x, y, int(steps), float(rate))
    metrics = MetricRecord({"num-examples": len(y), "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
