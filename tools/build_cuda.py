"""Compiles cuda/*.cu with nvcc to the library of kernels: ``python tools/build_cuda.py -o FILE``.

setup.py calls :func:`build_for_package`. Read from the environment:
PAGEDCACHE_CUDA       auto (the default: build where nvcc is there and works), on, off
PAGEDCACHE_CUDA_ARCH  what to build for instead of the list here: 90 or 80,90 or native or all-major
CUDA_HOME, CUDA_PATH, CUDA_ROOT  where nvcc is, if not on PATH and not in /usr/local/cuda
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libpagedcache_cuda.so"
DEFAULT_ROOT = "/usr/local/cuda"
OBJECTS = ROOT / "build" / "cuda"
#: Compute capabilities that get machine code, as X.Y without the dot; the newest gets PTX too, from
#: which the driver compiles for every GPU that comes later.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
#: CPU and GPU round alike: no fused multiply-add, on either side of a launch.
FLAGS = (
    "-std=c++17", "-O3", "-fmad=false", "-cudart", "static", "-Xfatbin", "-compress-all",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off",
)  # fmt: skip
CHOICES = {"": "auto", "1": "on", "true": "on", "yes": "on", "0": "off", "false": "off",
           "no": "off"}  # fmt: skip


class BuildError(Exception):
    """Why there is no library."""


def choice(environ: Mapping[str, str] = os.environ) -> str:
    """``"auto"``, ``"on"`` or ``"off"``. Raises BuildError for anything else."""
    value = environ.get("PAGEDCACHE_CUDA", "").strip().lower()
    value = CHOICES.get(value, value)
    if value not in ("auto", "on", "off"):
        raise BuildError(f"PAGEDCACHE_CUDA must be auto, on or off, not {value!r}")
    return value


def find_nvcc(environ: Mapping[str, str] = os.environ) -> str:
    """The path of nvcc. Raises BuildError that names the places looked at."""
    roots = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT") if environ.get(name)]
    folders = [os.path.join(root, "bin") for root in roots]
    folders += [environ.get("PATH", os.defpath), f"{DEFAULT_ROOT}/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        places = f"CUDA_HOME, CUDA_PATH, CUDA_ROOT, PATH, {DEFAULT_ROOT}"
        raise BuildError(f"no CUDA compiler: nvcc is in none of {places}")
    return found


def known_architectures(nvcc: str) -> set[int]:
    """What this nvcc can make machine code for."""
    listed = _run([nvcc, "--list-gpu-code"])
    return {int(number) for number in re.findall(r"\bsm_(\d+)\b", listed)}


def architecture_flags(wanted: str, known: set[int]) -> tuple[list[str], list[int]]:
    """nvcc's options for ``wanted`` ("" for the list above), and what had to be left out of it.

    Only the list above is cut to what the toolkit knows: what the user asks for is asked of nvcc.
    """
    if re.fullmatch(r"native|all|all-major", wanted):
        return [f"-arch={wanted}"], []
    numbers = [int(number) for number in re.findall(r"\d+", wanted)]
    if wanted.strip() and not re.fullmatch(r"((sm_)?\d+[\s,;]*)+", wanted.strip()):
        raise BuildError(f"PAGEDCACHE_CUDA_ARCH: expected numbers such as 80,90, not {wanted!r}")
    left_out = [] if numbers else [number for number in ARCHITECTURES if number not in known]
    numbers = sorted(numbers or set(ARCHITECTURES) & known)
    if not numbers:
        raise BuildError(f"this nvcc knows none of {', '.join(map(str, ARCHITECTURES))}")
    flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    return [*flags, f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"], left_out


def tell(text: str) -> None:
    """Say something on stderr; pip shows it under -v."""
    print(f"pagedcache: {text}", file=sys.stderr, flush=True)


def build(
    out: Path, environ: Mapping[str, str] = os.environ, say: Callable[[str], None] = tell
) -> None:
    """Compile the library to ``out``, but for sources that did not change since the last time.

    Objects are kept in build/cuda/. Raises BuildError.
    """
    nvcc = find_nvcc(environ)
    wanted = environ.get("PAGEDCACHE_CUDA_ARCH", "")
    flags, left_out = architecture_flags(wanted, known_architectures(nvcc))
    if left_out:
        say(f"this nvcc does not know {', '.join(f'sm_{n}' for n in left_out)}: left out")
    compile_command = [nvcc, *FLAGS, f"-I{ROOT / 'include'}", *flags]
    version = _run([nvcc, "--version"])
    key = hashlib.sha256(f"{version}{shlex.join(compile_command)}".encode()).hexdigest()[:12]
    objects = OBJECTS / key
    objects.mkdir(parents=True, exist_ok=True)
    headers = [*(ROOT / "include").rglob("*.h"), *(ROOT / "cuda").glob("*.h")]
    changed = max(path.stat().st_mtime for path in headers)

    def compiled(source: Path) -> Path:
        made = objects / f"{source.stem}.o"
        if not made.exists() or made.stat().st_mtime <= max(changed, source.stat().st_mtime):
            fresh = made.with_suffix(f".{os.getpid()}.o")
            _run([*compile_command, "-c", str(source), "-o", str(fresh)])
            os.replace(fresh, made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, sorted((ROOT / "cuda").glob("*.cu"), key=_longest_first)))
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{out.name}.{os.getpid()}")
    link = [nvcc, "-shared", "-cudart", "static", "-Xlinker", "--as-needed,--exclude-libs=ALL,-s"]
    _run([*link, *map(str, made), "-o", str(fresh)])
    os.replace(fresh, out)  # programs that have the old one open keep it
    names = wanted or ", ".join(f"sm_{n}" for n in ARCHITECTURES if n not in left_out)
    say(f"built {out.name} for {names} with {nvcc}")


def build_for_package(
    folder: str | Path,
    environ: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = tell,
) -> bool:
    """Do for the package in ``folder`` what PAGEDCACHE_CUDA says, and tell which it was.

    Returns whether it has a library now. Under ``auto`` a missing or failing compiler is a message;
    under ``on`` it raises BuildError.
    """
    setting = choice(environ)
    out = Path(folder).absolute() / LIBRARY
    out.unlink(missing_ok=True)  # what another setting has left would belong to other sources
    if setting == "off":
        say("PAGEDCACHE_CUDA=off: no CUDA kernels")
        return False
    try:
        if sys.platform != "linux":
            raise BuildError("the CUDA kernels are built on Linux only")
        build(out, environ, say)
    except BuildError as error:
        if setting == "on":
            raise
        say(f"no CUDA kernels (PAGEDCACHE_CUDA=auto): {error}")
        return False
    return True


def _longest_first(source: Path) -> int:
    return -source.stat().st_size


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not start: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildError(f"nvcc failed ({done.returncode}): {shlex.join(command)}\n{said}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, default=Path(LIBRARY), metavar="FILE")
    try:
        build(parser.parse_args(arguments).output.absolute())
    except BuildError as error:
        print(f"build_cuda: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
