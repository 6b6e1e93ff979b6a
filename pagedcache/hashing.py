"""Public hashes of token prefixes: the same on every machine, in every process.

Two identities, neither of which the in-memory index trusts (it compares tokens):

* ``compute_prefix_hash`` - 64 bits, FNV-1a over whole tokens, cheap, easily collided on purpose.
* ``compute_block_hashes`` - chained SHA-256 keys of full blocks, for events and external stores.

The key chain, byte for byte (all integers little-endian)::

    key_0 = SHA-256(b"pagedcache/1" || root)                        the root, before any block
    key_i = SHA-256(key_{i-1} || tokens of block i as uint32 || extra of block i)

    field = tag, one byte || length of payload, uint32 || payload
    root  = field(0x01, salt) if salt is not empty || field(0x02, adapter) if it is not empty
    extra = field(0x03, start uint32 || stop uint32 || key bytes) for each extra key that
            overlaps the block, ordered by (start, stop, key) of the whole range; start and stop
            are clipped to the block and counted from its first token

A str is its UTF-8, ``None`` is ``b""``. Tags and lengths keep salt "x" apart from adapter "x",
and ("ab", "c") from ("a", "bc"). A block without extra keys adds no bytes. Keys of different
block sizes are not comparable: a store that holds several must keep them apart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

from pagedcache._native.hashing import fnv1a64
from pagedcache.arguments import as_count
from pagedcache.arrays import as_tokens
from pagedcache.errors import InvalidArgumentError, shown
from pagedcache.guards import taking

ExtraKey = tuple[int, int, bytes]

KEY_NBYTES = 32
_VERSION = b"pagedcache/1"
_TAG_SALT, _TAG_ADAPTER, _TAG_EXTRA = 0x01, 0x02, 0x03
_FIELD_HEAD = struct.Struct("<BI")
_RANGE = struct.Struct("<II")
_MAX_KEY_NBYTES = 2**32 - 1 - _RANGE.size


def compute_prefix_hash(tokens: Any) -> int:
    """64-bit FNV-1a of ``tokens`` (list, tuple or integer array), as an int in 0…2^64 - 1.

    Whole token values: xor the token, multiply by 0x100000001b3, from 0xcbf29ce484222325 (the
    hash of no tokens). Not the bytewise FNV-1a. Raises ``InvalidArgumentError`` for what is no
    token array.
    """
    return int(fnv1a64(as_tokens(tokens)))


def compute_root_key(salt: bytes | str | None = b"", adapter: bytes | str | None = None) -> bytes:
    """The 32 bytes before the first block: ``SHA-256(b"pagedcache/1" || root)``."""
    return _sha256(_VERSION + encode_root(salt, adapter))


def compute_block_hash(
    tokens: Any,
    parent: bytes | None = None,
    salt: bytes | str | None = b"",
    *,
    adapter: bytes | str | None = None,
    extra: bytes = b"",
) -> bytes:
    """The 32-byte key of one full block that holds ``tokens``.

    ``parent`` is the key of the block before it. ``None`` means the first block, and only then
    ``salt`` and ``adapter`` enter: further on they are in ``parent`` already. ``extra`` comes from
    ``encode_extra``. Raises ``InvalidArgumentError`` for no tokens or a parent of other length.
    """
    array = as_tokens(tokens)
    if not len(array):
        raise InvalidArgumentError("a block hash needs at least one token, got none")
    if parent is None:
        parent = compute_root_key(salt, adapter)
    elif not isinstance(parent, bytes) or len(parent) != KEY_NBYTES:
        raise InvalidArgumentError(
            f"parent must be None or the {KEY_NBYTES} bytes of a block hash, got {shown(parent)}"
        )
    return _sha256(parent + array.astype("<u4", copy=False).tobytes() + _as_bytes(extra, "extra"))


def compute_block_hashes(
    tokens: Any,
    block_size: SupportsIndex,
    salt: bytes | str | None = b"",
    *,
    adapter: bytes | str | None = None,
    extra_keys: Iterable[tuple[int, int, bytes]] = (),
) -> list[bytes]:
    """Chained 32-byte keys of the full blocks of ``tokens``: ``len(tokens) // block_size``.

    A part-filled last block has no key. ``extra_keys`` as in ``validate_extra_keys``. Raises
    ``InvalidArgumentError`` for a block size below 1 and for what the fields do not accept.
    """
    size = as_count(block_size, "block_size", least=1)
    array = as_tokens(tokens)
    num_blocks = len(array) // size
    key = compute_root_key(salt, adapter)
    keys = []
    with taking(array.nbytes + 100 * num_blocks, f"the keys of {num_blocks:,} blocks"):
        data = array.astype("<u4", copy=False).view("u1").data
        extras = _extra_by_block(validate_extra_keys(extra_keys), size, num_blocks)
        for i in range(num_blocks):
            block = data[4 * size * i : 4 * size * (i + 1)]
            key = _sha256(key, block, extras.get(i, b""))
            keys.append(key)
    return keys


def encode_root(salt: bytes | str | None, adapter: bytes | str | None = None) -> bytes:
    """Salt and adapter as tagged fields; ``b""`` when both are empty."""
    root = b""
    for tag, value, name in ((_TAG_SALT, salt, "salt"), (_TAG_ADAPTER, adapter, "adapter")):
        payload = _as_bytes(value, name)
        if payload:
            root += _field(tag, payload)
    return root


def validate_extra_keys(extra_keys: Iterable[tuple[int, int, bytes]]) -> list[ExtraKey]:
    """Extra keys as a sorted list of ``(start, stop, key bytes)``.

    Each names content (an image, say) behind the tokens ``start … stop - 1``; ranges may overlap
    and may reach past the known tokens. Raises ``InvalidArgumentError``, naming the index, unless
    0 <= start < stop and the key is bytes or str.
    """
    try:
        items = list(extra_keys)
    except TypeError:
        kind = type(extra_keys).__name__
        raise InvalidArgumentError(
            f"extra_keys must be a list of (start, stop, bytes), got {kind}"
        ) from None
    return sorted(_extra_key(item, f"extra_keys[{i}]") for i, item in enumerate(items))


def encode_extra(extra_keys: Sequence[ExtraKey], block_start: int, block_stop: int) -> bytes:
    """Tagged fields of the extra keys that overlap tokens ``block_start … block_stop - 1``.

    ``extra_keys`` as ``validate_extra_keys`` returns them; ``b""`` when none overlaps.
    """
    return b"".join(
        _extra_field(max(start, block_start), min(stop, block_stop), block_start, key)
        for start, stop, key in extra_keys
        if start < block_stop and stop > block_start
    )


def _extra_by_block(
    extra_keys: Sequence[ExtraKey], block_size: int, num_blocks: int
) -> dict[int, bytes]:
    """``encode_extra`` of every block that has any, with work only where keys overlap."""
    fields: dict[int, list[bytes]] = {}
    for start, stop, key in extra_keys:
        for i in range(start // block_size, min(-(-stop // block_size), num_blocks)):
            first, last = block_size * i, block_size * (i + 1)
            field = _extra_field(max(start, first), min(stop, last), first, key)
            fields.setdefault(i, []).append(field)
    return {i: b"".join(parts) for i, parts in fields.items()}


def _extra_field(start: int, stop: int, block_start: int, key: bytes) -> bytes:
    return _field(_TAG_EXTRA, _RANGE.pack(start - block_start, stop - block_start) + key)


def _field(tag: int, payload: bytes) -> bytes:
    return _FIELD_HEAD.pack(tag, len(payload)) + payload


def _extra_key(item: Any, name: str) -> ExtraKey:
    try:
        start, stop, key = item
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{name} must be (start, stop, bytes), got {shown(item)}"
        ) from None
    first = as_count(start, f"{name} start")
    last = as_count(stop, f"{name} stop", least=first + 1)
    if key is None:  # an omitted salt is empty, an omitted content is a mistake
        raise InvalidArgumentError(f"{name} has no key bytes, got None")
    return first, last, _as_bytes(key, f"{name} key")


def _as_bytes(value: Any, name: str) -> bytes:
    if value is None:
        return b""
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{name} is no valid text: {error}") from None
    if not isinstance(value, bytes | bytearray | memoryview):
        kind = type(value).__name__
        raise InvalidArgumentError(f"{name} must be bytes, str or None, got {kind}")
    data = bytes(value)
    if len(data) > _MAX_KEY_NBYTES:
        raise InvalidArgumentError(
            f"{name} holds {len(data)} bytes, at most {_MAX_KEY_NBYTES} are possible"
        )
    return data


def _sha256(*parts: bytes | memoryview) -> bytes:
    from hashlib import sha256  # loads OpenSSL: only who asks for keys pays for it

    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
