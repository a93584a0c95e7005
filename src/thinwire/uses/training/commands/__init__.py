"""The commands ``train``, ``compare``, ``plan``, and two demos."""
