"""A KV connector for vLLM on a CPU: full blocks of every request are kept as files, by tag and by the tokens up to
their end, and any engine on this host may load them.

The tag comes with a request (`kv_transfer_params`: {"tag": str}). For test runs: $KV_STORE is the folder, nothing is
ever removed from it, and requests whose tag ends with $KV_STORE_WITHOUT, or that have none, have no part in it.
"""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import held_engines
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


@dataclass
class Blocks(KVConnectorMetadata):
    """The blocks that the workers are to copy in this step: (file, block of the paged cache)."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


class KVStore(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._folder, self._without = Path(os.environ["KV_STORE"]), os.environ["KV_STORE_WITHOUT"]
        # The scheduler's: requests that take part, the blocks each has, and what is to be loaded.
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._load: list[tuple[str, int]] = []
        # Tokens of a request that the engine has in its own cache.
        self._cached: dict[str, int] = {}
        # The worker's: what this step saves, by file and layer.
        self._saved: dict[str, dict[str, torch.Tensor]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("tag", self._without).endswith(self._without):
            return 0, False
        self._requests[request.request_id] = request
        self._cached[request.request_id] = num_computed_tokens
        # The last token is computed in any case: its output is what comes next.
        there = 0
        while (there + 1) * self._size < request.num_tokens and self._file(request, there).exists():
            there += 1
        return max(0, there * self._size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        cached = self._cached.pop(request.request_id, 0)
        if num_external_tokens:
            first = cached // self._size
            ids = blocks.get_block_ids()[0]
            for block in range(first, first + num_external_tokens // self._size):
                self._load.append((str(self._file(request, block)), ids[block]))

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        meta = Blocks(load=self._load)
        self._load = []
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._requests:
                self._blocks[new.req_id] = list(new.block_ids[0])
        running = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        ):
            if name in self._requests:
                self._blocks[name] += blocks[0] if blocks else []
                request = self._requests[name]
                meta.save += [
                    (str(file), self._blocks[name][block])
                    for block in range(min(computed, request.num_tokens) // self._size)
                    if not (file := self._file(request, block)).exists()
                ]
        held_engines.hold(max(running.num_computed_tokens, default=0))
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
            self._blocks.pop(name, None)
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for file, block in self._get_connector_metadata().load:
            for name, content in torch.load(file).items():
                forward_context.no_compile_layers[name].kv_cache[block] = content

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        for file, block in self._get_connector_metadata().save:
            self._saved.setdefault(file, {})[layer_name] = kv_layer[block].clone()

    def wait_for_save(self) -> None:
        for file, content in self._saved.items():
            part = f"{file}.{os.getpid()}"
            torch.save(content, part)
            os.replace(part, file)
        self._saved.clear()

    def _file(self, request: Any, block: int) -> Path:
        """Where the KV of a block is, which depends on all tokens up to its end."""
        tokens = list(request.all_token_ids[: (block + 1) * self._size])
        text = f"{request.kv_transfer_params['tag']} {tokens}"
        return self._folder / hashlib.sha256(text.encode()).hexdigest()
