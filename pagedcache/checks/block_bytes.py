"""Where a block's bytes lie, worked out by laying rows one after the other."""

from __future__ import annotations

import numpy as np

from .channels import BY_CHANNEL, block_parts
from .reference import PLANAR, Bytes, Floats, encode_rows

_ALIGN = 16


def _padded(parts: list[Bytes]) -> Bytes:
    data = np.concatenate([part.reshape(-1) for part in parts])
    return np.pad(data, (0, -data.size % _ALIGN))


def block_bytes(name: str, layout: str, tokens: Floats) -> Bytes:
    """Bytes of one full block of one layer's K or V.

    ``tokens``: float32 ``[block_size, num_kv_heads, head_dim]``. HND keeps a head's rows together,
    NHD a token's. Planar formats hold, per run of rows, all quants (padded to 16 bytes), then
    all scales (padded to 16 bytes); a run is one head in HND and the whole block in NHD. Where
    groups run along the tokens the scales of a run are those of its heads, one after the other.
    """
    if name in BY_CHANNEL:
        data, scales = block_parts(tokens)
        runs = [(data, scales)]
        if layout == "HND":
            runs = [(data[:, head], scales[head]) for head in range(tokens.shape[1])]
        return np.concatenate([_padded([_padded([data]), scales]) for data, scales in runs])
    rows = tokens if layout == "NHD" else tokens.transpose(1, 0, 2)
    stored = encode_rows(name, np.ascontiguousarray(rows))
    if name not in PLANAR:
        return stored.data.reshape(-1)
    num_runs = 1 if layout == "NHD" else rows.shape[0]
    data, scales = (part.reshape(num_runs, -1) for part in (stored.data, stored.scales))
    return np.concatenate([_padded([_padded([data[i]]), scales[i]]) for i in range(num_runs)])
