"""Start thinwire as users do, for tests: whole runs, single ranks as torchrun starts them, and their traces.

Importing torch and transformers takes seconds, so ``warm()`` keeps one process that has done it and forks a
copy of itself for each command. That process is itself a fork of the one that runs the tests, made before the
first of them, so it has all that they import. It imports what else a command needs before its first fork of a
kind.
"""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import os
import pkgutil
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from waiting import free_port as free_port

PATIENCE = 150.0  # seconds; the machine may be busy with other things
ABSENT = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "THINWIRE_TOKEN",
    "THINWIRE_DEBUG",
)
STATES = ("thinwire.uses.following.commands.following", "thinwire.uses.following.commands.publishing")
FEDERATED = (
    "sklearn.datasets",
    "thinwire.uses.federated.run.comparison",
    "thinwire.uses.federated.run.deployment",
)
PICTURES = (
    "diffusers:FluxTransformer2DModel",
    "diffusers.hooks.hooks",
    "diffusers.models.transformers.transformer_hidream_image",
    "thinwire.uses.pictures.run.generation",
)
SERVING = (
    "transformers:LlamaForCausalLM",
    "transformers:PreTrainedTokenizerFast",
    "thinwire.uses.serving.commands.serve_text",
    "thinwire.uses.serving.run.endpoint_program",
    "thinwire.uses.serving.run.serving_demo",
    "thinwire.uses.serving.run.serving_launch",
)
NEEDS = {
    "generate": PICTURES,
    "worker": (*PICTURES, "thinwire.uses.pictures.workers.worker_session"),
    "publish": STATES,
    "follow": STATES,
    "federate": FEDERATED,
    "federate-serve": FEDERATED,
    "federate-join": FEDERATED,
    "serve": SERVING,
}  # what a command imports; all others:
TRAINING = (
    "transformers:GPT2LMHeadModel",
    "transformers:PreTrainedTokenizerFast",
    "thinwire.uses.training.run.training_launch",
    "thinwire.uses.training.run.training_rank",
)


def until(condition: Any, what: str, timeout: float = PATIENCE) -> Any:
    """Return the first true value of ``condition()``; fail by naming ``what`` after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(0.02)
    return found


class Command:
    """One running command; what it prints is in files."""

    def __init__(self, pid: int, place: Path, poll: Any) -> None:
        self.pid, self._place, self._poll, self.code = pid, place, poll, None

    @property
    def out(self) -> str:
        return (self._place / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self._place / "stderr").read_text()

    @property
    def said(self) -> str:
        return self.out + self.err

    def says(self, words: str, timeout: float = PATIENCE) -> re.Match[str]:
        """Wait until the command has said what this pattern finds; fail where it ends without that."""
        until(lambda: re.search(words, self.said) or self.poll() is not None, words, timeout)
        found = re.search(words, self.said)
        assert found is not None, f"{words}: {self.said}"
        return found

    def end(self, how: int = signal.SIGINT) -> int:
        """Send a signal, and return the exit code."""
        self.signal(how)
        return self.wait()

    def poll(self) -> int | None:
        self.code = self._poll() if self.code is None else self.code
        return self.code

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return the exit code; on a time-out kill the command and show what it said."""
        try:
            until(lambda: self.poll() is not None, f"{self.pid} to end", timeout)
        except TimeoutError as e:
            self.signal(signal.SIGKILL)
            raise TimeoutError(f"{e}; it said: {self.err[-2000:]}") from None
        assert self.code is not None
        return self.code

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to the command alone, or to its process group as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)


def environment(**more: Any) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ABSENT and not k.startswith("TORCHELASTIC")}
    return kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | {k: str(v) for k, v in more.items()}


def cold(place: Path, *command: Any, **more: Any) -> Command:
    """Start a program afresh, as a user's shell does."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "stdout").open("w") as out, (place / "stderr").open("w") as err:
        process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment(**more),
            start_new_session=True,
        )
    return Command(process.pid, place, process.poll)


class Warm:
    """The process that forks; one for the whole test session."""

    def __init__(self) -> None:
        sys.stdout.flush()
        orders, mine = os.pipe()
        answers, its = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _begin(orders, its)
        for fd in (orders, its):
            os.close(fd)
        self._orders, self._answers = os.fdopen(mine, "w"), os.fdopen(answers)
        atexit.register(self.close)

    def start(self, place: Path, *arguments: Any, largest_file: int | None = None, **more: Any) -> Command:
        """Run ``thinwire ARGUMENTS`` in a fork; ``largest_file`` in bytes stands in for a full disk."""
        asked = {"arguments": [str(a) for a in arguments], "largest_file": largest_file}
        needs = (
            "thinwire.cli.app",
            *NEEDS.get(asked["arguments"][0] if arguments else "", TRAINING),
        )
        return self._fork(place, needs, asked | {"environment": environment(**more)})

    def python(
        self, place: Path, *arguments: Any, needs: Sequence[str] = (), cwd: Path | None = None, **more: Any
    ) -> Command:
        """Run ``python ARGUMENTS`` in a fork: a script, ``-m MODULE`` or ``-c CODE``.

        ``needs`` is imported before.
        """
        asked = {"python": [str(a) for a in arguments], "cwd": cwd and str(cwd)}
        return self._fork(place, needs, asked | {"environment": environment(**more)})

    def _fork(self, place: Path, needs: Sequence[str], asked: dict[str, Any]) -> Command:
        place.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):  # to be looked at before the fork has opened them
            (place / name).touch()
        pid = self._ask(asked | {"place": str(place), "needs": list(needs)})
        return Command(pid, place, lambda: self._ask({"poll": pid}))

    def run(self, place: Path, *arguments: Any, **more: Any) -> Command:
        """Run a command to its end."""
        command = self.start(place, *arguments, **more)
        command.wait()
        return command

    def ranks(
        self, place: Path, *arguments: Any, world: int = 2, each: Any = lambda rank: (), **more: Any
    ) -> list[Command]:
        """Start the ranks as torchrun would; ``each(rank)`` adds arguments, or an environment."""
        store = hosted_store()
        ranks = []
        for rank in range(world):
            own = each(rank)
            extra, variables = ((), own) if isinstance(own, dict) else (own, {})
            variables = rank_environment(rank, world, store.port) | more | variables
            ranks.append(self.start(place / f"rank-{rank}", *arguments, *extra, **variables))
            ranks[-1].store = store  # type: ignore[attr-defined]  # lives as long as the rank is of interest
        return ranks

    def close(self) -> None:
        for stream in (self._orders, self._answers):
            stream.close()
        os.waitpid(self._pid, 0)

    def _ask(self, value: dict[str, Any]) -> Any:
        self._orders.write(json.dumps(value) + "\n")
        self._orders.flush()
        return json.loads(self._answers.readline())


@cache
def warm() -> Warm:
    return Warm()


def hosted_store() -> Any:
    """Return a torch store on loopback, as torchrun's agent keeps one."""
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def rank_environment(rank: int, world: int, port: int) -> dict[str, Any]:
    return {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the whole lines of ``metrics.jsonl`` so far."""
    file = out / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def reached(out: Path, step: int, *commands: Command) -> list[dict[str, Any]]:
    """Wait until a run has booked ``step`` steps."""

    def look() -> list[dict[str, Any]] | None:
        for c in commands:
            if c.poll() is not None:
                raise RuntimeError(f"ended with {c.code} before step {step}: {c.err[-2000:]}")
        return found if len(found := metrics(out)) >= step else None

    return until(look, f"step {step}")


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


def sentence(command: Command) -> str:
    """Return the one line on a failed command's stderr, beside notes."""
    lines = [line for line in command.err.strip().splitlines() if ": note: " not in line]
    assert len(lines) == 1, command.err
    assert lines[0].startswith("thinwire: ")
    return lines[0].removeprefix("thinwire: ")


def children(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def gone(pids: list[int], timeout: float = 30.0) -> None:
    """Wait until none of ``pids`` runs; kill what is left and fail."""
    try:
        until(lambda: not any(_runs(p) for p in pids), f"processes {pids} to end", timeout)
    except TimeoutError:
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)
        raise


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pid: int) -> Iterator[str]:
    """Yield the addresses at which a process listens, in the kernel's hexadecimal."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(str(fd.readlink()))
        except OSError:
            continue
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                yield fields[1].split(":")[0]


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path | None]:
    """Mount a small file system of ``size`` bytes, or yield ``None`` where that is not allowed."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, check=False
    )
    try:
        yield folder if made.returncode == 0 else None
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _begin(orders: int, answers: int) -> None:
    """Be the process that forks: with nothing of the tests but what they have imported."""
    code = 1
    try:
        os.setsid()
        os.dup2(orders, 0)
        os.dup2(answers, 1)
        os.closerange(3, 1 << 16)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        logging.getLogger().handlers.clear()
        os.environ.update(environment())
        _serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _load(needs: list[str]) -> None:
    """Import what a command is going to import, so that all forks have it."""
    for name in needs:
        with suppress(ImportError):  # sklearn, of which the command says that it is missing
            pkgutil.resolve_name(name)


def _serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            _reply(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        _load(asked.pop("needs"))
        pid = os.fork()
        if pid == 0:
            _become(**asked)
        _reply(pid)


def forked(command: Sequence[str]) -> list[str]:
    """Return module and arguments of a process of ours, also as torchrun starts it; nothing of another."""
    from thinwire.runs.ranks import rank_main
    from thinwire.uses.federated.run.trainer import WORKER

    words = [word for word in command if word != "-u"]
    ours = words[:2] == [sys.executable, "-m"] and words[2] in ("thinwire", rank_main.__name__, WORKER)
    return words[2:] if ours else []


PLAIN = subprocess.Popen


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A rank's process, where a command starts one: a fork of it, which has imported all that already."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        module = forked(args)
        if not module:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        named = dict(zip(list(inspect.signature(super()._execute_child).parameters)[1:], more, strict=True))  # type: ignore[misc]
        streams = [named[n] for n in ("p2cread", "c2pwrite", "errwrite")]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_module(module, streams, named)
        self._child_created = True
        for fd, end in zip(streams, ("p2cwrite", "c2pread", "errread"), strict=True):
            if named[end] >= 0:  # a pipe, not a file of whoever starts it
                os.close(fd)


def _run_module(args: Any, streams: list[int], named: dict[str, Any]) -> None:
    """Be ``python -m ARGS`` from here on."""
    code: Any = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if named["start_new_session"]:
            os.setsid()
        moved = [os.dup(fd if fd >= 0 else n) for n, fd in enumerate(streams)]
        for n, fd in enumerate(moved):
            os.dup2(fd, n)
        last = 2
        for fd in sorted(named["pass_fds"]):
            os.closerange(last + 1, fd)
            last = fd
        os.closerange(last + 1, 1 << 16)
        if named["env"] is not None:
            os.environ.clear()
            os.environ.update(named["env"])
        sys.argv = [*args]
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # it was imported before
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    os._exit(code if isinstance(code, int) else 1)


def _reply(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _become(
    place: str,
    environment: dict[str, str],
    arguments: list[str] | None = None,
    python: list[str] | None = None,
    cwd: str | None = None,
    largest_file: int | None = None,
) -> None:
    """Be ``thinwire ARGUMENTS``, or ``python PYTHON``, from here on."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    null = os.open(os.devnull, os.O_RDONLY)
    streams = [os.open(f"{place}/{n}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for n in ("stdout", "stderr")]
    for target, fd in enumerate((null, *streams)):
        os.dup2(fd, target)
    for module in list(sys.modules.values()):  # torchrun has it under its own name
        if getattr(module, "__dict__", {}).get("Popen") is PLAIN:
            module.Popen = Forked  # type: ignore[attr-defined]
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    code: Any = 1
    try:
        if cwd is not None:
            os.chdir(cwd)
        if python is None:
            from thinwire.cli import main

            main(arguments)
        else:
            _interpret(python)
            code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _interpret(words: list[str]) -> None:
    """Run a script, with ``-m`` a module or with ``-c`` what stands there, as the main program."""
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # it was imported before
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
