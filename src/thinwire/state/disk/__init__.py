"""A state on disk: safetensors files, with what is known of its version."""
