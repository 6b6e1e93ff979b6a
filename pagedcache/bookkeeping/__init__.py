"""Ids, counts, tokens and tables: everything a cache knows without touching a byte of K or V.

``BlockPool`` counts blocks, ``Ledger`` runs sequences over it. Written in Cython; each idea is
found under its name. ``types``: the structures. ``blocks``, ``releasing`` and ``gate``: one block,
many given back at once, and the lock.
``prefix_index``, ``sequences``, ``admission``, ``writing`` (copy-on-write), ``opening`` (open
blocks), ``committing``, ``steps`` (batches), ``copies``, ``defragment``, ``slots``, ``exports``,
``inspect``: plans and how they are applied, in C. ``handles``, ``mapping``, ``block_pool`` and
``ledger`` (on ``ledger_step``, ``ledger_seal``, ``ledger_pin``, ``ledger_write``, ``ledger_open``
and ``ledger_base``): the classes that Python sees.
"""

from pagedcache.bookkeeping.block_pool import BlockPool
from pagedcache.bookkeeping.handles import Pin, SeqState
from pagedcache.bookkeeping.ledger import Ledger
from pagedcache.bookkeeping.mapping import SlotMapping

__all__ = ["BlockPool", "Ledger", "Pin", "SeqState", "SlotMapping"]
