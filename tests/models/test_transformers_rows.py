"""Rows of a ``PagedCache``: cropped, reordered, forked, dropped; and what failures leave behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformerskit as kit
from transformers import Cache, DynamicCache

import pagedcache as pc

WAYS = ["sdpa", "pagedcache"]


def filled(pool: pc.PagedKVCache, model: Any, ids: torch.Tensor) -> Any:
    past = kit.paged(pool, ids, model=model)
    kit.forward(model, ids, past)
    return past


def layer_pairs(past: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in past.layers]


def same(past: Any, plain: Any) -> bool:
    return all(
        torch.equal(own, other)
        for pair, twin in zip(layer_pairs(past), layer_pairs(plain), strict=True)
        for own, other in zip(pair, twin, strict=True)
    )


def test_it_is_a_cache_of_transformers() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(20, rows=2)
    with kit.pool_for(model) as pool, filled(pool, model, ids) as past:
        assert isinstance(past, Cache)
        plain = DynamicCache()
        kit.forward(model, ids, plain)
        assert same(past, plain)
        assert past.get_seq_length() == past.get_seq_length(2) == 20
        assert past.get_mask_sizes(5 if kit.VERSION >= (5, 5) else torch.arange(5), 0) == (25, 0)
        assert past.layers[1].get_mask_sizes(torch.arange(5)) == (25, 0)
        assert past.layers[1].get_mask_sizes(5) == (25, 0)
        assert past.layers[0].get_max_length() == past.layers[0].get_max_cache_shape() == -1
        assert past.is_sliding == [False] * 3
        assert not past.is_compileable
        assert past.batch_size == 2
        assert len(past) == 3
        if hasattr(Cache, "is_croppable"):
            assert past.is_croppable
        assert repr(past).startswith("<PagedCache: 2 rows of 20 tokens, 0 reused, of <Paged")
    assert repr(past) == "<PagedCache: closed>"


# ---- crop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize(
    ("given", "left"),
    [(12, 12), (40, 30), (30, 30), (0, 30), (-1, 29), (-14, 16), (-30, 0),
     (torch.tensor(-3), 27), (torch.tensor(17), 17)],
)  # fmt: skip
def test_crop(given: Any, left: int, hook: bool) -> None:
    """Above 0 a length, else so many fewer; then writing goes on from there."""
    model = kit.model_of("llama")
    ids = kit.prompt(20, rows=2)
    more = kit.prompt(40, rows=2, seed=3)
    text = torch.cat([ids, more], dim=1)
    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model if hook else None) as past:
            kit.forward(model, ids, past)
            kit.forward(model, text[:, 20:30], past)
            past.crop(given)
            assert past.get_seq_length() == left
            kit.whole(pool)
            plain = DynamicCache()
            kit.forward(model, text[:, :30], plain)
            if left < 30:
                plain.crop(left - 30)
            if left:
                assert same(past, plain)
            got = kit.forward(model, text[:, left : left + 6], past)
            want = kit.forward(model, text[:, left : left + 6], plain)
            assert (got - want).abs().max() < 1e-4
            kit.whole(pool)
            if hook:
                assert past._rows.names.end == left + 6
        with kit.paged(pool, text, model=model) as past:
            # what was cropped and written again is cached under the tokens of the second time;
            # the prompt's first block was cached before any crop
            assert past.num_cached_tokens == (max(16, (left + 6) // 16 * 16) if hook else 16)


def test_crop_refuses_to_remove_more_than_there_is() -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model) as pool, filled(pool, model, kit.prompt(20)) as past:
        with pytest.raises(pc.InvalidPositionError):
            past.crop(-21)
        assert past.get_seq_length() == 20


def test_rejected_drafts_are_never_cached_nor_copied() -> None:
    """A block filled by a draft and cropped again is written in place: it was not committed."""
    model = kit.model_of("llama")
    ids = kit.prompt(28)
    with kit.pool_for(model) as pool, filled(pool, model, ids) as past:
        kit.forward(model, kit.prompt(8, seed=1), past)  # fills the second block
        assert pool.num_cached_blocks == 1
        past.crop(-8)
        kit.forward(model, kit.prompt(8, seed=2), past)
        kit.forward(model, kit.prompt(1, seed=3), past)
        assert pool.num_cached_blocks == 2
        assert pool.stats().cow_copies == 0
        text = torch.cat([ids, kit.prompt(8, seed=2)], dim=1)
        assert past.sequences[0].tokens[:36].tolist() == text[0].tolist()


# ---- rows change places ---------------------------------------------------------------------


@pytest.mark.parametrize("indices", [[1, 2, 0], [0, 0, 0], [2, 2, 1], [0, 1, 2], [1, 1, 1]])
def test_reorder_is_a_table_swap(indices: list[int]) -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(20, rows=3)
    with kit.pool_for(model) as pool, filled(pool, model, ids) as past:
        plain = DynamicCache()
        kit.forward(model, ids, plain)
        tables = [seq.block_table.tolist() for seq in past.sequences]
        kept = {id(seq) for seq in past.sequences}
        moved = pool.stats()
        past.reorder_cache(torch.tensor(indices))
        plain.reorder_cache(torch.tensor(indices))
        assert [seq.block_table.tolist() for seq in past.sequences] == [tables[i] for i in indices]
        # a row named once keeps its handle, one named again is forked, one not named is gone
        assert len({id(seq) for seq in past.sequences} & kept) == len(set(indices))
        assert pool.stats().sequences_active == 3
        now = pool.stats()
        assert now.sequences_allocated - moved.sequences_allocated == 3 - len(set(indices))
        assert (now.cow_copies, now.blocks_allocated) == (moved.cow_copies, moved.blocks_allocated)
        assert now.blocks_used == 2 * len(set(indices))  # counts of references are right
        kit.whole(pool)
        assert same(past, plain)
        step = kit.prompt(1, rows=3, seed=8)
        got, want = kit.forward(model, step, past), kit.forward(model, step, plain)
        assert torch.equal(got, want)
        assert same(past, plain)
        kit.whole(pool)


@pytest.mark.parametrize("way", ["sdpa", "pagedcache"])
@pytest.mark.parametrize("given", [-3, 0])
def test_rows_without_padding_need_no_mask_once_they_are_alone(given: int, way: str) -> None:
    """They came in a batch with a padded one."""
    model, plain = kit.model_of("llama", way), kit.model_of("llama", "eager")
    ids, mask = kit.padded([14, 20])
    more = kit.prompt(1, seed=4)
    with kit.pool_for(model) as pool, kit.paged(pool, ids, mask) as past:
        options, _ = kit.padded_pass(ids, past, mask)
        kit.forward(model, ids, past, **options)
        past.batch_select_indices(torch.tensor([1]))
        past.crop(given)
        cache = DynamicCache()
        kit.forward(plain, ids[1:, : 20 + given], cache)
        shown = torch.ones(1, 20 + given + 1, dtype=torch.long)
        got = kit.forward(model, more, past, attention_mask=shown)
        assert (got - kit.forward(plain, more, cache)).abs().max() < 2e-4


def test_repeat_and_select() -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(20, rows=2)
    with kit.pool_for(model) as pool, filled(pool, model, ids) as past:
        plain = DynamicCache()
        kit.forward(model, ids, plain)
        for cache in (past, plain):
            cache.batch_repeat_interleave(3)
        assert past.batch_size == 6
        assert same(past, plain)
        assert pool.stats().blocks_used == 4
        for cache in (past, plain):
            cache.batch_select_indices(torch.tensor([5, 0, 3]))
        assert same(past, plain)
        past.batch_select_indices(torch.tensor([False, True, True]))
        plain.batch_select_indices(torch.tensor([1, 2]))
        assert same(past, plain)
        kit.whole(pool)
        with pytest.raises(pc.InvalidPositionError):
            past.batch_select_indices(torch.tensor([2]))
        with pytest.raises(pc.InvalidArgumentError, match="repeats"):
            past.batch_repeat_interleave(0)
        assert past.batch_size == 2


def test_reset_forgets_everything() -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model) as pool, filled(pool, model, kit.prompt(20, rows=2)) as past:
        past.reset()
        assert past.get_seq_length() == 0
        assert past.layers[0].keys is None
        assert past.num_cached_tokens == 0
        kit.whole(pool, empty=True)
        ids = kit.prompt(33, rows=3)  # another batch
        assert torch.equal(kit.forward(model, ids, past), kit.forward(model, ids, None))


def test_a_batch_of_another_size() -> None:
    """A multiple forks the rows (one prompt, several continuations); anything else is refused."""
    model = kit.model_of("llama")
    ids = kit.prompt(20)
    more = kit.prompt(5, rows=3, seed=2)
    with kit.pool_for(model) as pool, filled(pool, model, ids) as past:
        got = kit.forward(model, more, past)
        plain = DynamicCache()
        kit.forward(model, ids.repeat(3, 1), plain)
        assert torch.equal(got, kit.forward(model, more, plain))
        assert [seq.tokens[20:25].tolist() for seq in past.sequences] == [
            [] if not past._rows.committed == 25 else row for row in more.tolist()
        ]
        with pytest.raises(pc.InvalidArgumentError, match="4 rows, this cache has 3"):
            kit.forward(model, kit.prompt(2, rows=4), past)
        assert past.get_seq_length() == 25
        assert torch.equal(kit.forward(model, more, past), kit.forward(model, more, plain))


# ---- copies, ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda past: past.fork()])
def test_a_copy_is_a_fork(make: Any) -> None:
    model = kit.model_of("llama")
    ids = kit.prompt(20)
    with kit.pool_for(model) as pool, filled(pool, model, ids) as past:
        used = pool.stats().blocks_used
        twin = make(past)
        assert pool.stats().blocks_used == used
        a, b = kit.prompt(6, seed=1), kit.prompt(6, seed=2)
        for cache, more in ((past, a), (twin, b)):
            plain = DynamicCache()
            kit.forward(model, ids, plain)
            assert torch.equal(kit.forward(model, more, cache), kit.forward(model, more, plain))
        kit.whole(pool)
        past.close()
        assert twin.get_seq_length() == 26
        twin.close()


def test_it_cannot_be_pickled() -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model) as pool, kit.paged(pool) as past:
        with pytest.raises(pc.CopyRefusedError):
            pickle.dumps(past)


def test_memory_goes_back_when_it_is_dropped() -> None:
    model = kit.make_model("llama")
    with kit.pool_for(model) as pool:
        past = filled(pool, model, kit.prompt(20))
        watched = weakref.ref(past)
        assert pool.stats().blocks_used == 2
        gc.disable()  # reference counts alone do it: there is no cycle
        try:
            del past
            assert watched() is None
        finally:
            gc.enable()
        assert pool.stats().blocks_used == 0
        assert not model._forward_pre_hooks
        assert pool.num_cached_blocks == 1


def test_a_closed_cache_refuses() -> None:
    model = kit.make_model("llama")
    with kit.pool_for(model) as pool:
        past = filled(pool, model, kit.prompt(20))
        past.close()
        past.close()
        assert past.closed
        assert not model._forward_pre_hooks
        for use in (
            lambda: kit.forward(model, kit.prompt(2), past),
            lambda: past.crop(1),
            lambda: past.reset(),
            lambda: past.record(kit.prompt(3)),
            lambda: past.fork(),
            lambda: past.__enter__(),
        ):
            with pytest.raises(pc.FreedHandleError):
                use()


def test_a_closed_pool_refuses() -> None:
    model = kit.model_of("llama")
    pool = pc.PagedKVCache(kit.spec_for(model), 8)
    past = kit.paged(pool, kit.prompt(5), model=model)
    pool.close()
    with pytest.raises(pc.FreedHandleError):
        kit.forward(model, kit.prompt(5), past)
    past.close()
    with pytest.raises(pc.FreedHandleError):
        kit.paged(pool)


# ---- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beams", [1, 3])
def test_an_exhausted_pool_leaves_everything_whole(way: str, beams: int) -> None:
    model = kit.model_of("llama", way)
    ids = kit.prompt(20)
    options = {"max_new_tokens": 60, "num_beams": beams}
    with kit.pool_for(model, num_blocks=3 if beams == 1 else 7) as pool:
        with kit.paged(pool, ids, model=model) as past:
            with pytest.raises(pc.OutOfBlocksError) as error:
                kit.generate(model, ids, past, **options)
            assert error.value.total == pool.num_blocks
            kit.whole(pool)
            length = past.get_seq_length()
            assert length >= 20
            # it can go on where it is
            past.crop(10)
            kit.whole(pool)
        kit.whole(pool, empty=True)
        with kit.paged(pool, ids, model=model) as past:  # and the pool serves the next request
            got = kit.generate(model, ids, past, max_new_tokens=8)
            assert got.tolist() == kit.generate(
                kit.model_of("llama"), ids, max_new_tokens=8
            ).tolist()


def test_a_prompt_that_does_not_fit_leaves_no_row_open() -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model, num_blocks=5) as pool:
        with pytest.raises(pc.OutOfBlocksError):
            kit.paged(pool, kit.prompt(30, rows=3))
        kit.whole(pool, empty=True)


def test_a_sequence_that_gets_too_long() -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model, max_seq_len=25) as pool:
        with pytest.raises(pc.SequenceTooLongError):
            kit.paged(pool, kit.prompt(26))
        with kit.paged(pool, kit.prompt(20), model=model) as past:
            with pytest.raises(pc.SequenceTooLongError):
                kit.generate(model, kit.prompt(20), past, max_new_tokens=10)
            assert past.get_seq_length() == 25
            kit.whole(pool)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("hook", [True, False])
def test_a_forward_pass_that_fails_is_forgotten(layer: int, hook: bool) -> None:
    """An exception anywhere in the model: the rows are as they were before the pass."""
    model = kit.make_model("llama")
    ids = kit.prompt(20)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    with kit.pool_for(model) as pool:
        with kit.paged(pool, ids, model=model if hook else None) as past:
            first = kit.forward(model, ids, past)
            handle = model.model.layers[layer].mlp.register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                kit.forward(model, kit.prompt(4, seed=1), past)
            handle.remove()
            kit.whole(pool)
            if layer == 2:
                assert past.get_seq_length() == 24  # every layer was written
                past.crop(-4)
            elif not hook:
                with pytest.raises(pc.InvalidArgumentError, match=f"{layer + 1} of 3 layers"):
                    kit.forward(model, kit.prompt(4, seed=1), past)
                past.crop(0)
            assert past.layers[2].get_seq_length() == 20
            more = kit.prompt(4, seed=2)
            plain = DynamicCache()
            assert torch.equal(first, kit.forward(model, ids, plain))
            assert torch.equal(kit.forward(model, more, past), kit.forward(model, more, plain))
            assert same(past, plain)


def test_values_that_are_not_finite() -> None:
    """A quantised format refuses them; the pass is forgotten, the rows stay usable."""
    model = kit.make_model("llama")
    ids = kit.prompt(20)
    with kit.pool_for(model, kv_format="q8") as pool:
        with kit.paged(pool, ids) as past:
            kit.forward(model, ids, past)
            weight = model.model.layers[1].self_attn.v_proj.weight
            kept = weight.detach().clone()
            with torch.no_grad():
                weight[3, 3] = float("nan")
            with pytest.raises(pc.NonFiniteError):
                kit.forward(model, kit.prompt(4, seed=1), past)
            with torch.no_grad():
                weight.copy_(kept)
            kit.whole(pool)
            assert past.get_seq_length() == 20
            kit.forward(model, kit.prompt(4, seed=1), past)  # no call of crop(0) was needed
            assert past.get_seq_length() == 24


def test_a_pool_of_another_model() -> None:
    """Refused with the model at hand when it is opened, else before a byte is written."""
    model = kit.model_of("llama")
    for changes in ({"num_layers": 2}, {"num_layers": 4}, {"num_kv_heads": 4}, {"head_dim": 8}):
        spec = kit.spec_for(model).replace(**changes)
        with pc.PagedKVCache(spec, 8) as pool:
            with pytest.raises(pc.ShapeError, match="spec_for"):
                kit.paged(pool, kit.prompt(4), model=model)
            with kit.paged(pool, kit.prompt(4)) as past:
                if changes == {"num_layers": 4}:  # seen when the second pass begins
                    kit.forward(model, kit.prompt(4), past)
                    with pytest.raises(pc.InvalidArgumentError, match="3 of 4 layers"):
                        kit.forward(model, kit.prompt(4), past)
                else:
                    with pytest.raises(pc.PagedCacheError, match="spec"):
                        kit.forward(model, kit.prompt(4), past)
                # two layers were all the pool knows of when the third came
                length = past.layers[-1].get_seq_length()
                assert length == (4 if changes == {"num_layers": 2} else 0)
                kit.whole(pool)
            kit.whole(pool, empty=True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("pool",), pc.InvalidArgumentError),
        ((None, [[1.5, 2.0]]), pc.InvalidArgumentError),
        ((None, [[-1, 2]]), pc.InvalidArgumentError),
        ((None, [[1, 2], [3]]), pc.ShapeError),
        ((None, torch.ones(1, 2, 3, dtype=torch.long)), pc.ShapeError),
        ((None, torch.ones(0, 2, dtype=torch.long)), pc.ShapeError),
        ((None, torch.ones(1, 0, dtype=torch.long)), pc.ShapeError),
        ((None, [[1, 2]], [[1, 1, 1]]), pc.ShapeError),
        ((None, None, [[1, 1, 1]]), pc.InvalidArgumentError),
        ((None, "text"), pc.PagedCacheError),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    model = kit.model_of("llama")
    with kit.pool_for(model) as pool:
        first = pool if arguments[0] is None else arguments[0]
        with pytest.raises(error):
            kit.paged(first, *arguments[1:])
        kit.whole(pool, empty=True)


def test_a_pool_without_bytes_is_refused() -> None:
    spec = kit.spec_for(kit.model_of("llama"))
    with pc.PagedKVCache(spec, 8, storage=None) as pool:
        with pytest.raises(pc.FormatError, match="bytes"):
            kit.paged(pool)
