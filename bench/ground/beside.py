"""Ask a resolver whether thinwire's core installs beside the hosts that people train and serve with.

Run ``pip install uv`` and ``python -m bench.ground.beside``: it resolves each host together with this
checkout, for Python 3.12 on Linux, and installs nothing. It prints the versions that the resolver takes, and
exits with 1 where a host has no answer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOSTS = ("vllm==0.33.0", "trl==1.16.0", "verl==0.9.0")
SHOWN = ("torch", "numpy", "pyzmq", "transformers")
CHECKOUT = Path(__file__).parents[2]
DEADLINE = 300.0  # seconds a host: a resolver may look at many versions


def resolve(host: str) -> dict[str, str]:
    """Return the versions that would be installed for ``host`` and thinwire, by name.

    Errors: ``RuntimeError`` with the resolver's words where there is no answer.
    """
    options = ["--quiet", "--no-header", "--no-annotate", "--python-version", "3.12"]
    command = ["uv", "pip", "compile", *options, "--python-platform", "x86_64-manylinux_2_28", "-"]
    wanted = f"{CHECKOUT}\n{host}\n"
    try:
        done = subprocess.run(command, input=wanted, capture_output=True, text=True, timeout=DEADLINE)
    except FileNotFoundError:
        sys.exit("the resolver is missing: pip install uv")
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split()))
    lines = (line.partition("==") for line in done.stdout.splitlines() if "==" in line)
    return {name.partition("[")[0]: version for name, _, version in lines}


def main() -> None:
    """Resolve each host and print the answer."""
    failed = False
    for host in HOSTS:
        try:
            found = resolve(host)
            versions = "  ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
            print(f"{host:14} {len(found)} packages: {versions}", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            failed = True
            print(f"{host:14} no answer: {e}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
