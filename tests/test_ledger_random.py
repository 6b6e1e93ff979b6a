"""Random histories of a ledger with several layers: appends in pieces, steps prepared long before
they are stored, rewrites, forks, views, moves and failing copies, with and without open slots."""

from __future__ import annotations

import gc

import profiles
import pytest
from ledgermodel import World


@pytest.mark.parametrize("num_open", [0, 1, 2, 3, 6, 20])
def test_every_token_reads_as_it_was_written(num_open: int) -> None:
    # SPEC F20 F23 F24 F25 F27 F28 F30 F33, TRAP 4
    done = dict.fromkeys(["hits", "rewritten", "slots", "moves"], 0)
    for seed in range(profiles.scaled(30, 4)):
        world = World(1000 * num_open + seed, num_open)
        for _ in range(250):
            world.step()
        world.end()
        for name in done:
            done[name] += world.done[name]
        del world
        gc.collect()
    if not profiles.SHORT:  # all of it has happened
        assert done["hits"] and done["rewritten"] and done["moves"]
        assert bool(done["slots"]) == (0 < num_open < 20)
