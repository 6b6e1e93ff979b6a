"""Random histories on random streams give what the CPU gives.

Streams run nothing before something waits for them (deferred streams of the emulation), so every
order that is not kept by an event shows as a wrong value. The CPU's cache makes the same calls
without streams; both must agree in every length, hit and value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from profiles import PROFILE

import pagedcache as pc

LAYERS, HEADS, DIM, B = 2, 2, 32, 4
NUM_BLOCKS = 20
SEEDS = {"short": 12, "full": 60, "deep": 1200}[PROFILE]
STEPS = 60


class Pair:
    """The same sequence in both caches."""

    def __init__(self, host: pc.Sequence, device: pc.Sequence) -> None:
        self.host, self.device = host, device


class History:
    def __init__(self, seed: int, streams: list[Any]) -> None:
        self.rng = np.random.default_rng(seed)
        self.streams = [None, *streams]
        formats = ("float16", "q8", "q4", "q4_1", "float32", "q4k")
        k_format, v_format = self.rng.choice(formats, 2)
        opened = str(self.rng.choice(["float16", "bfloat16", "float32"]))
        has_open = "q4k" in (k_format, v_format) or self.rng.random() < 0.3
        if not {k_format, v_format} - {"float16", "float32"}:
            has_open = False
        spec = pc.CacheSpec(
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=DIM,
            block_size=B,
            k_format=str(k_format),
            v_format=str(v_format),
            layout=str(self.rng.choice(["HND", "NHD"])),
            open_blocks=opened if has_open else None,
        )
        options = {"partial_block_reuse": int(self.rng.integers(0, 3))}
        if has_open:
            options["num_open_blocks"] = int(self.rng.integers(5, 12))
        placement = self.rng.choice(["cuda:0", "mixed"], p=[0.8, 0.2])
        device = ["cuda:0", "cpu"] if placement == "mixed" else "cuda:0"
        self.host = pc.PagedKVCache(spec, NUM_BLOCKS, **options)
        self.device = pc.PagedKVCache(spec, NUM_BLOCKS, device=device, **options)
        self.live: list[Pair] = []
        self.gathered: list[tuple[Any, Any]] = []  # not looked at yet
        self.prompts = [self.rng.integers(0, 50, 30).tolist() for _ in range(3)]

    # ---- helpers -------------------------------------------------------------------------

    def stream(self) -> Any:
        return self.streams[int(self.rng.integers(len(self.streams)))]

    def both(self, call: Callable[[Any, dict[str, Any]], Any], pair: Any) -> Any:
        """One call on both; what the CPU refuses, the device must refuse alike."""
        host, device = pair
        try:
            want = call(host, {})
        except pc.PagedCacheError as error:
            with pytest.raises(type(error)):
                call(device, {"stream": self.stream()})
            return None
        return want, call(device, {"stream": self.stream()})

    def pick(self) -> Pair | None:
        return self.live[int(self.rng.integers(len(self.live)))] if self.live else None

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (2, count, HEADS, DIM)
        k, v = self.rng.standard_normal(shape, dtype=np.float32)
        return k, v

    def rows_of(self, pair: Pair | None, count: int) -> tuple[Any, Any]:
        """(K, V) for the host and for the device: new ones, or gathered on another stream."""
        if pair is not None and pair.host.seq_len >= count and self.device.layer_device(1) != "cpu":
            return (
                pair.host.gather(1, 0, count, dtype=np.float32),
                pair.device.gather(1, 0, count, dtype=np.float32, stream=self.stream()),
            )
        rows = self.rows(count)
        return rows, rows

    # ---- steps ---------------------------------------------------------------------------

    def open(self) -> None:
        prompt = self.prompts[int(self.rng.integers(3))][: int(self.rng.integers(1, 30))]
        if self.rng.random() < 0.3:
            prompt = [*prompt, int(self.rng.integers(50, 99))]
        made = self.both(lambda c, o: c.open(prompt, **o), (self.host, self.device))
        if made is None:
            return
        host, device = made
        assert host.num_cached_tokens == device.num_cached_tokens
        pair = Pair(host, device)
        self.live.append(pair)
        if self.rng.random() < 0.9:
            self.append(pair, len(prompt) - host.num_cached_tokens)

    def append(self, pair: Pair | None, count: int = 0) -> None:
        if pair is None:
            return
        count = count or int(self.rng.integers(1, 6))
        for layer in range(LAYERS):
            other = self.pick() if layer and self.rng.random() < 0.4 else None
            host, device = self.rows_of(other, count)
            done = self.both(
                lambda s, o: s.append(layer, *(host if s is pair.host else device), **o),  # noqa: B023
                (pair.host, pair.device),
            )
            if done is None:
                return
        if self.rng.random() < 0.9:
            self.both(lambda s, o: s.commit(count, **o), (pair.host, pair.device))

    def step(self) -> None:
        """A decode step of all sequences: one mapping, one store a layer, one commit."""
        pairs = self.live[:6]
        if not pairs:
            return
        counts = self.rng.integers(1, 4, len(pairs)).tolist()
        made = self.both(
            lambda c, o: c.prepare(
                [p.host if c is self.host else p.device for p in pairs], counts, **o
            ),
            (self.host, self.device),
        )
        if made is None:
            return
        for layer in range(LAYERS):
            k, v = self.rows(sum(counts))
            self.both(
                lambda c, o: c.store(layer, k, v, made[c is self.device], **o),  # noqa: B023
                (self.host, self.device),
            )
        self.both(
            lambda c, o: c.commit(
                [p.host if c is self.host else p.device for p in pairs], counts, **o
            ),
            (self.host, self.device),
        )

    def fork(self) -> None:
        pair = self.pick()
        if pair is not None and len(self.live) < 8:
            self.live.append(Pair(pair.host.fork(), pair.device.fork()))

    def truncate(self) -> None:
        pair = self.pick()
        if pair is not None:
            length = int(self.rng.integers(0, pair.host.num_tokens + 1))
            self.both(lambda s, o: s.truncate(length, **o), (pair.host, pair.device))

    def free(self) -> None:
        if self.live:
            pair = self.live.pop(int(self.rng.integers(len(self.live))))
            pair.host.free()
            if self.rng.random() < 0.5:
                pair.device.free()
            else:
                pair.device.free(stream=self.stream())

    def defragment(self) -> None:
        self.host.defragment()
        self.device.defragment(stream=self.stream())

    def compare(self) -> None:
        pair = self.pick()
        if pair is None:
            return
        assert pair.host.seq_len == pair.device.seq_len
        assert pair.host.num_tokens == pair.device.num_tokens
        for layer in range(LAYERS):
            want = pair.host.gather(layer, dtype=np.float32)
            got = pair.device.gather(layer, dtype=np.float32, stream=self.stream())
            self.gathered += zip(want, got, strict=True)
        while len(self.gathered) > 12 or (self.gathered and self.rng.random() < 0.1):
            self.look()

    def look(self) -> None:
        """Look at what was gathered some steps ago."""
        want, got = self.gathered.pop(int(self.rng.integers(len(self.gathered))))
        np.testing.assert_array_equal(want, np.asarray(got))

    def run(self) -> None:
        steps = [self.open, self.open, self.fork, self.truncate, self.free, self.step, self.step,
                 self.defragment, self.compare, self.compare,
                 lambda: self.append(self.pick())]  # fmt: skip
        for _ in range(STEPS):
            steps[int(self.rng.integers(len(steps)))]()
            self.device.check()
        for pair in list(self.live):
            self.live = [pair]
            self.compare()
            pair.host.free()
            pair.device.free()
        while self.gathered:
            self.look()
        self.device.synchronize()
        self.device.close()
        self.host.close()


def play(emulated: Any, seed: int) -> None:
    import pycuda.driver as driver

    from pagedcache._cuda.driver import get_device

    emulated.set("async", 1)
    with get_device(0).current():
        # 1: a stream that does not wait for the default one by itself.
        streams = [driver.Stream(1) for _ in range(3)]
        try:
            History(seed, streams).run()
        finally:
            driver.Context.synchronize()
            del streams


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_histories_on_random_streams(emulated: Any, seed: int) -> None:
    # SPEC F34 F44 F49, CASE C52
    play(emulated, seed)


def _never(*_: Any) -> None:
    """A wait that is left out."""


MUTANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "nothing is waited for": {"acquire": _never},
    "writers do not wait for readers": {
        "acquire": lambda order, real, stream, ids, writing: real(order, stream, ids, False)
    },
    "readers do not wait": {
        "acquire": lambda order, real, stream, ids, writing: (
            real(order, stream, ids, writing) if writing else None
        )
    },
    "uses are not noted": {"used": _never},
    "reads are not noted": {
        "used": lambda order, real, stream, ids, writing: (
            real(order, stream, ids, writing) if writing else None
        )
    },
    "temporary memory is reused at once": {"wait": _never},
    "arrays of other streams are read at once": {"follow": _never},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_histories_see_a_missing_wait(
    emulated: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # SPEC F49
    import pycuda.driver as driver

    from pagedcache._cuda.order import Order

    for method, mutant in MUTANTS[name].items():
        real = getattr(Order, method)
        monkeypatch.setattr(
            Order, method, lambda order, *args, m=mutant, r=real: m(order, r, *args)
        )
    for seed in range(60):
        try:
            play(emulated, seed)
        except (AssertionError, driver.Error, pc.PagedCacheError):
            return  # a wrong value; or lists of places that others had written over
    pytest.fail(f"{name}: no history showed it")
