"""ggml's kernels as a peer: where they are searched, how they are called, that they are checked."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedcache import FlatQuantized
from pagedcache.cli.bench import convert, ggml_peer, peers, quantize
from pagedcache.cli.bench.rows import Options

OPTIONS = Options(7, (4096,), ("q8_0",))

# Kernels that tell how they were called: the count of values, then nothing but the first input.
SOURCE = """
#include <stdint.h>
#include <string.h>
#define SAY(name, number) void name(const void *in, void *out, int64_t n) { \\
    uint8_t *o = out; o[0] = (uint8_t)n; o[1] = number; memcpy(o + 2, in, 2); }
"""
BASE = SOURCE + """
const char *ggml_version(void) { return "9.9"; }
SAY(dequantize_row_q8_0, 1) SAY(dequantize_row_q4_0, 2) SAY(dequantize_row_q4_1, 3)
"""
CPU = SOURCE + """
static int began;
void ggml_cpu_init(void) { began = 1; }
int ggml_cpu_has_avx2(void) { return began; }
""" + "".join(
    f"int ggml_cpu_has_{name}(void) {{ return 0; }}\n"
    for name in ("f16c", "avx512", "avx512_vnni", "avx512_bf16", "neon", "sve")
) + """
SAY(quantize_row_q8_0, 4) SAY(quantize_row_q4_0, 5) SAY(quantize_row_q4_1, 6)
SAY(ggml_cpu_fp32_to_fp16, 7) SAY(ggml_cpu_fp32_to_bf16, 8)
SAY(ggml_cpu_fp16_to_fp32, 9) SAY(ggml_cpu_bf16_to_fp32, 10)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins of both libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("ggml")
    for name, text in (("base", BASE), ("cpu", CPU)):
        source = folder / f"{name}.c"
        source.write_text(text)
        target = folder / f"libggml-{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", target], check=True)
    return folder


def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.delenv(ggml_peer.FOLDER, raising=False)


def test_a_folder_that_the_environment_names(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none_installed(monkeypatch)
    monkeypatch.setenv(ggml_peer.FOLDER, str(libraries))
    found = ggml_peer.find()
    # avx2 only after ggml_cpu_init; no path of this machine in a report.
    assert str(found) == "ggml 9.9 of the folder PAGEDCACHE_GGML (avx2)"


def test_a_package_that_brings_them(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def distribution(name: str) -> Any:
        asked.append(name)
        if name != "pywhispercpp":
            raise metadata.PackageNotFoundError(name)
        files = ["pywhispercpp/model.py", *(path.name for path in libraries.iterdir())]
        return SimpleNamespace(version="1.2", files=files, locate_file=lambda f: libraries / f)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.delenv(ggml_peer.FOLDER, raising=False)
    assert str(ggml_peer.find()) == "ggml 9.9 of pywhispercpp 1.2 (avx2)"
    assert asked == ["llama-cpp-python", "pywhispercpp"]  # compiled for this machine first


def test_every_kernel_gets_its_arrays_and_the_number_of_values(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ggml_peer.FOLDER, str(libraries))
    found = ggml_peer.find()
    wide, narrow = np.arange(1, 97, dtype=np.float32), np.arange(1, 200, dtype=np.uint8)
    encoders = {"q8_0": 4, "q8": 4, "q4_0": 5, "q4": 5, "q4_1": 6, "float16": 7, "bfloat16": 8}
    for name, number in encoders.items():
        out = np.zeros(192, np.uint8)
        found.encoder(name)(wide, out)
        assert out[:4].tolist() == [96, number, *wide.view(np.uint8)[:2]], name
        assert not out[4:].any()
    decoders = {"q8_0": 1, "q8": 1, "q4_0": 2, "q4": 2, "q4_1": 3, "float16": 9, "bfloat16": 10}
    for name, number in decoders.items():
        out = np.zeros(64, np.float32)
        found.decoder(name)(narrow, out)
        assert out.view(np.uint8)[:4].tolist() == [64, number, 1, 2], name


def test_a_peer_that_computes_something_else_is_not_timed(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ggml_peer.FOLDER, str(libraries))
    found = ggml_peer.find()
    monkeypatch.setattr(peers, "ggml", lambda: found)
    monkeypatch.setattr(peers, "torch", lambda: None)
    monkeypatch.setattr(peers, "gguf_types", dict)
    with pytest.raises(AssertionError, match="float16 by ggml is wrong: not timed"):
        list(convert.rows(OPTIONS))
    with pytest.raises(AssertionError, match="q8_0 by ggml reads back"):
        list(quantize.rows(OPTIONS))


def test_what_is_missing_is_said_once_and_stops_nothing(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    none_installed(monkeypatch)
    with pytest.raises(ImportError, match="none of llama-cpp-python, pywhispercpp is installed"):
        ggml_peer.find()
    monkeypatch.setenv(ggml_peer.FOLDER, str(tmp_path))
    with pytest.raises(ImportError, match="folder PAGEDCACHE_GGML: no libggml-base and libggml-c"):
        ggml_peer.find()
    (tmp_path / "libggml-base.so").write_text("no library")
    (tmp_path / "libggml-cpu.so").write_text("no library")
    peers.ggml.cache_clear()
    assert peers.ggml() is None and peers.ggml() is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("peer ggml: not used (the folder PAGEDCACHE")
    # A library without one of the kernels is not used for the others either.
    shutil.copy(libraries / "libggml-base.so", tmp_path)
    shutil.copy(libraries / "libggml-base.so", tmp_path / "libggml-cpu.so")
    with pytest.raises(ImportError, match="ggml_cpu_init"):
        ggml_peer.find()
    peers.ggml.cache_clear()


def test_the_real_ones_write_our_bytes() -> None:
    try:
        ggml = ggml_peer.find()
    except ImportError as error:
        pytest.skip(f"no ggml: {error}")
    values = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32)
    for name, kind in (("float16", np.dtype(np.float16)), ("bfloat16", ml_dtypes.bfloat16)):
        narrow, back = values.astype(kind), np.empty_like(values)
        got = np.empty_like(narrow)
        ggml.encoder(name)(values, got)
        assert np.array_equal(got.view(np.uint16), narrow.view(np.uint16)), name
        ggml.decoder(name)(narrow, back)
        assert np.array_equal(back, narrow.astype(np.float32)), name
    for name, nbytes in (("q8_0", 34), ("q4_0", 18), ("q4_1", 20)):
        data = np.zeros(values.size // 32 * nbytes, np.uint8)
        ggml.encoder(name)(values, data)
        ours, back = FlatQuantized(name, values.size), np.empty_like(values)
        ours.write(0, values)
        assert np.count_nonzero(data != ours.data) <= values.size // 10_000, name
        ggml.decoder(name)(ours.data, back)
        assert np.array_equal(back, ours.to_float32()), name
