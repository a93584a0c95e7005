"""What commands print: results on stdout, words for people on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from thinwire.lab.records.runs import Run
from thinwire.lab.records.summary import headline, summary_table

PLAIN_WIDTH = 120  # columns where nobody's terminal says otherwise


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_runs(runs: Sequence[Run]) -> None:
    """Print the table of ``runs`` and what it means."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print()
    console.print(summary_table(runs))
    console.print()
    console.print(headline(runs), style="bold", highlight=False, markup=False)


def tell(text: str) -> None:
    """Print a line for people on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
