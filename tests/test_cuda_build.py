"""Building the library of CUDA kernels, and what the built one exports and needs."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from profiles import SHORT

import pagedcache
from pagedcache._cuda import library

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "cuda" / "abi.h"
BUILT = Path(pagedcache.__file__).parent / library.FILE_NAME


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/build_cuda.py, with no CUDA toolkit in its default place and objects of its own."""
    spec = importlib.util.spec_from_file_location("build_cuda", ROOT / "tools" / "build_cuda.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEFAULT_ROOT", str(tmp_path / "nowhere"))
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "objects")
    return module


@pytest.fixture
def fake_nvcc(tmp_path: Path) -> Callable[..., Path]:
    """Make an nvcc that writes what it is asked for, logs its arguments, or fails."""

    def make(root: str = "toolkit", known: str = "75 80 90 120", code: int = 0) -> Path:
        program = tmp_path / root / "bin" / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text(f"""#!{sys.executable}
import sys
with open({str(tmp_path / "log")!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if "--list-gpu-code" in sys.argv:
    print(*(f"sm_{{n}}" for n in "{known}".split()), sep="\\n")
elif "--version" in sys.argv:
    print("a compiler for tests")
elif {code}:
    sys.exit("this compiler is out of order")
else:
    open(sys.argv[sys.argv.index("-o") + 1], "w").write("made")
""")
        program.chmod(0o755)
        return program

    return make


def compiled(tmp_path: Path) -> list[str]:
    """The compiler calls that compiled something, since the last question."""
    log = tmp_path / "log"
    lines = log.read_text().splitlines()
    log.unlink()
    return [line for line in lines if " -c " in line]


# ---- which GPUs ------------------------------------------------------------------------------

NAMED = (75, 80, 86, 89, 90, 100, 120)


def test_every_gpu_of_the_list_and_ptx_of_the_newest(tool: ModuleType) -> None:
    # SPEC F42
    assert tool.ARCHITECTURES == NAMED
    flags, left_out = tool.architecture_flags("", set(range(200)))
    assert left_out == []
    assert flags == [f"-gencode=arch=compute_{n},code=sm_{n}" for n in NAMED] + [
        "-gencode=arch=compute_120,code=compute_120"
    ]


def test_what_the_toolkit_does_not_know_is_left_out(tool: ModuleType) -> None:
    flags, left_out = tool.architecture_flags("", {50, 75, 80, 86, 89, 90})
    assert left_out == [100, 120]
    assert flags[-1] == "-gencode=arch=compute_90,code=compute_90"
    assert not any("100" in flag or "120" in flag or "50" in flag for flag in flags)
    with pytest.raises(tool.BuildError, match="knows none of 75, 80"):
        tool.architecture_flags("", {35})


@pytest.mark.parametrize("wanted", ("80,90", "sm_90 sm_80", "80;90", " 80, 90 "))
def test_a_list_of_ones_own(tool: ModuleType, wanted: str) -> None:
    """Nothing of it is left out: nvcc says what it does not know."""
    flags, left_out = tool.architecture_flags(wanted, set())
    assert left_out == []
    assert flags == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_words_that_nvcc_knows(tool: ModuleType) -> None:
    for word in ("native", "all", "all-major"):
        assert tool.architecture_flags(word, set()) == ([f"-arch={word}"], [])
    for wrong in ("hopper", "80,ninety", "-arch=sm_90", "8.0"):
        with pytest.raises(tool.BuildError, match="expected numbers such as 80,90"):
            tool.architecture_flags(wrong, set())


# ---- whether ---------------------------------------------------------------------------------


def test_values_of_the_switch(tool: ModuleType) -> None:
    for value, meaning in (
        ("", "auto"), ("auto", "auto"), ("on", "on"), ("ON", "on"), ("1", "on"), ("true", "on"),
        ("off", "off"), ("0", "off"), ("False", "off"), ("no", "off"),
    ):  # fmt: skip
        assert tool.choice({"PAGEDCACHE_CUDA": value}) == meaning
    assert tool.choice({}) == "auto"
    with pytest.raises(tool.BuildError, match="must be auto, on or off, not 'maybe'"):
        tool.choice({"PAGEDCACHE_CUDA": "maybe"})


def test_no_compiler(tool: ModuleType, tmp_path: Path) -> None:
    """Under auto a message and no library, under on an error; both name the places."""
    # SPEC F42  # CASE C48
    said: list[str] = []
    assert tool.build_for_package(tmp_path, {"PATH": ""}, said.append) is False
    assert len(said) == 1
    for word in ("no CUDA kernels", "auto", "nvcc", "CUDA_HOME", "PATH", "nowhere"):
        assert word in said[0]
    with pytest.raises(tool.BuildError, match="no CUDA compiler"):
        tool.build_for_package(tmp_path, {"PATH": "", "PAGEDCACHE_CUDA": "on"}, said.append)
    assert len(said) == 1
    assert not (tmp_path / tool.LIBRARY).exists()


def test_a_failing_compiler(tool: ModuleType, tmp_path: Path, fake_nvcc: Any) -> None:
    where = {"CUDA_HOME": str(fake_nvcc(code=1).parent.parent)}
    said: list[str] = []
    assert tool.build_for_package(tmp_path, where, said.append) is False
    assert "this compiler is out of order" in said[-1] and "auto" in said[-1]
    with pytest.raises(tool.BuildError, match="this compiler is out of order"):
        tool.build_for_package(tmp_path, {**where, "PAGEDCACHE_CUDA": "on"}, said.append)
    assert not (tmp_path / tool.LIBRARY).exists()


def test_switched_off(tool: ModuleType, tmp_path: Path, fake_nvcc: Any) -> None:
    """No compiler is asked for, and the library of an earlier build goes."""
    where = {"CUDA_HOME": str(fake_nvcc().parent.parent), "PAGEDCACHE_CUDA": "off"}
    (tmp_path / tool.LIBRARY).write_text("old")
    said: list[str] = []
    assert tool.build_for_package(tmp_path, where, said.append) is False
    assert said == ["PAGEDCACHE_CUDA=off: no CUDA kernels"]
    assert not (tmp_path / tool.LIBRARY).exists() and not (tmp_path / "log").exists()


def test_where_nvcc_is_looked_for(
    tool: ModuleType, tmp_path: Path, fake_nvcc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables in their order, then PATH, then the usual place."""
    programs = {name: str(fake_nvcc(name)) for name in "abcde"}
    roots = {name: str(tmp_path / name) for name in "abcde"}
    monkeypatch.setattr(tool, "DEFAULT_ROOT", roots["e"])
    where = {
        "CUDA_HOME": roots["a"], "CUDA_PATH": roots["b"], "CUDA_ROOT": roots["c"],
        "PATH": roots["d"] + "/bin",
    }  # fmt: skip
    for name, variable in zip("abcd", tuple(where), strict=True):
        assert tool.find_nvcc(where) == programs[name]
        del where[variable]
    assert tool.find_nvcc({"PATH": ""}) == programs["e"]


# ---- building --------------------------------------------------------------------------------


def test_every_source_with_the_flags_of_exact_arithmetic(
    tool: ModuleType, tmp_path: Path, fake_nvcc: Any
) -> None:
    where = {"CUDA_HOME": str(fake_nvcc().parent.parent)}
    said: list[str] = []
    assert tool.build_for_package(tmp_path, where, said.append) is True
    assert (tmp_path / tool.LIBRARY).read_text() == "made"
    assert "does not know sm_86, sm_89, sm_100: left out" in said[0]
    assert "sm_75, sm_80, sm_90, sm_120" in said[1] and "sm_86" not in said[1]
    calls = compiled(tmp_path)
    assert len(calls) == len(list((ROOT / "cuda").glob("*.cu"))) > 0
    for call in calls:
        for flag in ("-fmad=false", "-ffp-contract=off", "-fvisibility=hidden", "-std=c++17",
                     "code=sm_75", "code=sm_120", "code=compute_120"):  # fmt: skip
            assert flag in call
        assert "fast-math" not in call and "ftz" not in call


def test_only_what_changed_is_compiled_again(
    tool: ModuleType, tmp_path: Path, fake_nvcc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("cuda", "include"):
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder)
    monkeypatch.setattr(tool, "ROOT", tmp_path / "tree")
    where = {"CUDA_HOME": str(fake_nvcc().parent.parent)}

    def built() -> set[str]:
        tool.build(tmp_path / "out.so", where, str)
        return {Path(call.split(" -c ")[1].split()[0]).name for call in compiled(tmp_path)}

    everything = {path.name for path in (ROOT / "cuda").glob("*.cu")}
    assert built() == everything
    assert built() == set()
    (tmp_path / "tree" / "cuda" / "copy.cu").touch()
    assert built() == {"copy.cu"}
    (tmp_path / "tree" / "include" / "pagedcache" / "rows.h").touch()
    assert built() == everything
    where["PAGEDCACHE_CUDA_ARCH"] = "90"  # other flags share no objects
    assert built() == everything
    assert built() == set()


# ---- the real compiler -----------------------------------------------------------------------


def test_no_calls_and_nothing_spilled(tmp_path: Path) -> None:
    """Group functions are inlined, and what a thread holds fits its registers."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    if SHORT:
        pytest.skip("the full profile compiles the kernels")
    for source in sorted((ROOT / "cuda").glob("*.cu")):
        command = ["nvcc", "-std=c++17", "-O3", "-fmad=false", f"-I{ROOT / 'include'}",
                   "-gencode=arch=compute_90,code=sm_90", "--keep", f"--keep-dir={tmp_path}",
                   "-Xptxas=-v", "-Xcompiler=-Wall,-Wextra", "-c", str(source), "-o",
                   str(tmp_path / "made.o")]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
        assert set(frames) <= {("0", "0")}, done.stderr
        kernels = len(re.findall(r"Compiling entry function", done.stderr))
        assert len(frames) == kernels and (kernels > 0) == (source.stem != "runtime")
        ptx = (tmp_path / f"{source.stem}.ptx").read_text()
        assert not re.search(r"^\s*call\b", ptx, re.MULTILINE)


#: Kernels that take memory at any address, with the width of their accesses: NAME<WIDTH>.
ANYWHERE = re.compile(r"\d(store_bits|load_bits|copy_blocks|copy_tokens|move_blocks)ILi(\d+)E")


def accesses(ptx: str) -> dict[tuple[str, int], dict[str, Counter[int]]]:
    """Of each of those kernels, how many loads and stores there are of how many bytes."""
    found: dict[tuple[str, int], dict[str, Counter[int]]] = {}
    for body in re.split(r"^\.(?:visible )?entry ", ptx, flags=re.MULTILINE)[1:]:
        name = ANYWHERE.search(body.partition("(")[0])
        if name is None:
            continue
        counts = {"ld": Counter[int](), "st": Counter[int]()}
        for which, parts, bits in re.findall(
            r"\b(ld|st)(?:\.global)?(?:\.v(\d))?\.[usb](\d+)\s", body
        ):
            counts[which][int(parts or 1) * int(bits) // 8] += 1
        found[name[1], int(name[2])] = counts
    return found


@pytest.mark.parametrize("capability", (75, 90, 120))
def test_every_alignment_has_an_access_of_its_own(tmp_path: Path, capability: int) -> None:
    """One access where an address is aligned, one per byte where it is not.

    nvcc may join the two: then it is bytes everywhere, or a fault where nothing is aligned.
    """
    # SPEC F48
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    if SHORT:
        pytest.skip("the full profile compiles the kernels")
    found = {}
    for name in ("store", "load", "copy"):
        command = ["nvcc", "-std=c++17", "-O3", "-fmad=false", f"-I{ROOT / 'include'}", "-ptx",
                   f"-arch=compute_{capability}", str(ROOT / "cuda" / f"{name}.cu"), "-o",
                   str(tmp_path / "made.ptx")]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.update(accesses((tmp_path / "made.ptx").read_text()))
    assert len(found) == 2 * 3 + 3 * 5
    for (name, width), counts in found.items():
        for which, sizes in counts.items():
            assert sizes[width] > 0, (name, width, which, sizes)
            assert sizes[1] >= width, (name, width, which, sizes)


# ---- the built library -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> Path:
    if not BUILT.exists():
        pytest.skip("this package was built without CUDA kernels")
    return BUILT


def declared() -> set[str]:
    return set(re.findall(r"\b(pc_cuda_\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER.read_text(),
                                                       flags=re.DOTALL)))  # fmt: skip


def test_the_header_and_the_table_name_the_same_functions() -> None:  # DESIGN 2
    assert declared() == set(library.SIGNATURES)


def test_only_the_interface_is_visible(built: Path) -> None:
    # SPEC F42
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    command = ["nm", "-D", "--defined-only", str(built)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in listed.splitlines()} == declared()


def test_no_library_of_cuda_is_needed(built: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf on this machine")
    command = ["readelf", "-d", str(built)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listed)
    assert needed and not [name for name in needed if "cuda" in name.lower()]


def test_without_a_driver_it_loads_and_calls_return_35(built: Path) -> None:
    # SPEC F42  # CASE C48
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this process finds a CUDA driver")
    except OSError:
        pass
    kernels = library._open(str(built), False)
    assert kernels.device_count() == (35, 0)
    assert kernels.error_name(35) == "cudaErrorInsufficientDriver"
    assert "driver" in kernels.error_text(35)
    geometry = ctypes.create_string_buffer(kernels.pc_cuda_geometry_nbytes())
    assert kernels.pc_cuda_geometry(geometry, 3, 0, 2, 4, 64) == 0
    refused = ((99, 0, 2, 4, 64), (3, 2, 2, 4, 64), (3, 0, 0, 4, 64), (3, 0, 2, -1, 64))
    assert all(kernels.pc_cuda_geometry(geometry, *sizes) == 1 for sizes in refused)
    event = ctypes.c_void_p()
    assert kernels.pc_cuda_event_create(ctypes.byref(event)) == 35
    assert kernels.pc_cuda_stream_synchronize(None) == 35
    rows = (None, 0, 0, 0, 0)
    assert kernels.pc_cuda_store(geometry, None, 0, 1, *rows, None, 1, 0, None, None) == 35
    assert kernels.pc_cuda_fill_blocks(geometry, None, 1, None, 1, 0, None) == 35
