"""The one compiled part: an installation without a C compiler goes without it, and numpy does its work."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "thinwire.state._kernels",
            ["src/thinwire/state/kernels.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
