"""Ids, counts, tokens and tables: everything a cache knows without touching a byte of K or V.

``BlockPool`` counts blocks, ``Ledger`` runs sequences over it. Written in Cython; a newcomer
finds each idea under its name: ``block_pool``, ``prefix_index``, ``sequences``, ``admission``,
``writing`` (copy-on-write), ``copies``, ``defragment``, ``slots``, ``exports``, ``inspect``.
"""

from pagedcache.bookkeeping.block_pool import BlockPool
from pagedcache.bookkeeping.handles import Pin, SeqState, SlotMapping
from pagedcache.bookkeeping.ledger import Ledger

__all__ = ["BlockPool", "Ledger", "Pin", "SeqState", "SlotMapping"]
