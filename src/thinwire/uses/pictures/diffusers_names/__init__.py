"""All that thinwire asks of diffusers: plans, hooks, blocks and layers of experts, by private names."""
