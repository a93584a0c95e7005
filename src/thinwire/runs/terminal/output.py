"""What commands print: results on stdout, words for people on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

PLAIN_WIDTH = 120  # columns where nobody's terminal says otherwise


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def tell(text: str) -> None:
    """Print a line for people on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
