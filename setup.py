"""Builds the compiled modules; everything declarative is in pyproject.toml.

Switches, read from the environment:
PAGEDCACHE_CUDA=auto|on|off            the CUDA kernels: see tools/build_cuda.py, which builds them
PAGEDCACHE_SANITIZE=address,undefined  instruments the C code (run with libasan preloaded)
PAGEDCACHE_ABI3=0                      builds for this Python only, not for the stable ABI
"""
import os
import platform
import sys
import sysconfig
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, "tools")
from build_cuda import build_for_package  # noqa: E402

SANITIZE = os.environ.get("PAGEDCACHE_SANITIZE", "")
CPYTHON = platform.python_implementation() == "CPython"
FREE_THREADED = sysconfig.get_config_var("Py_GIL_DISABLED")
ABI3 = CPYTHON and not FREE_THREADED and os.environ.get("PAGEDCACHE_ABI3", "1") != "0"
# Variants never share object files: the build looks at dates, not at flags.
BUILD = os.path.join("build", f"{'abi3' if ABI3 else 'version'}{SANITIZE and '-' + SANITIZE}")


class BuildExt(build_ext):
    """Adds the flags that make the arithmetic exact: no fused multiply-add, no aliasing guesses."""

    def run(self):
        super().run()
        build_for_package(os.path.join("" if self.inplace else self.build_lib, "pagedcache"))

    def build_extensions(self):
        compile_args = ["-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
        link_args = ["-pthread"]
        if self.compiler.compiler_type == "msvc":
            compile_args, link_args = ["/O2", "/fp:precise", "/std:c11"], []
        elif SANITIZE:
            link_args += [f"-fsanitize={SANITIZE}"]
            compile_args += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
            compile_args += link_args[1:]
        for extension in self.extensions:
            extension.extra_compile_args, extension.extra_link_args = compile_args, link_args
        super().build_extensions()


sources = sorted(path.replace(os.sep, "/") for path in glob("pagedcache/**/*.pyx", recursive=True))
build = {"include_dirs": ["include"], "depends": sorted(glob("include/**/*.h", recursive=True)),
         "define_macros": [("Py_LIMITED_API", "0x030b0000")] * ABI3, "py_limited_api": ABI3}
extensions = [Extension(path[:-4].replace("/", "."), [path], **build) for path in sources]
setup(
    ext_modules=cythonize(extensions, language_level=3, build_dir=os.path.join(BUILD, "cython")),
    cmdclass={"build_ext": BuildExt},
    options={"build": {"build_base": BUILD}, "build_ext": {"parallel": os.cpu_count()},
             "bdist_wheel": {"py_limited_api": "cp311"} if ABI3 else {}},
)
