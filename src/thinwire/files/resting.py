"""How long files have to rest before they count as written. Help texts name these, so nothing is imported."""

REST = 0.5  # seconds without a change after which a file counts as written
PART_REST = 10.0  # the same where only some of several files have changed: the others may be on their way
