"""The compiled parts: where no C compiler is, thinwire goes without them; numpy and torch do their work."""

import os
import zlib
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGES = ("checksum", "codecs/kernels", "codecs/rans", "codecs/zstd", "state", "uses/scenes/view")
HEADER = "src/thinwire/passes.h"
# Results are the same to the bit wherever they are computed, so no multiplication is fused with an addition,
# and fast maths is switched off again where a user's CFLAGS, which come first, ask for it.
FLAGS = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations", "-ffp-contract=off"]


class Library(build_ext):
    """Build what ctypes loads: under the name of a module, whoever lists modules would try to import it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return where a library lies, without the suffix of a module."""
        return str(Path(*fullname.split(".")).with_suffix(".bin"))

    def copy_file(self, infile: str, outfile: str, *others: Any, **more: Any) -> Any:
        """Put a copy in place whole: processes run what was there before, and others may load it now."""
        new = f"{outfile}.{os.getpid()}"
        made = super().copy_file(infile, new, *others, **more)
        os.replace(new, outfile)  # noqa: PTH105
        return outfile, made[1]


def library(package: str) -> Extension:
    """Return what to build of a package's ``kernels.c``; it will know its sources by the check sum."""
    source = f"src/thinwire/{package}/kernels.c"
    stamp = str(zlib.crc32(Path(HEADER).read_bytes() + Path(source).read_bytes()))
    return Extension(
        f"thinwire.{package.replace('/', '.')}._kernels",
        [source],
        depends=["setup.py", HEADER],
        include_dirs=[str(Path(HEADER).parent)],
        define_macros=[("TW_SOURCE", stamp)],
        extra_compile_args=FLAGS,
        extra_link_args=FLAGS,  # or what is linked lets the whole process lose its smallest numbers
        optional=True,
    )


setup(cmdclass={"build_ext": Library}, ext_modules=[library(package) for package in PACKAGES])
