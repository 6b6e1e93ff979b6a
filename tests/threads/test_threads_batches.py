"""Many engines' schedulers on one cache: batches opened, stepped and freed by threads."""

from __future__ import annotations

import random

from cachekit import assert_holds, by_profile, empty, make_cache, rows
from threadkit import THREADS, run_threads

import pagedcache as pc

B = 4
HEADS = (1000, 2000)  # first tokens of the two prompts that all threads share


def scheduler(cache: pc.PagedKVCache, seed: int, rounds: int, hits: list[int]) -> None:
    """Rows are marks equal to the tokens, so what is shared is the same whoever wrote it."""
    rng = random.Random(seed)
    for _ in range(rounds):
        prompts = [
            [*range(head, head + rng.randint(1, 4 * B)), seed * 100 + rng.randrange(100)]
            for head in rng.choices(HEADS, k=rng.randint(1, 4))
        ]
        try:
            seqs = cache.open_many(prompts, as_many_as_fit=True)
        except pc.OutOfBlocksError:
            continue
        hits.append(sum(seq.num_cached_tokens for seq in seqs))
        texts = [prompt[: seq.seq_len] for prompt, seq in zip(prompts, seqs, strict=False)]
        counts = [seq.num_tokens - seq.seq_len for seq in seqs]
        new = [prompt[seq.seq_len :] for prompt, seq in zip(prompts, seqs, strict=False)]
        sampled: list[int] = []
        for _ in range(rng.randint(1, 6)):
            try:
                mapping = cache.step(seqs, sampled, counts)
            except pc.OutOfBlocksError:
                break  # preempt all of them
            for text, more in zip(texts, new, strict=True):
                text += more
            flat = [mark for more in new for mark in more]
            cache.store(0, *rows(cache.spec, 0, flat), mapping)
            sampled = [rng.randrange(9) for _ in seqs]
            new, counts = [[token] for token in sampled], [1] * len(seqs)
        for seq, text in zip(seqs, texts, strict=True):
            assert seq.tokens.tolist()[: len(text)] == text
            assert_holds(cache, seq, text[: seq.seq_len])
            seq.free()


def test_batches_of_many_threads_keep_apart_what_is_theirs():
    # CASE C8
    # SPEC F34 F23 F27
    cache = make_cache(48, B=B)
    rounds, hits = by_profile(60, 600, 3000), list[int]()
    run_threads(
        [lambda seed=seed: scheduler(cache, seed, rounds, hits) for seed in range(1, THREADS + 1)]
    )
    assert sum(hits) > 0
    empty(cache)
