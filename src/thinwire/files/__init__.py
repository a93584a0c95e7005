"""Files of tensors, and the places they lie in: folders, web servers, object stores."""

REST = 0.5  # seconds without a change after which a file counts as written
PART_REST = 10.0  # the same where only some of several files have changed: the others may be on their way
