"""``PagedKVCache``: the whole cache. The only place where ids meet bytes.

The façade ties three parts and adds no policy of its own: the ledger (ids, counts, tables,
prefixes; knows no bytes), the storage (bytes by slot; knows no sequence) and the handles. A write
is always the same four steps::

    storage.check_rows   every array validated, nothing changed
    ledger.begin_append  the write range made private and pinned, under the ledger's lock
    storage.store        bytes move, no lock held, the GIL released
    ledger.end_append    the written end advances, the pin goes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedcache.admission import BatchAdmission
from pagedcache.arguments import as_count, as_flag
from pagedcache.arrays import as_tokens, row_format
from pagedcache.attention import Attention
from pagedcache.batches import BatchPaths
from pagedcache.bookkeeping import Ledger
from pagedcache.door import Door
from pagedcache.errors import FormatError, InvalidArgumentError, PagedCacheError, shown
from pagedcache.guards import NO_STORAGE, Gone, NoCopy, freed
from pagedcache.handles import Handles
from pagedcache.hashing import encode_root, validate_extra_keys
from pagedcache.ids import IdStyle
from pagedcache.movers import Movers
from pagedcache.ordering import Ordering
from pagedcache.placement import check_open_blocks, resolve_num_blocks, resolve_placement
from pagedcache.pointers import BatchPointers
from pagedcache.reading import stored_dtype
from pagedcache.sequence import Sequence
from pagedcache.sizes import format_size
from pagedcache.spec import CacheSpec
from pagedcache.storage import make_storage
from pagedcache.storage.cpu import CpuStorage
from pagedcache.upkeep import Upkeep

_NO_KEYS: Any = ()  # the default of extra_keys


class PagedKVCache(
    NoCopy, IdStyle, BatchAdmission, BatchPaths, Attention, BatchPointers, Upkeep, Ordering
):
    """K and V of many sequences in fixed-size blocks of one pool, all taken at the start.

    ``spec``: a ``CacheSpec``. Exactly one of ``num_blocks`` and ``memory`` (bytes, a text like
    ``"2GiB"``, or a mapping with one per device, of which the smallest count rules) sizes the
    pool. ``spec.storage_nbytes(num_blocks)`` says beforehand what it will take, the logger
    ``"pagedcache"`` says it (level INFO) before it is taken, and so does the error when it cannot
    be had.

    ``device``: ``"cpu"``, ``"cuda"`` (the first GPU), ``"cuda:N"``, or a list with one device per
    layer. ``storage``: ``"own"`` allocates; ``None`` keeps ids, tables and prefixes only, for
    engines that own their tensors (see ``take_block_copies``); ``(k_slabs, v_slabs)`` adopts the
    caller's arrays, one per layer, on the layer's device.

    With layers on a GPU, work is queued on the ``stream=`` of each call: an int handle, a stream
    of PyCUDA, torch, CuPy or cuda.core, None for the default stream, or, with several GPUs, a
    mapping from device names to streams. A call makes what it returns and what it was given safe
    to use on that stream, whatever other streams did with the same blocks; nothing waits on the
    host. Kernels of your own are told by ``stream=`` of ``commit``, ``free`` and ``truncate`` or
    by ``record_use``.

    ``partial_block_reuse``: least number of tokens of a partly matching block worth copying, at
    most ``block_size``; by default a quarter of a block. 0 takes whole blocks only. Even then the
    last block of a prompt that is cached in full is copied, less its last token, so that this
    one token is all that is left to compute. ``eviction``: ``"lru"``.

    ``num_open_blocks``: how many blocks may be open at once where the spec keeps part-filled
    blocks in a float format (``CacheSpec.open_blocks``); each costs ``spec.open_block_nbytes``
    beside the blocks. By default a sixteenth of the blocks, at least 16. A sequence needs one for
    its last block, another while it is written across that block's end, and a third where there
    are many. ``open`` keeps two back for a prompt (one within a block), so that what a sequence was
    opened for can be written whatever others do, if one step is committed before the next and the
    sequence is not forked meanwhile (a fork shares the block that is being written: whoever writes
    first needs another slot). Where they are missing, ``open`` raises ``OutOfOpenBlocksError``. Two
    per prompt that is being computed and two per sequence that grows are enough.

    ``prefault``: have the system provide the CPU memory of all blocks now, on as many threads as
    ``set_num_threads`` says, and not page by page while the first tokens are stored. Without
    effect on memory of the caller's and on GPUs, whose memory is there anyway.

    Thread-safe: any mix of calls on different handles; readers beside the one writer of a handle.
    A context manager: leaving the block closes it. It cannot be copied or pickled, and belongs to
    the process that made it (``ForkedProcessError`` in a forked child).

    Raises ``InvalidArgumentError``, ``DeviceError``, ``CudaUnavailableError``, ``FormatError`` /
    ``ShapeError`` (adopted slabs) or ``StorageMemoryError``; nothing is kept then.
    """

    #: Tests of hash collisions replace it; the index compares tokens whatever the hash says.
    _hash_mask = 2**64 - 1

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int | None = None,
        *,
        memory: Any = None,
        device: Any = "cpu",
        storage: Any = "own",
        partial_block_reuse: int | None = None,
        eviction: str = "lru",
        num_open_blocks: int | None = None,
        prefault: bool = False,
    ) -> None:
        # First of all, so that close() and repr() work on an instance that was refused.
        self._ledger: Any = freed("this cache")
        self._storage: Any = freed("this cache")
        self._door: Door | None = None
        self._handles = Handles()
        self._on_device = False
        if not isinstance(spec, CacheSpec):
            raise InvalidArgumentError(f"spec must be a CacheSpec, got {type(spec).__name__}")
        prefault = as_flag(prefault, "prefault")
        self.spec = spec
        self._placement = resolve_placement(device, spec.num_layers)
        slots = None if spec.has_open_blocks and storage is not None else 0
        if num_open_blocks is not None:
            slots = check_open_blocks(spec, storage is not None, num_open_blocks)
        self.num_blocks, num_open = resolve_num_blocks(
            spec, self._placement, num_blocks, memory, slots
        )
        partial = _check_policies(spec, partial_block_reuse, eviction)
        bytes_kept = self._make_storage(storage, num_open)
        self._on_device = bytes_kept is not None and bytes_kept.ordered
        movers = Movers([] if bytes_kept is None else [bytes_kept])
        self._movers = movers
        self._ledger = Ledger(
            self.num_blocks,
            spec.block_size,
            num_layers=spec.num_layers,
            max_seq_len=spec.max_seq_len,
            partial_block_reuse=partial,
            mover=None if bytes_kept is None else movers.copy,
            move_mover=None if bytes_kept is None else movers.move,
            deferred_copies=bytes_kept is None,
            queued=self._on_device,
            num_open=num_open,
            hash_mask=self._hash_mask,
        )
        self._storage = NO_STORAGE if bytes_kept is None else bytes_kept
        if prefault and bytes_kept is not None:
            bytes_kept.touch()
        if isinstance(bytes_kept, CpuStorage):
            self._door = Door(self._ledger, bytes_kept, row_format(stored_dtype(spec)).code)

    def _make_storage(self, storage: Any, num_open: int) -> Any:
        if storage is None:
            return None
        if isinstance(storage, str):
            if storage != "own":
                raise FormatError('"own", None or (k_slabs, v_slabs)', shown(storage), "storage")
            _announce(self.spec.storage_nbytes(self.num_blocks, num_open), self.num_blocks)
            return make_storage(
                self.spec, self.num_blocks, self._placement.devices, num_open=num_open
            )
        if not isinstance(storage, (tuple, list)) or len(storage) != 2:
            raise FormatError(
                '"own", None or (k_slabs, v_slabs)', type(storage).__name__, "storage"
            )
        return make_storage(
            self.spec, self.num_blocks, self._placement.devices, tuple(storage), num_open
        )

    # ---- life ----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return isinstance(self._ledger, Gone)

    def close(self) -> None:
        """Free all sequences and give the storage back; idempotent.

        Handles raise ``FreedHandleError`` from now on. Arrays of live views stay valid; the
        memory goes back to the system when the last of them is gone.
        """
        ledger = self._ledger
        states = self._handles.close()
        self._ledger = self._storage = freed("this cache")
        self._door = None
        if isinstance(ledger, Gone):
            return
        try:
            for state in states:
                ledger.free(state, False)
        except PagedCacheError:
            pass  # in a forked child: what the parent's handles hold is not ours to give back
        # Calls and views in flight hold the storage by themselves; it goes with the last of them.
        self._movers.forget()

    def __enter__(self) -> PagedKVCache:
        self._ledger.layout_epoch  # noqa: B018 - refuses on a closed cache
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- sequences -----------------------------------------------------------------------

    def open(
        self,
        tokens: Any = (),
        salt: bytes | str | None = b"",
        *,
        extra_keys: Any = _NO_KEYS,
        adapter: bytes | str | None = None,
        request_id: Any = None,
        resumed: bool = False,
        allocate_upto: int | None = None,
        stream: Any = None,
    ) -> Sequence:
        """Open a sequence: match the longest cached prefix of ``tokens``, take blocks for the rest.

        ``tokens``: list, tuple, range or integer array of values 0…2^32 - 1. At least the last
        token is always left to compute: ``seq.num_cached_tokens <= len(tokens) - 1``. Blocks are
        taken for all tokens, or for the first ``allocate_upto`` (``prepare`` grows the table
        later); a fresh block for a partly matched last one is taken and filled now.

        ``salt`` and ``adapter`` (bytes or str) isolate: no hit across different ones.
        ``extra_keys``: ``[(start, stop, bytes), …]`` names content behind tokens (images).
        ``request_id``: a name of the caller's own that no live sequence may have.
        ``resumed``: the request was preempted and comes back; its hits are counted apart.
        ``stream``: where the blocks found and taken are going to be used.

        Raises ``OutOfBlocksError`` (only if the prompt would not fit cold either; its subclass
        ``OutOfOpenBlocksError`` where open blocks are what is missing),
        ``SequenceTooLongError`` or ``InvalidArgumentError``, with nothing changed.
        """
        checked = as_tokens(tokens)
        root = encode_root(salt, adapter)
        extras = [] if extra_keys is _NO_KEYS else validate_extra_keys(extra_keys)
        flag = as_flag(resumed, "resumed")
        upto = -1 if allocate_upto is None else as_count(allocate_upto, "allocate_upto")
        queue = self._queue(stream)
        seq = self._admit(
            lambda ledger: self._movers.run(
                queue, ledger.open, checked, root, extras, upto, flag
            ),
            request_id,
        )
        if queue is not None:
            self._hand_over(seq, queue)
        return seq

    def probe(
        self,
        tokens: Any,
        salt: bytes | str | None = b"",
        *,
        extra_keys: Any = (),
        adapter: bytes | str | None = None,
    ) -> int:
        """Tokens that ``open`` would find cached; counts nothing and touches nothing."""
        extras = validate_extra_keys(extra_keys)
        return int(self._ledger.probe(as_tokens(tokens), encode_root(salt, adapter), extras))

    def blocks_needed(
        self,
        tokens: Any,
        salt: bytes | str | None = b"",
        *,
        extra_keys: Any = (),
        adapter: bytes | str | None = None,
        allocate_upto: int | None = None,
    ) -> int:
        """Blocks that ``open`` would take beyond its hits now; counts and touches nothing."""
        return int(
            self._ledger.blocks_needed(
                as_tokens(tokens),
                encode_root(salt, adapter),
                validate_extra_keys(extra_keys),
                allocate_upto=-1 if allocate_upto is None
                else as_count(allocate_upto, "allocate_upto"),
            )
        )

    def _admit(self, make: Callable[[Any], Any], request_id: Any) -> Sequence:
        """The registered handle of the state that ``make(ledger)`` returns."""
        handles, ledger = self._handles, self._ledger
        if request_id is None:
            seq = Sequence(self, make(ledger))
            handles.add(seq)
            return seq
        handles.claim(request_id)
        try:
            seq = Sequence(self, make(ledger), request_id)
            handles.add(seq)
        finally:
            handles.unclaim(request_id)
        return seq

    # ---- geometry ------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.spec.block_size

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of every layer."""
        return self._placement.devices

    def layer_device(self, layer: int) -> str:
        """Device of one layer; ``InvalidArgumentError`` when there is no such layer."""
        return self._placement.layer_device(layer)

    @property
    def is_on_gpu(self) -> bool:
        """Whether any layer lives on a GPU."""
        return self._placement.is_on_gpu

    def __repr__(self) -> str:
        spec = self.spec
        formats = spec.k_format.name
        if spec.v_format != spec.k_format:
            formats += f"/{spec.v_format.name}"
        head = f"<PagedKVCache: {self.num_blocks:,} blocks of {spec.block_size} tokens, {formats}"
        ledger = self._ledger
        if isinstance(ledger, Gone):
            return f"{head}, closed>"
        where = "no storage" if self._storage is NO_STORAGE else str(self._placement)
        used = ledger.pool.num_used_blocks
        return f"{head} on {where}, {used:,} used, {format_size(self.total_capacity)}>"


def _check_policies(spec: CacheSpec, partial_block_reuse: Any, eviction: Any) -> int:
    if not isinstance(eviction, str) or eviction != "lru":
        text = f'eviction must be "lru", the only policy, got {shown(eviction)}'
        raise InvalidArgumentError(text)
    if partial_block_reuse is None:
        return max(1, spec.block_size // 4)
    return as_count(partial_block_reuse, "partial_block_reuse", most=spec.block_size)


def _announce(nbytes: int, num_blocks: int) -> None:
    import logging  # not needed to import the package

    logging.getLogger("pagedcache").info(
        "taking %s (%d bytes) for K and V of %d blocks", format_size(nbytes), nbytes, num_blocks
    )
