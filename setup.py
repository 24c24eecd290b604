"""A wheel with compiled kernels where FOREBAY_COMPILED_WHEEL is set (`make wheel`), and a plain one elsewhere.

The plain one compiles its kernels at first use. Kernels are called through ctypes, so one wheel serves every Python.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))
COMPILED = "forebay/kernels/compiled"
platform_tags: list[str] = []


class BuildWithKernels(build_py):
    """Copy the package, then compile its C++ beside it."""

    def run(self) -> None:
        from forebay.kernels.build.compile import compiler
        from forebay.kernels.build.for_wheel import compile_for_wheel
        from forebay.kernels.cpu_support.sources import kernel_library

        # by its path: the package around it needs numpy, which a build has not
        allocators = runpy.run_path(str(ROOT / "src/forebay/passes/allocators/sources.py"))["LIBRARY"]
        super().run()
        cxx = compiler()
        if cxx is None:
            raise SystemExit("a wheel with compiled kernels needs a C++ compiler; install g++ or set CXX")
        platform_tags.append(compile_for_wheel([kernel_library(), allocators], Path(self.build_lib) / COMPILED, cxx))


class PlatformDistribution(Distribution):
    """A distribution whose files go where compiled code goes."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", platform_tags[0]


wanted = os.environ.get("FOREBAY_COMPILED_WHEEL")
if wanted:
    setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
else:
    setup()
