"""Every public thing as a user writes it; checked by ``mypy --strict``, never run."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import pagedcache as pc


def sizes(spec: pc.CacheSpec) -> int:
    assert_type(spec.block_nbytes, int)
    assert_type(spec.bytes_per_value, float)
    assert_type(spec.k_format, pc.KVFormat)
    assert_type(pc.FORMATS["q8"].reduction_vs_16bit, float)
    assert_type(pc.get_format("q4").is_quantized, bool)
    return spec.blocks_for("2GiB") + spec.blocks_for(1 << 30)


def numbers(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    half: npt.NDArray[np.uint16] = pc.float32_to_float16_bits(values)
    flat = pc.quantize(values, "q8", on_nonfinite="saturate")
    flat.write(3, values[:5])
    assert_type(flat.nbytes, int)
    back: npt.NDArray[np.float32] = pc.float16_bits_to_float32(half)
    return back + flat.read(0, back.size)


def handles(k: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> list[int]:
    spec = pc.CacheSpec(
        num_layers=2, num_kv_heads=3, head_dim=64, k_format="q8", v_format="q4", layout="NHD"
    )
    with pc.PagedKVCache(spec, num_blocks=64, partial_block_reuse=4) as cache:
        with cache.open([1, 2, 3], salt="tenant", request_id="r1") as seq:
            assert_type(seq, pc.Sequence)
            views, start = seq.append(0, k, v)
            assert_type(start, int)
            seq.append_kv(1, k, v, 0)
            seq.commit(3)
            seq.append_token(4)
            seq.append_tokens(range(5, 9))
            twin = seq.fork()
            seq.truncate(2)
            slots = cache.prepare([seq, twin], [1, 1])
            cache.store(0, k, v, slots, on_nonfinite="saturate")
            assert_type(len(slots), int)
            assert_type(cache.step([seq, twin], [7, 8]), pc.SlotMapping)
            assert_type(cache.open_many([[1], [2, 3]], request_ids=["a", None]), list[pc.Sequence])
            for view in seq.views(0):
                assert_type(view.start, int)
            keys, values = twin.gather(0, 0, 3, dtype=np.float32)
            print(keys.shape, values.shape, len(views), seq.seq_len, seq.num_cached_tokens)
        table: npt.NDArray[np.int32] = cache.block_tables([twin])
        indptr, indices, last = cache.page_table([twin], allow_empty=True)
        print(table.shape, indptr.shape, indices.shape, last.shape)
        assert_type(cache.stats().hit_rate, float)
        assert_type(cache.fragmentation().should_defragment(0.3), bool)
        assert_type(cache.defragment(), int)
        assert_type(cache.probe([1, 2, 3]), int)
        assert_type(cache.utilization, float)
        cache.check()
        return [twin.num_blocks, cache.num_free_blocks]


def ids(cache: pc.PagedKVCache) -> int:
    seq_id = cache.allocate_sequence(100)
    assert_type(seq_id, int)
    cache.extend(seq_id, 20)
    other = cache.fork_sequence(seq_id)
    cache.update_tokens(other, 110)
    block = cache.writable_block_at(other, 109)
    cache.free_sequence(seq_id)
    return block + cache.sequence_tokens(other)


def parts() -> tuple[int, bytes]:
    pool = pc.BlockPool(16, 16)
    block_ids = pool.allocate(3)
    pool.touch(block_ids)
    pool.free(block_ids)
    prefixes: pc.PrefixCache[str] = pc.PrefixCache(max_entries=10)
    assert_type(prefixes.insert([1, 2], "value"), bool)
    assert_type(prefixes.lookup([1, 2]), str | None)
    found = prefixes.find_longest_prefix([1, 2, 3])
    key = pc.compute_block_hashes([1, 2, 3, 4], 2, b"salt")[0]
    return pc.compute_prefix_hash([1, 2]) + (found[1] if found else 0), key


def errors(cache: pc.PagedKVCache, prompt: npt.NDArray[np.uint32]) -> Any:
    try:
        return cache.open(prompt)
    except pc.OutOfBlocksError as error:
        assert_type(error.needed, int)
        return error.fits_never
    except pc.PagedCacheError as error:
        return str(error)
