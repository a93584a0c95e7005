"""The one compiled part: an installation without a C compiler goes without it, and numpy does its work."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "src/thinwire/state/kernels.c"

setup(
    ext_modules=[
        Extension(
            "thinwire.state._kernels",
            [SOURCE],
            define_macros=[("TW_SOURCE", str(zlib.crc32(Path(SOURCE).read_bytes())))],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
