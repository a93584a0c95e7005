"""A state of which each process of the trainer publishes its own shards: both ends."""
