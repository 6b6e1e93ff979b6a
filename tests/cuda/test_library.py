"""Finding, loading and checking the library of kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest

from pagedcache._cuda import library
from pagedcache.errors import CudaUnavailableError

HEADER = Path(__file__).resolve().parents[2] / "cuda" / "abi.h"

CTYPES = {
    "int": c_int,
    "int64_t": c_int64,
    "size_t": c_size_t,
    "const char *": c_char_p,
}


def declared() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The functions of abi.h, as ctypes sees them."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = {}
    for returned, name, arguments in re.findall(
        r"PC_CUDA_API\s+([\w ]+?[ *]+)(pc_cuda_\w+)\(([^)]*)\);", text
    ):
        types = []
        for argument in filter(lambda a: a.strip() != "void", arguments.split(",")):
            words = re.fullmatch(r"\s*(.+?[ *]+)(\w+)\s*", argument, re.DOTALL)
            assert words, argument
            types.append(ctype(words[1]))
        found[name] = (CTYPES[returned.strip()], tuple(types))
    return found


def ctype(text: str) -> Any:
    return c_void_p if "*" in text else CTYPES[text.strip()]


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Compile a library of a few lines of C; returns its path."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")

    def run(text: str) -> str:
        source, made = tmp_path / "library.c", tmp_path / f"library{len(text)}.so"
        source.write_text(text, encoding="utf-8")
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", made], check=True)
        return str(made)

    return run


def refusal(monkeypatch: pytest.MonkeyPatch, path: str) -> str:
    monkeypatch.setenv(library.PATH_VARIABLE, path)
    with pytest.raises(CudaUnavailableError) as caught:
        library.load()
    reason = caught.value.reason
    assert "PAGEDCACHE_CUDA=on" in reason  # the cure
    assert library.PATH_VARIABLE in reason
    return reason


def test_the_table_is_the_header() -> None:  # DESIGN 2
    assert library.SIGNATURES == declared()
    number = re.search(r"#define PC_CUDA_ABI (\d+)", HEADER.read_text(encoding="utf-8"))
    assert number and int(number[1]) == library.ABI


def test_loaded_once(cuda: Any) -> None:  # SPEC F42
    first = library.load()
    assert library.load() is first is cuda.library
    assert set(first.functions) == set(library.SIGNATURES)
    assert first.pc_cuda_abi() == library.ABI
    assert first.path in repr(first)
    with pytest.raises(AttributeError, match="has no function 'pc_cuda_nonsense'"):
        first.pc_cuda_nonsense  # noqa: B018


def test_names_and_texts_of_codes(cuda: Any) -> None:  # SPEC F46
    loaded = library.load()
    assert loaded.error_name(2) == "cudaErrorMemoryAllocation"
    assert loaded.error_text(2) == "out of memory"
    assert loaded.error_name(719) == "cudaErrorLaunchFailure"
    assert loaded.error_text(123456)  # unknown, and no crash
    assert loaded.device_count()[0] == 0
    assert loaded.device_count()[1] >= 1


def test_no_library_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # CASE C48
    missing = str(tmp_path / library.FILE_NAME)
    monkeypatch.setattr(library, "library_path", lambda: (missing, False))
    with pytest.raises(CudaUnavailableError) as caught:
        library.load()
    reason = caught.value.reason
    assert reason.startswith("this installation has no compiled kernels (libpagedcache_cuda.so")
    assert "nvcc" in reason and "PAGEDCACHE_CUDA=on" in reason


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:  # SPEC F42
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    path, named = library.library_path()
    assert not named
    assert Path(path) == Path(library.__file__).parent.parent / "libpagedcache_cuda.so"
    monkeypatch.setenv(library.PATH_VARIABLE, "/elsewhere/lib.so")
    assert library.library_path() == ("/elsewhere/lib.so", True)


def test_a_named_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:  # CASE C48
    reason = refusal(monkeypatch, "/nowhere/libpagedcache_cuda.so")
    assert "/nowhere/libpagedcache_cuda.so (named by PAGEDCACHE_CUDA_LIBRARY)" in reason
    assert "cannot be loaded" in reason


def test_a_file_that_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # CASE C48
    path = tmp_path / "text.so"
    path.write_text("not a library", encoding="utf-8")
    assert "cannot be loaded" in refusal(monkeypatch, str(path))


def test_another_abi_number(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:  # CASE C48
    reason = refusal(monkeypatch, build("int pc_cuda_abi(void) { return 7; }"))
    assert f"has ABI number 7, this version of pagedcache needs {library.ABI}" in reason


def test_a_library_of_something_else(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    reason = refusal(monkeypatch, build("int other(void) { return 0; }"))
    assert "is no kernel library of pagedcache" in reason  # CASE C48


def test_a_library_without_all_functions(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    abi = f"int pc_cuda_abi(void) {{ return {library.ABI}; }} int more;"
    reason = refusal(monkeypatch, build(abi))
    assert "lacks pc_cuda_error_name" in reason  # CASE C48


def test_a_failure_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, cuda: Any
) -> None:  # CASE C48
    before = library.library_path()[0]
    refusal(monkeypatch, "/nowhere/else.so")
    monkeypatch.setenv(library.PATH_VARIABLE, before)
    assert library.load().path == before
