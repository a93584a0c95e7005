"""Studies of language models served by stages."""
