"""Checks what a wheel or an sdist holds: ``python tools/check_wheel.py FILE…``.

A wheel has the stable-ABI tag, one compiled module per Cython source of this checkout, every Python
file and stub, the typing marker and the bundled data, the library of CUDA kernels where it was
built, and no sources, headers or tests. An sdist has everything that building and testing need and
nothing that was generated. Exit code 1 with one line per fault.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = {"pagedcache/py.typed", "pagedcache/data/smollm2_kv_sample.npz"}
KERNELS = "pagedcache/libpagedcache_cuda.so"
WHEEL_NAME = re.compile(r"pagedcache-[\w.]+-cp311-abi3-(?P<platform>\w+(\.\w+)*)\.whl")


def cython_modules() -> set[str]:
    """Paths of the Cython sources without suffix: ``pagedcache/_native/rows``."""
    found = (ROOT / "pagedcache").rglob("*.pyx")
    return {path.relative_to(ROOT).with_suffix("").as_posix() for path in found}


def python_files() -> set[str]:
    found = [path for kind in ("*.py", "*.pyi") for path in (ROOT / "pagedcache").rglob(kind)]
    return {path.relative_to(ROOT).as_posix() for path in found}


def check_wheel(path: Path) -> list[str]:
    faults = []
    if not WHEEL_NAME.fullmatch(path.name):
        faults.append("the name has no cp311-abi3 tag")
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        tags = archive.read(f"{info}/WHEEL").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    package = {name for name in names if not name.startswith(f"{info}/")}
    package = {name for name in package if not re.match(r"pagedcache\.libs/", name)}
    modules = cython_modules()
    compiled = {name.partition(".")[0] for name in package if name.endswith((".abi3.so", ".pyd"))}
    faults += [f"{name} is not compiled" for name in sorted(modules - compiled)]
    faults += [f"{name} has no Cython source here" for name in sorted(compiled - modules)]
    faults += [f"{name} is missing" for name in sorted((DATA | python_files()) - package)]
    allowed = (".py", ".pyi", ".abi3.so", ".pyd", ".npz", ".md", "py.typed")
    faults += [f"{name} does not belong in a wheel" for name in sorted(package - {KERNELS})
               if not name.startswith("pagedcache/") or not name.endswith(allowed)]  # fmt: skip
    if "Tag: cp311-abi3-" not in tags or "Root-Is-Purelib: false" not in tags:
        faults.append("the WHEEL file names another ABI")
    for line in ("Name: pagedcache", "License-Expression: Apache-2.0", "Requires-Python: >=3.11",
                 "Requires-Dist: numpy>=2", "Description-Content-Type: text/markdown"):  # fmt: skip
        if not re.search(f"^{re.escape(line)}", metadata, re.MULTILINE):
            faults.append(f"the metadata has no {line!r}")
    if "pagedcache = pagedcache.cli:main" not in scripts:
        faults.append("the script pagedcache is missing")
    if f"{info}/licenses/LICENSE" not in names:
        faults.append("the licence is missing")
    return faults


def check_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "ARCHITECTURE.md", "PKG-INFO"}
    needed |= DATA | python_files() | {f"{name}.pyx" for name in cython_modules()}
    for folder, kinds in (("pagedcache", ["*.pxd"]), ("include", ["*.h"]),
                          ("cuda", ["*.cu", "*.h"]), ("tools", ["*.py", "*.sh", "*.md"]),
                          ("examples", ["*.py"]),
                          ("tests", ["*.*"])):  # fmt: skip
        for kind in kinds:
            found = (file.relative_to(ROOT) for file in (ROOT / folder).rglob(kind))
            needed |= {file.as_posix() for file in found
                       if not file.suffix == ".pyc" and not file.parts[-1].startswith(".")
                       and (ROOT / file).is_file() and ".hypothesis" not in file.parts}  # fmt: skip
    generated = (".c", ".so", ".o", ".pyc")
    return [f"{name} is missing" for name in sorted(needed - names)] + [
        f"{name} is generated" for name in sorted(names) if name.endswith(generated)
        and not (name.startswith("tests/programs/") and name.endswith(".c"))
    ]


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    for argument in arguments:
        path = Path(argument)
        faults = check_wheel(path) if path.suffix == ".whl" else check_sdist(path)
        for fault in faults:
            print(f"{path.name}: {fault}")
        failed += bool(faults)
        if not faults:
            print(f"{path.name}: as it should be ({path.stat().st_size:,} bytes)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
