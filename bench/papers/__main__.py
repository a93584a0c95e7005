"""Say which claims are measured, and what resumes the others: ``python -m bench.papers``.

``--run`` makes the targets that miss runs, cheapest first: ``make bench-papers``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

from bench.papers.claims import Claim, current, targets
from bench.study.cells import ROOT

HAVE: dict[str, Callable[[], bool]] = {
    "": lambda: True,
    "data": lambda: bool(os.environ.get("THINWIRE_DATA")),
    "root": lambda: os.geteuid() == 0,
}


def missing(claim: Claim) -> str:
    """Return what is missing of a claim, or nothing."""
    if claim.blocked:
        return ""
    if claim.wanting:
        return f"to be built: {claim.wanting}"
    many = len(claim.values)
    return f"{many} of {claim.runs} runs: make {claim.target}" if many < claim.runs else ""


def wanted() -> list[str]:
    """Return the targets that miss runs, cheapest first."""
    known = targets()
    names = {claim.target for claim in current() if claim.target and missing(claim)}
    return sorted(names, key=lambda name: int(known[name]["minutes"]))


def main() -> int:
    """Print a line a claim, then run what is missing if asked; return how many targets failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=__doc__)
    parser.add_argument("--run", action="store_true", help="make the targets that miss runs")
    run = parser.parse_args().run
    for claim in current():
        print(f"{claim.name}: {missing(claim) or claim.verdict[0]}")
    return sum(not made(name) for name in wanted()) if run else 0


def made(name: str) -> bool:
    """Make a target, unless this machine lacks what it needs; return whether it is done."""
    needs = str(targets()[name]["needs"])
    if not HAVE[needs]():
        print(f"{name}: left out, it needs {'THINWIRE_DATA' if needs == 'data' else needs}", flush=True)
        return False
    print(f"== make {name}", flush=True)
    return not subprocess.run(["make", name], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
