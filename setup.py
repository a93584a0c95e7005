"""The one compiled part: an installation without a C compiler goes without it, and numpy does its work."""

import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = "src/thinwire/state/kernels.c"


class Library(build_ext):
    """Build what ctypes loads: under the name of a module, whoever lists modules would try to import it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return where a library lies, without the suffix of a module."""
        return str(Path(*fullname.split(".")).with_suffix(".bin"))


setup(
    cmdclass={"build_ext": Library},
    ext_modules=[
        Extension(
            "thinwire.state._kernels",
            [SOURCE],
            define_macros=[("TW_SOURCE", str(zlib.crc32(Path(SOURCE).read_bytes())))],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ],
)
