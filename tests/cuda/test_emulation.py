"""The emulation finds what it is there to find: kernels with bugs on purpose, in every order."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cuda_emulation import bugs, build


@pytest.fixture
def library(emulated: Any, cuda: Any) -> ctypes.CDLL:
    return bugs.library(os.environ["PAGEDCACHE_CUDA_LIBRARY"])


class Board:
    """Device memory before and after one of the kernels."""

    def __init__(self, cuda: Any, library: ctypes.CDLL) -> None:
        self.cuda, self.library, self.drv = cuda, library, cuda.pycuda
        given = bugs.values()
        self.given = self.drv.mem_alloc(given.nbytes)
        self.drv.memcpy_htod(self.given, given)
        self.out = self.drv.mem_alloc(4 * bugs.THREADS)
        self.drv.memset_d8(self.out, 0, 4 * bugs.THREADS)

    def queue(self, which: int, out: int | None = None) -> int:
        to = int(self.out) if out is None else out
        return int(self.library.pc_cuda_bug(which, int(self.given), to, None))

    def run(self, which: int) -> np.ndarray:
        assert self.queue(which) == 0
        result = np.empty(bugs.THREADS, np.float32)
        self.drv.memcpy_dtoh(result, self.out)
        return result

    def failure(self, which: int, code: int, stub: Any, out: int | None = None) -> str:
        """The text of the failure that a launch leaves behind; the device is repaired."""
        assert self.queue(which, out) == 0  # a launch does not wait
        with pytest.raises(self.drv.Error):
            self.drv.Context.synchronize()
        assert self.library.pc_cuda_bug(bugs.REVERSE, int(self.given), int(self.out), None) == code
        stub.sticky(0)
        return str(self.cuda.library.error_text(code))


@pytest.fixture
def board(cuda: Any, library: ctypes.CDLL) -> Any:
    with cuda.current():
        yield Board(cuda, library)


@pytest.fixture(params=bugs.ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PC_EMU_ORDER", request.param)
    return str(request.param)


def test_a_right_kernel_is_right_in_every_order(board: Board, order: str) -> None:
    expected = bugs.values(bugs.THREADS)
    assert np.array_equal(board.run(bugs.REVERSE), expected[::-1])
    assert np.array_equal(board.run(bugs.SWAP), expected.reshape(-1, 2)[:, ::-1].ravel())
    assert np.array_equal(board.run(bugs.COPY_AND_WAIT), expected)


def test_a_missing_barrier_shows(board: Board, order: str, unraced: None) -> None:
    # Half of the threads read what has not been written: bytes 0xff.
    assert np.isnan(board.run(bugs.REVERSE_NO_BARRIER)).sum() == 64
    assert np.isnan(board.run(bugs.SWAP_NO_BARRIER)).sum() == 64


def test_an_early_read_of_an_asynchronous_copy_shows(board: Board, order: str) -> None:
    assert np.isnan(board.run(bugs.COPY_NO_WAIT)).all()


def test_the_order_of_ctas_shows(
    board: Board, monkeypatch: pytest.MonkeyPatch, unraced: None
) -> None:
    results = {}
    for order in ("fwd", "rev"):
        monkeypatch.setenv("PC_EMU_ORDER", order)
        results[order] = board.run(bugs.CTAS_WRITE_ONE_WORD)[0]
    assert results == {"fwd": 2, "rev": 1}  # the CTA that ran last


def test_a_divergent_shuffle_is_an_error_with_its_place(
    board: Board, emulated: Any, order: str
) -> None:
    text = board.failure(bugs.HALF_A_WARP_SHUFFLES, 719, emulated)
    assert f"bugs.cu:{bugs.source_line('__shfl_xor_sync')}: waits for lanes" in text
    assert text.startswith("unspecified launch failure (CTA (0,0,0) thread (")
    assert board.run(bugs.REVERSE)[0] == 128  # and the emulation still works


def test_two_barriers_are_an_error_that_names_both(board: Board, emulated: Any, order: str) -> None:
    text = board.failure(bugs.TWO_BARRIERS, 719, emulated)
    first = bugs.source_line("if (threadIdx.x < 32)") + 1
    assert f"bugs.cu:{first}" in text and f"bugs.cu:{first + 2}" in text


def test_a_lane_outside_its_mask_is_an_error(board: Board, emulated: Any, order: str) -> None:
    assert "without being in its mask" in board.failure(bugs.NOT_IN_ITS_MASK, 719, emulated)


def test_a_trap_names_its_thread(board: Board, emulated: Any, order: str) -> None:
    text = board.failure(bugs.TRAP, 719, emulated)
    assert f"thread (2,0,0) at {build.HERE}/bugs.cu:{bugs.source_line('__trap')}: trapped" in text


def test_a_write_past_shared_memory_is_an_error(
    board: Board, emulated: Any, order: str, unsanitized: None
) -> None:
    text = board.failure(bugs.WRITE_PAST_SHARED, 719, emulated)
    assert "wrote past the end of an array in shared memory" in text


def test_too_much_shared_memory_is_an_error(board: Board, emulated: Any) -> None:
    text = board.failure(bugs.TOO_MUCH_STATIC_SHARED, 719, emulated)
    assert "more static shared memory than a CTA has" in text
    assert board.queue(bugs.TOO_MUCH_DYNAMIC_SHARED) == 1  # cudaErrorInvalidValue


def test_a_launch_no_device_takes_is_refused(board: Board) -> None:
    assert board.queue(bugs.TOO_MANY_THREADS) == 9  # cudaErrorInvalidConfiguration
    assert board.queue(99) == 1


@pytest.mark.parametrize("freed", [False, True])
def test_memory_that_is_not_there_is_an_error(
    board: Board, emulated: Any, freed: bool, faults_survive: None
) -> None:
    address = int(board.out) + (1 << 12)  # the guard page
    if freed:
        memory = board.drv.mem_alloc(512)
        address = int(memory)
        memory.free()
    text = board.failure(bugs.REVERSE, 700, emulated, address)
    found = re.search(r"thread \((\d+),0,0\): illegal access to address (0x[0-9a-f]+)", text)
    assert found, text
    # Whichever thread came first, by the order of threads of this run.
    assert int(found[2], 16) == address + 4 * int(found[1])


def test_an_overrun_inside_the_last_page_is_counted(
    board: Board, emulated: Any, unsanitized: None
) -> None:
    short = board.drv.mem_alloc(4 * bugs.THREADS - 12)
    assert board.queue(bugs.REVERSE, int(short)) == 0
    board.drv.Context.synchronize()
    before = emulated.get("overruns")
    short.free()
    assert emulated.get("overruns") == before + 1
    emulated.reset()  # the check after each test must not see it again


def test_warp_operations_give_what_cuda_gives(board: Board, order: str) -> None:
    given = np.arange(bugs.THREADS, dtype=np.uint64) * np.uint64(0x1_0000_0001) + np.uint64(5)
    memory, out = board.drv.mem_alloc(given.nbytes), board.drv.mem_alloc(given.nbytes + 32)
    board.drv.memcpy_htod(memory, given)
    before = np.zeros(bugs.THREADS + 4, np.uint64)
    before[bugs.THREADS + 1] = 2**63
    board.drv.memcpy_htod(out, before)
    assert board.library.pc_cuda_bug(bugs.WARP_OPERATIONS, int(memory), int(out), None) == 0
    result = np.empty_like(before)
    board.drv.memcpy_dtoh(result, out)

    lanes = np.arange(bugs.THREADS) % 32
    warp = np.arange(bugs.THREADS) - lanes
    mixed = given[warp + 31 - lanes]
    mixed ^= given[warp + np.where(lanes % 8, lanes - 1, lanes)] << np.uint64(1)
    mixed ^= given[warp + np.where(lanes + 3 < 32, lanes + 3, lanes)] << np.uint64(2)
    mixed ^= np.uint64(sum(1 << lane for lane in range(0, 32, 3))) << np.uint64(16)
    mixed ^= np.uint64(1 << 8)  # any lane is 5; not all lanes are below 31
    assert np.array_equal(result[: bugs.THREADS], mixed)
    assert list(result[bugs.THREADS :]) == [given.sum(), given.min(), given.max(), 1]


def test_products_of_matrices_are_those_of_tensor_cores(board: Board, order: str) -> None:
    given = np.random.default_rng(1).standard_normal(280).astype(np.float32)
    memory, out = board.drv.mem_alloc(given.nbytes), board.drv.mem_alloc(512)
    board.drv.memcpy_htod(memory, given)
    assert board.library.pc_cuda_bug(bugs.PRODUCT, int(memory), int(out), None) == 0
    got = np.empty((32, 4), np.float32)
    board.drv.memcpy_dtoh(got, out)

    g, t = np.arange(32) // 4, np.arange(32) % 4
    seen = (given.view(np.uint32) & 0xFFFFE000).view(np.float32)  # tf32
    a, b, c = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8))
    for i, (row, column) in enumerate(((g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4))):
        a[row, column] = seen[:128].reshape(32, 4)[:, i]
    for i in range(2):
        b[t + 4 * i, g] = seen[128:192].reshape(32, 2)[:, i]
    places = ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))
    for i, place in enumerate(places):
        c[place] = given[192:].reshape(22, 4)[np.arange(32) % 22, i]
    c += 2 * a @ b
    want = np.stack([c[place] for place in places], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_fences_pass_on_what_ctas_have_written(board: Board, order: str) -> None:
    given = np.arange(131, dtype=np.float32)
    memory, out = board.drv.mem_alloc(given.nbytes), board.drv.mem_alloc(given.nbytes)
    board.drv.memcpy_htod(memory, given)
    board.drv.memset_d8(out, 0, given.nbytes)
    got = np.empty_like(given)
    for _ in range(2):
        assert board.library.pc_cuda_bug(bugs.PASS_ON, int(memory), int(out), None) == 0
        board.drv.memcpy_dtoh(got, out)
        assert got[0] == given[1:129].sum()
        assert got[129:].view(np.uint32).tolist() == [0, 0]  # the ticket is as it was


def test_much_shared_memory_must_be_asked_for(board: Board) -> None:
    assert board.queue(bugs.MUCH_SHARED_UNASKED) == 1  # cudaErrorInvalidValue
    np.testing.assert_array_equal(board.run(bugs.MUCH_SHARED), bugs.values()[127::-1])


def test_launches_from_several_threads(cuda: Any, library: ctypes.CDLL) -> None:
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            with cuda.current():
                drv = cuda.pycuda
                stream, given, out = drv.Stream(), drv.mem_alloc(512), drv.mem_alloc(512)
                found = np.empty(bugs.THREADS, np.float32)
                for i in range(10):
                    source = bugs.values(bugs.THREADS) + first + i
                    drv.memcpy_htod_async(given, source, stream)
                    code = library.pc_cuda_bug(
                        bugs.REVERSE, int(given), int(out), ctypes.c_void_p(stream.handle)
                    )
                    assert code == 0
                    drv.memcpy_dtoh_async(found, out, stream)
                    stream.synchronize()
                    assert np.array_equal(found, source[::-1])
                del stream, given, out
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---- other processes -------------------------------------------------------------------------


@pytest.fixture
def children(emulated: Any) -> None:
    """These tests start sanitized processes of their own; once is enough."""
    if os.environ.get("PAGEDCACHE_CUDA_SANITIZER"):
        pytest.skip("runs without a sanitizer in this process")


def test_without_a_driver_kernels_run_on_host_memory(children: None) -> None:
    assert bugs.in_a_child(bugs.REVERSE, None) == (0, "code 0\n")


def test_a_real_driver_is_refused(children: None, tmp_path: Any) -> None:
    source = tmp_path / "driver.cc"
    source.write_text('extern "C" int cuInit(unsigned) { return 0; }\n')
    real = tmp_path / "libcuda.so.1"
    command = [build.compiler(), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(source), "-o", str(real)], check=True)
    program = f"import ctypes\nctypes.CDLL({str(real)!r}, ctypes.RTLD_GLOBAL)\n{bugs.CHILD}"
    folder = bugs.built(None)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / build.LIBRARIES["plain"]), "0"],
        capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": ""},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "code 801\n")


@pytest.mark.parametrize(
    ("which", "report"),
    [
        (bugs.WRITE_PAST_SHARED, "index 128 out of bounds for type 'float [128]'"),
        (bugs.READ_PAST_SHARED, "AddressSanitizer: use-after-poison"),
        (bugs.MISALIGNED, "misaligned address"),
    ],
)
def test_the_address_sanitizer_names_the_access(children: None, which: int, report: str) -> None:
    code, output = bugs.in_a_child(which, "address")
    assert code != 0 and report in output and "bugs.cu:" in output


@pytest.mark.parametrize(
    "which",
    [bugs.REVERSE_NO_BARRIER, bugs.SWAP_NO_BARRIER, bugs.CTAS_WRITE_ONE_WORD,
     bugs.PASS_ON_NO_FENCE],
)  # fmt: skip
@pytest.mark.parametrize("order", bugs.ORDERS[:3])
def test_the_thread_sanitizer_sees_the_race(children: None, which: int, order: str) -> None:
    code, output = bugs.in_a_child(which, "thread", order)
    assert code == 66 and "data race" in output and "bugs.cu:" in output


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize(
    "which",
    [bugs.REVERSE, bugs.SWAP, bugs.COPY_AND_WAIT, bugs.WARP_OPERATIONS, bugs.HALF_A_WARP_SHUFFLES,
     bugs.PRODUCT, bugs.PASS_ON],
)  # fmt: skip
def test_the_sanitizers_are_silent_about_the_rest(
    children: None, which: int, sanitizer: str
) -> None:
    code, output = bugs.in_a_child(which, sanitizer, "1")
    expected = 719 if which == bugs.HALF_A_WARP_SHUFFLES else 0
    assert code == 0 and f"code {expected}\n" in output
