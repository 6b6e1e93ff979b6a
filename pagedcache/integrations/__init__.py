"""Ready-made ties to other libraries. Each module needs its library; importing this one does not.

``pagedcache.integrations.transformers``: ``PagedCache`` for ``model.generate`` of Hugging Face
transformers, and attention over the pages as ``attn_implementation="pagedcache"``.
"""

from __future__ import annotations
