"""Which devices a cache can live on here."""

from __future__ import annotations


def device_problem(device: str) -> str | None:
    """``None`` when a cache can be made on ``device``, else the reason why it cannot."""
    import pagedcache

    try:
        spec = pagedcache.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=32)
        pagedcache.PagedKVCache(spec, 1, device=device).close()
    except Exception as error:
        # Any failure counts: a probe that raises would hide the reason it was asked for.
        reason = str(getattr(error, "reason", "")) or f"{type(error).__name__}: {error}"
        return f"not available: {reason}"
    return None
