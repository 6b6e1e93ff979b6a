"""A paged KV cache for ``model.generate`` of Hugging Face transformers, 4.57 … 5.24.

::

    import pagedcache as pc
    from pagedcache.integrations.transformers import PagedCache, spec_for

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pagedcache")
    pool = pc.PagedKVCache(spec_for(model, kv_format="q8_0"), memory="2GiB")

    inputs = tokenizer(text, return_tensors="pt")
    with PagedCache(pool, inputs.input_ids, inputs.attention_mask, model=model) as past:
        output = model.generate(**inputs, past_key_values=past)

``attn_implementation="pagedcache"`` reads the pages; with every other one (``"sdpa"``, ``"eager"``,
…) the cache gathers keys and values for it, with the same results. Importing this module registers
the name. Needs torch and transformers: ``MissingPackageError`` says which is absent or too old.
"""

from __future__ import annotations

from pagedcache.integrations.requirements import require

require("torch", "2.4", "pagedcache.integrations.transformers")
require("transformers", "4.57", "pagedcache.integrations.transformers")

from pagedcache.integrations.transformers.attention import register  # noqa: E402
from pagedcache.integrations.transformers.cache import PagedCache  # noqa: E402
from pagedcache.integrations.transformers.geometry import spec_for  # noqa: E402

register()

__all__ = ["PagedCache", "register", "spec_for"]
