"""Builds a wheel of PyCUDA, on a machine with or without an NVIDIA driver.

    python tools/build_pycuda.py [--output FOLDER] [--driver-dir FOLDER] [--version VERSION]
                                 [--sdist FILE]

PyCUDA is published as source only, and ``pip install pycuda`` fails where nvcc is a wrapper script,
where there is no cuRAND, and where no libcuda.so is there to link with. This finds the toolkit
through nvcc itself, leaves cuRAND out, and links with, in this order: the folder given, the
toolkit's own link stub, the driver of this machine, the stub of tests/cuda_emulation.
The wheel works with any driver that knows the functions of the toolkit's version.

Needs a C++ compiler and the toolkit's headers; not nvcc, if CUDA_HOME names the toolkit. Prints the
path of the wheel last. A wheel that is there already for this Python is used again. With --sdist
nothing is fetched: setuptools, wheel and NumPy must be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "2026.1"
MINUTES = "one to three minutes"


def toolkit_roots() -> Iterator[Path]:
    """Folders that may be the CUDA toolkit, the likeliest first."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc:  # says where it lives, through any wrapper script
        tried = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        for found in re.findall(r"^#\$ TOP=(.+?)\s*$", tried.stderr, re.MULTILINE):
            yield Path(found).resolve()
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")


def find_toolkit() -> Path:
    """The toolkit: a folder with include/cuda.h."""
    tried = []
    for root in toolkit_roots():
        if (root / "include" / "cuda.h").exists():
            return root
        tried.append(str(root))
    raise SystemExit(
        "no CUDA headers: include/cuda.h is in none of "
        f"{', '.join(dict.fromkeys(tried))}; install the CUDA toolkit, or name it with CUDA_HOME"
    )


def system_folders() -> Iterator[Path]:
    """Where a driver's libcuda.so would be."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    for path in re.findall(r"libcuda\.so => (\S+)", listed):
        yield Path(path).parent


def find_driver(toolkit: Path, given: Path | None) -> Path:
    """A folder with a libcuda.so to link with; its functions are not called."""
    if given is not None:
        if not (given / "libcuda.so").exists():
            raise SystemExit(f"{given} has no libcuda.so")
        return given.resolve()
    folders = [toolkit / lib / "stubs" for lib in ("lib64", "lib", "targets/x86_64-linux/lib")]
    for folder in (*folders, *system_folders()):
        if (folder / "libcuda.so").exists():
            return folder
    builder = ROOT / "tests" / "cuda_emulation" / "build.py"
    if not builder.exists():
        raise SystemExit("no libcuda.so to link with: name its folder with --driver-dir")
    subprocess.run([sys.executable, str(builder), "stub"], check=True, stdout=sys.stderr)
    return ROOT / "build" / "cuda_emulation"


def settings(toolkit: Path, driver: Path) -> str:
    """What PyCUDA's setup reads from ~/.aksetup-defaults.py, the only place pip leaves it."""
    return (
        f"CUDA_ROOT = {str(toolkit)!r}\n"
        f"CUDA_INC_DIR = [{str(toolkit / 'include')!r}]\n"
        "CUDA_ENABLE_CURAND = False\n"
        f"CUDADRV_LIB_DIR = [{str(driver)!r}]\n"
    )


def pip_environment(home: Path) -> dict[str, str]:
    """A home folder with our settings; pip's configuration and cache stay the user's."""
    real = Path.home()
    for name in (".pip", ".netrc"):
        if (real / name).exists():
            (home / name).symlink_to(real / name)
    defaults = {"XDG_CONFIG_HOME": real / ".config", "XDG_CACHE_HOME": real / ".cache"}
    kept = {name: os.environ.get(name, str(path)) for name, path in defaults.items()}
    return {**os.environ, **kept, "HOME": str(home)}


def existing(folder: Path, version: str) -> Path | None:
    """A wheel made earlier for this Python and machine."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = sysconfig.get_platform().rpartition("-")[2].replace("-", "_")
    return next(iter(sorted(folder.glob(f"pycuda-{version}-{tag}-*{machine}.whl"))), None)


def wanted(version: str, sdist: Path | None) -> list[str]:
    """What pip is to build."""
    if sdist is None:
        return ["--no-binary", "pycuda", f"pycuda=={version}"]
    return ["--no-index", "--no-build-isolation", str(sdist.resolve())]


def build(output: Path, version: str, driver_dir: Path | None, sdist: Path | None = None) -> Path:
    """The path of the wheel."""
    if made := existing(output, version):
        return made
    toolkit = find_toolkit()
    driver = find_driver(toolkit, driver_dir)
    print(f"PyCUDA {version}: headers of {toolkit}, linked with {driver}; {MINUTES}",
          file=sys.stderr)  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / ".aksetup-defaults.py").write_text(settings(toolkit, driver))
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir"]
        command += ["--wheel-dir", str(home / "made"), *wanted(version, sdist)]
        done = subprocess.run(
            command, env=pip_environment(home),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout[-6000:], file=sys.stderr)
            raise SystemExit("PyCUDA was not built: the end of pip's output is above")
        wheel = next((home / "made").glob("pycuda-*.whl"))
        shutil.move(str(wheel), output / wheel.name)
    return output / wheel.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "pycuda", metavar="FOLDER")
    parser.add_argument("--driver-dir", type=Path, metavar="FOLDER", help="with a libcuda.so")
    parser.add_argument("--version", default=VERSION)
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="pycuda-VERSION.tar.gz to build")
    chosen = parser.parse_args()
    version = chosen.version
    if chosen.sdist is not None:
        named = re.fullmatch(r"pycuda-(.+)\.tar\.gz", chosen.sdist.name)
        if named is None or not chosen.sdist.is_file():
            raise SystemExit(f"{chosen.sdist} is no file pycuda-VERSION.tar.gz")
        version = named[1]
    print(build(chosen.output.resolve(), version, chosen.driver_dir, chosen.sdist))


if __name__ == "__main__":
    main()
