"""Builds the compiled modules; everything declarative is in pyproject.toml.

Switches, read from the environment:
PAGEDCACHE_SANITIZE=address,undefined  instruments the C code (run with libasan preloaded)
PAGEDCACHE_ABI3=0                      builds for this Python only, not for the stable ABI
"""

import os
import platform
import sysconfig
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SANITIZE = os.environ.get("PAGEDCACHE_SANITIZE", "")
ABI3 = (
    os.environ.get("PAGEDCACHE_ABI3", "1") != "0"
    and platform.python_implementation() == "CPython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
# Variants never share object files: the build looks at dates, not at flags.
BUILD = os.path.join("build", f"{'abi3' if ABI3 else 'version'}{SANITIZE and '-' + SANITIZE}")


class BuildExt(build_ext):
    """Adds the flags that make the arithmetic exact: no fused multiply-add, no aliasing guesses."""

    def build_extensions(self):
        if self.compiler.compiler_type == "msvc":
            compile_args, link_args = ["/O2", "/fp:precise", "/std:c11"], []
        else:
            compile_args = ["-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
            link_args = ["-pthread"]
            if SANITIZE:
                link_args.append(f"-fsanitize={SANITIZE}")
                compile_args += ["-O1", "-g", "-fno-omit-frame-pointer", link_args[-1]]
                compile_args.append("-fno-sanitize-recover=all")
        for extension in self.extensions:
            extension.extra_compile_args = compile_args
            extension.extra_link_args = link_args
        super().build_extensions()


sources = sorted(path.replace(os.sep, "/") for path in glob("pagedcache/**/*.pyx", recursive=True))
headers = sorted(glob("include/**/*.h", recursive=True))
macros = [("Py_LIMITED_API", "0x030b0000")] if ABI3 else []
extensions = [
    Extension(path[:-4].replace("/", "."), [path], include_dirs=["include"], depends=headers,
              define_macros=macros, py_limited_api=ABI3)
    for path in sources
]
setup(
    ext_modules=cythonize(extensions, language_level=3, build_dir=os.path.join(BUILD, "cython")),
    cmdclass={"build_ext": BuildExt},
    options={"build": {"build_base": BUILD}, "build_ext": {"parallel": os.cpu_count()},
             "bdist_wheel": {"py_limited_api": "cp311"} if ABI3 else {}},
)
