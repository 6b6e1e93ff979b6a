"""What a cache stores: model geometry, formats, layout; and every size that follows from it.

Sizes have one source, the geometry of the C headers, which places the bytes too: what is
counted is what is stored, padding and scales included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex

from pagedcache._native.arithmetic import block_geometry
from pagedcache.arguments import as_count
from pagedcache.errors import FormatError, InvalidArgumentError, shown
from pagedcache.formats import KVFormat, get_format, get_policy
from pagedcache.sizes import parse_size

#: Native codes of the layouts: head-major and token-major blocks.
LAYOUTS = {"HND": 0, "NHD": 1}

_FIELD_LIMIT = 2**31 - 1
_NBYTES_LIMIT = 2**62  # of one block, all layers: leaves room for sums in 64 bits


@dataclass(frozen=True, init=False, repr=False)
class CacheSpec:
    """Geometry and formats of a cache. Immutable, hashable, comparable, picklable.

    ``num_layers``, ``num_kv_heads`` (KV heads, not query heads), ``head_dim``: of the model.
    ``block_size``: tokens per block. ``kv_format``: name or :class:`KVFormat` for K and V;
    ``k_format`` and ``v_format`` choose them apart (one of them may rely on ``kv_format``).
    ``kv_format="q4k"`` is q4k for K and q4_1 for V.
    ``layout``: ``"HND"`` (blocks ``[num_kv_heads, block_size, head_dim]``) or ``"NHD"``
    (``[block_size, num_kv_heads, head_dim]``). ``max_seq_len``: longest sequence in tokens, or
    None. ``on_nonfinite``: what quantised formats do with NaN and Inf, ``"raise"`` or
    ``"saturate"``. ``open_blocks``: the float format in which a sequence's newest blocks are kept
    until they are full and one block behind its end; then they are quantised, once. q4k needs
    that (``"float16"`` unless told otherwise), other quantised formats gain from it on request:
    plain 4-bit formats lose most through the newest tokens. None: rows are quantised as they
    come.

    Raises :class:`InvalidArgumentError` for a value that no cache can have, sizes whose block
    would not fit 62 bits among them (and ``open_blocks`` where nothing is quantised), and
    :class:`FormatError` for an unknown format or open blocks of a quantised one.

    >>> spec = CacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, kv_format="q8")
    >>> spec.block_nbytes  # 30 layers * 2 * 3 heads * 16 tokens * 2 groups * 36 bytes
    207360
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    k_format: KVFormat
    v_format: KVFormat
    layout: str
    max_seq_len: int | None
    on_nonfinite: str
    open_blocks: KVFormat | None
    _nbytes: dict[str, int] = field(init=False, compare=False)
    _open_nbytes: dict[str, int] = field(init=False, compare=False)

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        kv_format: str | KVFormat | None = None,
        *,
        k_format: str | KVFormat | None = None,
        v_format: str | KVFormat | None = None,
        layout: str = "HND",
        max_seq_len: int | None = None,
        on_nonfinite: str = "raise",
        open_blocks: str | KVFormat | None = None,
    ) -> None:
        if kv_format is not None and k_format is not None and v_format is not None:
            raise InvalidArgumentError("give kv_format, or k_format and v_format, not all three")
        both = get_format("float16" if kv_format is None else kv_format)
        formats = (
            both if k_format is None else get_format(k_format),
            both.v_partner if v_format is None else get_format(v_format),
        )
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise InvalidArgumentError(f"layout must be 'HND' or 'NHD', got {shown(layout)}")
        get_policy(on_nonfinite)
        if max_seq_len is not None:
            max_seq_len = as_count(max_seq_len, "max_seq_len", least=1)
        values = {
            "num_layers": _size(num_layers, "num_layers"),
            "num_kv_heads": _size(num_kv_heads, "num_kv_heads"),
            "head_dim": _size(head_dim, "head_dim"),
            "block_size": _size(block_size, "block_size"),
            "k_format": formats[0],
            "v_format": formats[1],
            "layout": layout,
            "max_seq_len": max_seq_len,
            "on_nonfinite": on_nonfinite,
            "open_blocks": _open_blocks(open_blocks, formats),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_total()
        nbytes = {"k": self._block_nbytes(self.k_format), "v": self._block_nbytes(self.v_format)}
        object.__setattr__(self, "_nbytes", nbytes)
        opened = dict.fromkeys(nbytes, 0)
        if self.has_open_blocks:
            opened = {kind: self._block_nbytes(self.open_format(kind)) for kind in _KINDS}
        object.__setattr__(self, "_open_nbytes", opened)

    def layer_block_nbytes(self, kind: Literal["k", "v"]) -> int:
        """Bytes of one block of one layer's K (``"k"``) or V (``"v"``), padding included."""
        return self._nbytes[_kind(kind)]

    def layer_open_block_nbytes(self, kind: Literal["k", "v"]) -> int:
        """Bytes of one open block of one layer's K or V; 0 without open blocks."""
        return self._open_nbytes[_kind(kind)]

    @property
    def has_open_blocks(self) -> bool:
        """Whether the newest blocks of a sequence are kept in another format."""
        return self.open_blocks is not None

    def open_format(self, kind: Literal["k", "v"]) -> KVFormat:
        """The format of K or V in open blocks: its own where that is a float format.

        Raises :class:`InvalidArgumentError` for a spec without open blocks.
        """
        own = self.k_format if _kind(kind) == "k" else self.v_format
        if self.open_blocks is None:
            raise InvalidArgumentError(f"{self!r} has no open blocks")
        return self.open_blocks if own.is_quantized else own

    @property
    def open_block_nbytes(self) -> int:
        """Bytes of one open block: K and V of all layers; 0 without open blocks."""
        return self.num_layers * (self._open_nbytes["k"] + self._open_nbytes["v"])

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: K and V of all layers, scales and padding included."""
        return self.num_layers * (self._nbytes["k"] + self._nbytes["v"])

    @property
    def token_nbytes(self) -> float:
        """Bytes per token of a full block: ``block_nbytes / block_size``."""
        return self.block_nbytes / self.block_size

    @property
    def bytes_per_value(self) -> float:
        """Exact bytes per stored K or V value, scales and padding included."""
        return 4 * self.block_nbytes / self.fp32_block_nbytes

    @property
    def fp32_block_nbytes(self) -> int:
        """Bytes one block would take in float32."""
        return 8 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def k_block_shape(self) -> tuple[int, ...]:
        """Shape of one block of one layer's K: three axes, or (bytes,) if it is quantised."""
        return self._block_shape("k")

    @property
    def v_block_shape(self) -> tuple[int, ...]:
        """Shape of one block of one layer's V, as :attr:`k_block_shape`."""
        return self._block_shape("v")

    @property
    def kv_format(self) -> KVFormat | None:
        """The ``kv_format`` that chooses K's and V's formats, or None where no one does."""
        return self.k_format if self.v_format == self.k_format.v_partner else None

    def storage_nbytes(self, num_blocks: int, num_open: int = 0) -> int:
        """Bytes of a pool of ``num_blocks`` blocks and ``num_open`` open blocks.

        Raises :class:`InvalidArgumentError` for negative counts, for open blocks where the spec
        has none, and for more than 2^63 - 1 bytes.
        """
        opened = as_count(num_open, "num_open")
        if opened and not self.has_open_blocks:
            raise InvalidArgumentError(f"num_open must be 0, got {opened}: no open_blocks in spec")
        nbytes = as_count(num_blocks, "num_blocks") * self.block_nbytes
        nbytes += opened * self.open_block_nbytes
        if nbytes > 2**63 - 1:
            raise InvalidArgumentError(
                f"num_blocks {num_blocks} of {self.block_nbytes} bytes and num_open {num_open} of "
                f"{self.open_block_nbytes} bytes are more than 2^63 - 1 bytes"
            )
        return nbytes

    def default_open_blocks(self, num_blocks: int) -> int:
        """Open blocks a cache of ``num_blocks`` has unless it is told otherwise: one for 16 blocks,
        at least 16, never more than blocks; 0 without open blocks."""
        num_blocks = as_count(num_blocks, "num_blocks")
        return min(num_blocks, max(16, -(-num_blocks // 16))) if self.has_open_blocks else 0

    def blocks_for(self, memory: SupportsIndex | str) -> int:
        """Blocks that fit into ``memory``: bytes, or a text like ``"2GiB"``; may be 0.

        Open blocks (:meth:`default_open_blocks` of them) are counted in. Raises
        :class:`InvalidArgumentError` for a size that can't be read.
        """
        nbytes = parse_size(memory)
        low, high = 0, nbytes // self.block_nbytes
        while low < high:  # the most blocks that fit with their open ones
            middle = (low + high + 1) // 2
            opened = self.default_open_blocks(middle) * self.open_block_nbytes
            fits = middle * self.block_nbytes + opened <= nbytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def replace(self, **changes: Any) -> CacheSpec:
        """Return a copy with some constructor arguments changed; ``kv_format`` replaces both.

        ``open_blocks`` follows the formats unless it was chosen.
        """
        kept: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        if not self._chose_open_blocks():
            del kept["open_blocks"]
        if "kv_format" in changes:
            del kept["k_format"], kept["v_format"]
        unknown = sorted(set(changes) - {*_FIELDS, "kv_format"})
        if unknown:
            raise InvalidArgumentError(f"CacheSpec has no {', '.join(unknown)}")
        return CacheSpec(**(kept | changes))

    def __repr__(self) -> str:
        if self.kv_format is not None:
            formats = f"kv_format={self.k_format.name!r}"
        else:
            formats = f"k_format={self.k_format.name!r}, v_format={self.v_format.name!r}"
        parts = [f"{name}={getattr(self, name)}" for name in _FIELDS[:4]]
        parts += [formats, f"layout={self.layout!r}"]
        if self.max_seq_len is not None:
            parts.append(f"max_seq_len={self.max_seq_len}")
        if self.on_nonfinite != "raise":
            parts.append(f"on_nonfinite={self.on_nonfinite!r}")
        if self.open_blocks is not None and self._chose_open_blocks():
            parts.append(f"open_blocks={self.open_blocks.name!r}")
        return f"CacheSpec({', '.join(parts)})"

    def _chose_open_blocks(self) -> bool:
        return self.open_blocks != _open_blocks(None, (self.k_format, self.v_format))

    def _block_shape(self, kind: Literal["k", "v"]) -> tuple[int, ...]:
        if (self.k_format if kind == "k" else self.v_format).is_quantized:
            return (self._nbytes[kind],)
        return self.open_block_shape

    @property
    def open_block_shape(self) -> tuple[int, int, int]:
        """Shape of one open block of one layer's K or V, and of all blocks of float formats."""
        if self.layout == "HND":
            return (self.num_kv_heads, self.block_size, self.head_dim)
        return (self.block_size, self.num_kv_heads, self.head_dim)

    def _block_nbytes(self, format: KVFormat) -> int:
        sizes = block_geometry(
            format.code, LAYOUTS[self.layout], self.num_kv_heads, self.block_size, self.head_dim
        )
        return sizes["block_nbytes"]

    def _check_total(self) -> None:
        """Refuse what native 64-bit arithmetic could not count; a bound, not the exact size."""
        rows = self.num_layers * self.num_kv_heads * self.block_size
        if 2 * rows * (5 * (self.head_dim + 32) + 32) > _NBYTES_LIMIT:
            raise InvalidArgumentError(f"{self!r}: one block would be more than 2^62 bytes")


_FIELDS = (
    "num_layers", "num_kv_heads", "head_dim", "block_size", "k_format", "v_format", "layout",
    "max_seq_len", "on_nonfinite", "open_blocks",
)  # fmt: skip
_KINDS: tuple[Literal["k"], Literal["v"]] = ("k", "v")


def _kind(kind: Any) -> str:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidArgumentError(f"kind must be 'k' or 'v', got {shown(kind)}")
    return kind


def _open_blocks(chosen: Any, formats: tuple[KVFormat, KVFormat]) -> KVFormat | None:
    """The format of open blocks: as chosen, or as the formats of K and V need it."""
    if chosen is None:
        needed = [row.default_open_format for row in formats]
        return next((row for row in needed if row is not None), None)
    opened = get_format(chosen)
    if opened.is_quantized:
        raise FormatError("float16, bfloat16 or float32", opened.name, "open_blocks")
    if not any(row.is_quantized for row in formats):
        raise InvalidArgumentError(
            f"open_blocks={opened.name!r} is for quantised formats, and neither K nor V is "
            "quantised; pass open_blocks=None"
        )
    return opened


def _size(value: Any, name: str) -> int:
    return as_count(value, name, least=1, most=_FIELD_LIMIT)
