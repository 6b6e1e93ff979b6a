"""vLLM's v1 bookkeeping, driven as its own scheduler drives it (written for 0.32).

Imported only when vLLM is installed; everything here is typed loosely because vLLM is no
dependency.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

NAME = "vllm"
_MAX_TOKENS = 1 << 20

init_none_hash(sha256)


class Manager:
    """A cache manager with one group of full-attention layers."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float16
        )
        group = KVCacheGroupSpec(["layer"], spec)
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        self.manager = KVCacheManager(
            config, _MAX_TOKENS, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._params = SamplingParams(max_tokens=_MAX_TOKENS)
        self._count = 0

    def request(self, tokens: list[int]) -> Any:
        """A new request; hashes its full blocks."""
        self._count += 1
        name = f"r{self._count}"
        return Request(name, tokens, self._params, None, block_hasher=self._hasher)

    def match(self, request: Any) -> tuple[Any, int]:
        """Its longest cached prefix: (blocks, tokens)."""
        blocks, hits, *_ = self.manager.get_computed_blocks(request)
        return blocks, hits

    def admit(self, request: Any, blocks: Any, hits: int) -> None:
        """Take references on the hits and blocks for the rest, and register the full ones."""
        taken = self.manager.allocate_slots(request, request.num_tokens - hits, hits, blocks)
        assert taken is not None, "vLLM has no room"
        request.num_computed_tokens = request.num_tokens

    def open(self, tokens: list[int]) -> Any:
        """All of the above: hash, match, admit."""
        request = self.request(tokens)
        self.admit(request, *self.match(request))
        return request

    def step(self, requests: list[Any], token: int) -> None:
        """One decode step: a new token and its slot for every request."""
        for request in requests:
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None, "vLLM has no room"
            request.num_computed_tokens += 1

    def free(self, request: Any) -> None:
        self.manager.free(request)


def pool(num_blocks: int, block_size: int) -> Any:
    """vLLM's block pool with prefix caching on."""
    return BlockPool(num_blocks, True, block_size)


def self_check() -> None:
    """Raise unless this vLLM has the API that is used here."""
    manager = Manager(64, 16)
    tokens = list(range(100))
    request = manager.open(tokens)
    manager.step([request], 1)
    manager.free(request)
    if manager.match(manager.request(tokens))[1] != 96:
        raise RuntimeError("this vLLM does not find a cached prefix")
    blocks = pool(16, 16)
    blocks.free_blocks(blocks.get_new_blocks(4))
