"""The one place where an outcome becomes an exit code and a sentence on stderr.

0 done, 2 bad input, 3 a peer or link lost, 4 an invalid measurement, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from thinwire.dtypes import TORCH_ABSENT
from thinwire.runs.machine.devices import told
from thinwire.runs.machine.files import file_trouble
from thinwire.runs.machine.standard_streams import accept_all
from thinwire.types import InputError, ThinwireError

BAD_INPUT = 2
INTERRUPTED = 130
UsageError: type[Exception] = typer.BadParameter.__mro__[
    1
]  # Typer carries its own copy of Click in later versions


class Program(TyperGroup):
    """A group of commands that ends every failure in one sentence and its exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = super().main
        accept_all()
        code = guarded(
            lambda: run(
                args, prog_name, complete_var, False, windows_expand_args=windows_expand_args, **extra
            )
        )
        if standalone_mode:
            sys.exit(code)
        return code


class CheckedCommand(TyperCommand):
    """A command that takes no empty word for a value: a path made of one is the folder where it is run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=[*args])  # as they were typed
        rest = super().parse_args(ctx, args)
        for param in self.params:
            words = given.get(param.name)
            for word in words if isinstance(words, list | tuple) else [words]:
                if isinstance(word, str) and not word.strip():
                    raise InputError(_empty(param))
        return rest


def _empty(param: Any) -> str:
    """Return the sentence for a parameter without a word, which is called as it is in the help."""
    if param.param_type_name == "option":
        return f"{max(param.opts, key=len)} is empty; give a value or leave the option out"
    return f"{param.metavar.rstrip('.')} is empty; give a value"


def guarded(call: Callable[[], Any]) -> int:
    """Run ``call`` and return the exit code; unexpected errors pass through with their traceback."""
    try:
        with told():
            result = call()
    except ThinwireError as e:
        return _say(str(e), e.exit_code)
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        return _say(f"this command needs {TORCH_ABSENT}", BAD_INPUT)
    except UsageError as e:
        return _say(_usage(e), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except OSError as e:
        return _say(_file(e), BAD_INPUT)
    code = result if isinstance(result, int) else 0
    return _say("interrupted", code) if code == INTERRUPTED else code


def _file(error: OSError) -> str:
    sentence = file_trouble(error)
    if sentence is None:
        raise error
    return sentence


def _usage(error: Any) -> str:
    """Return Typer's message as one sentence that ends with where to look."""
    command = getattr(getattr(error, "ctx", None), "command_path", "thinwire")
    text = " ".join(error.format_message().split()).replace(". Did", ", did").rstrip(".?")
    text = text or "say which command"  # the list of them has been printed
    return f"{text}; see {command} --help"


def _say(sentence: str, code: int) -> int:
    if os.environ.get("THINWIRE_DEBUG") == "1" and sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stderr.write(f"thinwire: {sentence}\n")
    sys.stderr.flush()
    return code
