"""Computes seconds from first principles: a roofline per block, ring collectives, pipeline formulas, and floors of the
software.

Invariants (tests/unit/cost/test_analytic.py):
- more tokens, or longer ones, never take less time; a faster device, link or memory never more;
- the stages of a pipeline sum to at least the time of the model without pipelining, up to the transfers between them.
Pipeline formulas: ReaL (arXiv 2406.14088), with stages that need not be alike.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from verl_fuse.cost import shard
from verl_fuse.cost.calibration import GRAPHS, Efficiency, EngineFloors, efficiency_of
from verl_fuse.cost.collectives import DeviceGroup, Network
from verl_fuse.cost.drafter import added_seconds
from verl_fuse.cost.memory import MemoryRequest, memory
from verl_fuse.cost.model import Batch, Memory, Numbers, Placement
from verl_fuse.cost.transfer import transfer_seconds
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.layout import Layout, stage_layers
from verl_fuse.spec.model import Model
from verl_fuse.spec.workload import CallKind

# Products in the backward per product in the forward: gradients of inputs and of weights; flash attention
# also recomputes the scores.
BACKWARD_MATMUL = 2.0
BACKWARD_ATTENTION = 2.5
BACKWARD_ELEMENTWISE = 2.0


@dataclass(frozen=True)
class AnalyticCost:
    """The seconds and bytes of model calls on a cluster, whose software is `engine`. A `batch` is a micro-batch or a
    whole call: each docstring names which."""

    cluster: Cluster
    engine: EngineFloors = GRAPHS

    @cached_property
    def efficiency(self) -> Efficiency:
        return efficiency_of(self.cluster.device)

    @cached_property
    def network(self) -> Network:
        return Network(self.cluster, self.efficiency, self.engine.collective, self.engine.remote)

    def stage_seconds(
        self, model: Model, layout: Layout, batch: Batch, *, backward: bool = False, recompute: bool = False
    ) -> tuple[float, ...]:
        """Return the seconds of each pipeline stage for one micro-batch of one data-parallel rank; `recompute` adds the
        forward to a backward."""
        block = self.block(model, layout, batch, backward=backward)
        if backward and recompute:
            block += self.block(model, layout, batch)
        head = self.head(model, layout, batch.head_tokens, backward=backward)
        embedding = self.embedding(model, layout, batch.tokens)
        hop = self._hop(model, layout, batch.tokens)
        floor = self.engine.backward if backward else self.engine.microbatch
        return tuple(
            floor + layers * block + (embedding if stage == 0 else hop) + (head if stage == layout.pp - 1 else 0.0)
            for stage, layers in enumerate(stage_layers(model.layers, layout.pp))
        )

    def infer(self, model: Model, layout: Layout, batch: Batch, microbatches: int, *, entropy: bool = False) -> float:
        """Return the seconds of a forward call over the whole `batch`, in `microbatches` per data-parallel rank, and of
        the `entropy` of each token's distribution."""
        stages = self.stage_seconds(model, layout, batch.split(layout.dp * microbatches))
        seconds = self._call(batch) + _pipeline(stages, microbatches)
        if not entropy:
            return seconds
        return seconds + shard.entropy_bytes(model, layout, batch.head_tokens / layout.dp) / self._bandwidth

    def train(
        self,
        model: Model,
        layout: Layout,
        batch: Batch,
        minibatches: int,
        microbatches: int,
        *,
        recompute: bool = True,
    ) -> float:
        """Return the seconds of one pass over the whole `batch`: `minibatches` updates of `microbatches` per
        data-parallel rank each."""
        part = batch.split(layout.dp * minibatches * microbatches)
        forward = self.stage_seconds(model, layout, part)
        backward = self.stage_seconds(model, layout, part, backward=True, recompute=recompute)
        both = tuple(map(sum, zip(forward, backward, strict=True)))
        return self._call(batch) + minibatches * (_pipeline(both, microbatches) + self.update(model, layout))

    def update(self, model: Model, layout: Layout) -> float:
        """Return the seconds of one gradient reduction over data-parallel ranks plus one optimizer step."""
        elements = max(stage_layers(model.layers, layout.pp)) * shard.block_parameters(model, layout)
        elements += model.embedding_parameters / layout.tp
        copies = layout.shards or layout.dp * layout.cp
        seconds = self.engine.update + self.optimizer(model, layout, elements / copies)
        if layout.shards:
            return seconds
        # Gradients in fp32 one way, weights in bf16 the other, among the ranks that hold the same weights and see other
        # tokens; with FSDP both happen in the passes.
        same = DeviceGroup(layout.dp * layout.cp, layout.tp)
        return seconds + self.network.gather(same, (4 + shard.BYTES) * elements)

    def reduce_copies(self, model: Model, shards: int, copies: int) -> float:
        """Return the seconds to add up the gradients, in fp32, of `copies` copies of a model, each cut over `shards`
        neighbouring devices."""
        return self.network.reduce(DeviceGroup(copies, shards), 4 * model.parameters / shards)

    def prefill(self, model: Model, layout: Layout, batch: Batch) -> float:
        """Return the seconds until one rollout replica has read the prompts in `batch`."""
        parts = max(1, min(layout.pp, int(batch.sequences)))
        part = batch.split(parts)
        block = self.block(model, layout, part)
        hop = self._hop(model, layout, part.tokens)
        stages = [layers * block + hop for layers in stage_layers(model.layers, layout.pp)]
        stages[-1] += self.head(model, layout, part.sequences)
        floor = self.engine.decode_step + self.engine.request * batch.sequences
        return floor + _pipeline(tuple(stages), parts)

    def decode(self, model: Model, layout: Layout, sequences: Numbers, context_tokens: Numbers) -> Numbers:
        """Return the seconds of ONE decode step of one replica with `sequences` running that hold `context_tokens` in
        all. Works on arrays."""
        # The pipeline is kept full: `pp` parts of the sequences follow each other.
        running, context = sequences / layout.pp, context_tokens / layout.pp
        layers = max(stage_layers(model.layers, layout.pp))
        reading = layers * self.decode_block(model, layout, running, context)
        hop = self._hop(model, layout, running) if layout.pp > 1 else 0.0
        device = layout.pp * (reading + self.decode_head(model, layout, running) + hop)
        host = self.engine.decode_step + self.engine.sequence * sequences
        return self.engine.handover + np.maximum(device, host) if self.engine.overlap else device + host

    def verify(
        self, model: Model, layout: Layout, sequences: Numbers, drafted: float, context_tokens: Numbers
    ) -> Numbers:
        """As `decode`, with a drafter that has `drafted` tokens for each sequence: each takes the device as one more
        sequence does, and the context is read once. The host works for each sequence, not for its drafts."""
        verified = sequences * (1 + drafted)
        if self.cluster.device.is_cpu:
            return self.decode(model, layout, verified, context_tokens)
        alone = replace(self, engine=replace(self.engine, overlap=False))
        seconds = alone.decode(model, layout, verified, context_tokens)
        seconds -= self.engine.sequence * (verified - sequences)
        return seconds + added_seconds(sequences, verified, sequential=True, blocks=model.layers)

    def transfer(self, model: Model, source: Placement, target: Placement) -> float:
        """Return the seconds to move the weights between placements; 0 when equal."""
        return transfer_seconds(model, source, target, self.cluster, self.efficiency.network, self.engine.collective)

    def sync(self, model: Model, source: Placement, target: Placement) -> float:
        """Return the seconds to hand new weights from training to the rollout: a transfer, and the seconds that the
        software needs even without a transfer."""
        size = shard.BYTES * model.parameters
        return self.engine.sync + self.engine.sync_byte * size + self.transfer(model, source, target)

    def migrate(self, model: Model, layout: Layout, tokens: float) -> float:
        """Return the seconds to read `tokens` of moved samples again on their new replica."""
        return self.prefill(model, layout, Batch.equal(1, tokens))

    def offload(self, size: float) -> float:
        """Return the seconds to move `size` bytes of one device to or from host memory."""
        return size / (self.cluster.host_bandwidth * self.efficiency.network)

    def memory(
        self,
        model: Model,
        kind: CallKind,
        layout: Layout,
        *,
        microbatch: Batch | None = None,
        microbatches: int = 1,
        kv_tokens: float = 0.0,
        recompute: bool = True,
        offload: bool = False,
    ) -> Memory:
        """Return the bytes on the fullest device; `microbatch` is of one data-parallel rank, `kv_tokens` of one
        replica.

        `offload`: weights, gradients and optimizer states wait in host memory between calls, so they count as active.
        """
        request = MemoryRequest(kind, microbatch or Batch(0, 0, 0), microbatches, kv_tokens, recompute, offload)
        return memory(model, layout, request, self.cluster.device)

    def kv_capacity(self, model: Model, layout: Layout, free: float) -> int:
        """Return the tokens of KV cache of one replica that fit into `free` bytes per device."""
        layers = max(stage_layers(model.layers, layout.pp))
        return max(0, int(free / (layers * shard.kv_bytes_per_token(model, layout))))

    def block(self, model: Model, layout: Layout, batch: Batch, *, backward: bool = False) -> float:
        """Return the seconds of one block for one micro-batch, collectives included."""
        products, attention, traffic = (
            (BACKWARD_MATMUL, BACKWARD_ATTENTION, BACKWARD_ELEMENTWISE) if backward else (1.0, 1.0, 1.0)
        )
        peak = self.cluster.device.flops
        weights = shard.block_weight_bytes(model, layout, batch.tokens / layout.cp) / self._bandwidth
        seconds = products * max(
            shard.block_flops(model, layout, batch.tokens) / (peak * self.efficiency.matmul), weights
        )
        seconds += attention * shard.attention_flops(model, layout, batch.squares) / (peak * self.efficiency.attention)
        traffic *= self.engine.traffic * (self.engine.sharded_traffic if layout.shards else 1.0)
        seconds += traffic * shard.elementwise_bytes(model, layout, batch.tokens) / self._bandwidth
        floor = max(self.engine.block, self.engine.sharded_block if layout.shards else 0.0)
        seconds = max(seconds, floor * (2.0 if backward else 1.0))
        seconds += self._block_collectives(model, layout, batch.tokens)
        return self._with_gathering(seconds, model, layout, backward)

    def decode_block(self, model: Model, layout: Layout, sequences: Numbers, context: Numbers) -> Numbers:
        """Return the seconds of one block for one new token of each sequence, collectives included."""
        peak = self.cluster.device.flops * self.efficiency.matmul
        weights = shard.block_weight_bytes(model, layout, sequences) / self._bandwidth
        seconds = np.maximum(shard.block_flops(model, layout, sequences) / peak, weights)
        seconds = seconds + context * shard.kv_bytes_per_token(model, layout) / self._bandwidth
        return np.maximum(seconds, self.engine.decode_block) + self._block_collectives(model, layout, sequences)

    def head(self, model: Model, layout: Layout, tokens: Numbers, *, backward: bool = False) -> Numbers:
        """Return the seconds of the output layer and of turning logits into log-probs or samples."""
        peak = self.cluster.device.flops * self.efficiency.matmul
        weights = shard.BYTES * model.head_width * model.hidden / layout.tp / self._bandwidth
        seconds = np.maximum(shard.head_flops(model, layout, tokens) / peak, weights)
        seconds = seconds + shard.logits_bytes(model, layout, tokens) / self._bandwidth
        return seconds * (BACKWARD_MATMUL if backward else 1.0)

    def decode_head(self, model: Model, layout: Layout, sequences: Numbers) -> Numbers:
        """Return the seconds of the output layer for one new token of each sequence, and of drawing the next token."""
        return self.head(model, layout, sequences)

    def optimizer(self, model: Model, layout: Layout, elements: float) -> float:
        """Return the seconds of an Adam step over so many elements of a model: gradient, master weight and two moments
        are read, the latter three are written, all in fp32."""
        return 7 * 4 * elements / self._bandwidth

    def embedding(self, model: Model, layout: Layout, tokens: Numbers) -> Numbers:
        """Return the seconds of looking tokens up in a vocabulary that is shared out over tensor ranks."""
        size = shard.BYTES * tokens * model.hidden / layout.cp
        return 2 * size / self._bandwidth + self.network.reduce(DeviceGroup(layout.tp, 1), size)

    def _call(self, batch: Batch) -> float:
        """Return the seconds that the driver adds to a call over the batch."""
        return self.engine.call + self.engine.token * batch.tokens + self.engine.row * batch.sequences

    @property
    def _bandwidth(self) -> float:
        return self.cluster.device.bandwidth * self.efficiency.bandwidth

    def _block_collectives(self, model: Model, layout: Layout, tokens: Numbers) -> Numbers:
        network, local = self.network, tokens / layout.cp
        # Experts that tensor ranks do not cut need no sum over tensor ranks.
        sums = 2 if layout.expert_tp == layout.tp else 1
        seconds = sums * network.reduce(DeviceGroup(layout.tp, 1), shard.BYTES * local * model.hidden)
        if layout.cp > 1:
            # Keys and values of the whole sequence pass every rank.
            size = shard.BYTES * tokens * 2 * model.kv_heads * model.head_dim / layout.tp
            seconds = seconds + network.gather(DeviceGroup(layout.cp, layout.tp), size)
        if layout.ep > 1:
            # Ranks that cut one expert between them each send all of its tokens.
            size = shard.BYTES * local * model.experts_per_token * model.hidden * layout.expert_tp / layout.tp
            seconds = seconds + 2 * network.exchange(DeviceGroup(layout.ep, layout.expert_tp), size)
        return seconds

    def _with_gathering(self, seconds: float, model: Model, layout: Layout, backward: bool) -> float:
        """Return the seconds of a block with FSDP's communication: beside the computation, the next block's weights are
        gathered from the shards, and the last block's gradients are scattered to the shards and summed over the copies
        of the model."""
        if not layout.shards:
            return seconds
        size, ranks = shard.BYTES * shard.block_parameters(model, layout), layout.dp * layout.cp
        gathered = self.network.gather(DeviceGroup(layout.shards, 1), size)
        if not backward:
            return max(seconds, gathered)
        copies = DeviceGroup(ranks // layout.shards, layout.shards)
        return max(seconds, 2 * gathered + self.network.reduce(copies, 2 * size / layout.shards))

    def _hop(self, model: Model, layout: Layout, tokens: Numbers) -> Numbers:
        """Return the seconds to send activations to the next stage; tensor ranks each send their part."""
        if layout.pp == 1:
            return 0.0
        size = shard.BYTES * tokens * model.hidden / (layout.cp * layout.tp)
        return self.network.send(layout.tp * layout.cp * layout.dp, size)


def _pipeline(stages: tuple[float, ...], microbatches: int) -> float:
    """Return the seconds of a pipeline: the first micro-batch passes every stage, then the slowest stage sets the
    pace."""
    return float(sum(stages) + (microbatches - 1) * max(stages))
