"""A model whose blocks are divided over the ranks: each loads and keeps its own, and what is around them."""
