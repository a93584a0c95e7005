"""What the papers claim, beside what was measured here: ``python -m bench.papers`` says what is missing."""
