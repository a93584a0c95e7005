"""Keys and values of language models by principal components: what ``thinwire.kv`` is made of."""
