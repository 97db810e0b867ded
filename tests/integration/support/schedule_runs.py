"""Runs fault schedules through the trainer of mode `fuse`, verl's agent loop, replay buffer, load balancer and
padding, and TransferQueue.

Behind verl's replica interface counts an engine (counting_engine.py), and the models are functions of a row's
tokens, so every number in the batch that is trained on can be checked. The trainer is built without worker
groups; its steps are its own.
"""

import logging
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from counting_engine import CountingManager
from fault_schedules import (
    FATAL,
    LONG,
    PROMPTS,
    REPLICAS,
    SAMPLES_PER_PROMPT,
    SEQUENCE_SECONDS,
    STEP_SECONDS,
    Schedule,
)
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu

from ci.bench.support.untrained import STAGES, UntrainedFeatures, UntrainedTrainer
from verl_fuse.cli.composition import compose
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.errors import FuseError
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.samples import SampleInference, SliceLane
from verl_fuse.host.inference.stages import STAGE_FIELDS
from verl_fuse.host.record.accounting import prepare_accounts
from verl_fuse.host.record.spans import Recorder, start_collector
from verl_fuse.host.rollout import agent_errors
from verl_fuse.host.rollout.client import FuseLLMServerClient
from verl_fuse.host.rollout.director import Director
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.upstream.rows import read, rows
from verl_fuse.host.upstream.watchdog import with_deadline

# A step takes about a second; what takes this long hangs.
HANGS_AFTER = 60.0


@dataclass
class Outcome:
    """The outcome of a schedule. `faults`: what must not be, in words."""

    schedule: Schedule
    error: str | None = None
    seconds: float = 0.0
    trained: int = 0
    failed: int = 0
    moved: int = 0
    faults: list[str] = field(default_factory=list)
    # What was said of failed rollouts.
    said: list[str] = field(default_factory=list)


class Said(logging.Handler):
    """A handler that puts messages into `lines`."""

    def __init__(self, lines: list[str]):
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def compute(stage: str, batch: KVBatchMeta) -> None:
    """A model: ten times each response token, in every field of the stage."""
    tokens = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["responses"])["responses"]
    values = torch.nested.as_nested_tensor([row.float() * 10 for row in tokens.unbind()], layout=torch.jagged)
    fields = TensorDict(dict.fromkeys(STAGE_FIELDS[stage], values), batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)


class ScheduleTrainer(UntrainedTrainer):
    """FuseTrainer over counting replicas."""

    def __init__(self, config: DictConfig, runs: "ScheduleRuns", step: int):
        super().__init__(config, step, None, 2, runs.manager.get_replicas())
        self.llm_server_manager, self.agent_loop_manager = runs.manager, runs.agents
        self.lane = runs.lane
        self.inference = self._inference(runs)
        self.replicas = Replicas(
            runs.manager,
            self.checkpoint_manager,
            self.journal.recorder,
            self.settings.core.replica_timeout,
            64,
            LONG + 16,
        )
        hook = self.settings.manager.hook
        self.direct(Director(self.journal, PolicyGuard(hook), self.replicas, self.inference, self.parts))
        self.agent_errors = runs.agent_errors
        hook.fuse_setup(trainer=UntrainedFeatures(self))

    def _inference(self, runs: "ScheduleRuns") -> SampleInference:
        def infer(keys: Any, tags: Any, stages: Any) -> None:
            for stage in stages:
                compute(stage, rows(keys, tags, None))

        def call(stage: str) -> Any:
            def stock(batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
                compute(stage, batch)
                return batch

            return stock

        inference = SampleInference(
            self.lane,
            {stage: call(stage) for stage in STAGES},
            dp_size=2,
            multiples=dict.fromkeys(STAGES, 2),
            fields=STAGE_FIELDS,
            extra_info={"temperature": 1.0},
        )
        inference.use_slices([SliceLane(lane, infer, 1, 1) for lane in runs.slice_lanes])
        return inference

    def ask_for(self, schedule: Schedule) -> None:
        """Set the schedule of the next step's samples."""
        self._schedule = schedule

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        def column(values: Any) -> np.ndarray:
            filled = np.empty(PROMPTS, object)
            filled[:] = values
            return filled

        batch = tu.get_tensordict(
            {
                "uid": column([uuid.uuid4().hex for _ in range(PROMPTS)]),
                "raw_prompt": column([[{"role": "user", "content": f"gcd {n + 10} 30"}] for n in range(PROMPTS)]),
                "index": column(list(range(PROMPTS))),
                "lengths": torch.tensor(self._schedule.lengths),
            }
        )
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch

    def run(self) -> KVBatchMeta:
        """One step up to its advantages: the batch it would train on."""
        metrics: dict[str, Any] = {}
        self.on_step_begin()
        self.prepare_step()
        self.on_sample_begin()
        batch, _ = self.replay_buffer.sample(global_steps=self.global_steps, partition_id="train", batch_size=PROMPTS)
        batch.extra_info["temperature"] = 1.0
        self.on_sample_end()
        batch = self._balance_batch(batch, metrics)
        for stage in (self._compute_old_log_prob, self._compute_ref_log_prob, self._compute_values):
            batch = stage(batch, metrics)
        return batch


class ScheduleRuns:
    """Replicas, agent loop and queue, once for many schedules. `folder` must hold a model's
    tokenizer and configuration."""

    def __init__(self, folder: Path):
        agents = folder / "agents.yaml"
        agents.write_text("- name: scripted\n  _target_: scripted_agent.ScriptedAgentLoop\n")
        self._config = compose(
            find_recipe("ppo-cpu"),
            [
                f"actor_rollout_ref.model.path={folder / 'model'}",
                f"critic.model.path={folder / 'model'}",
                f"data.train_batch_size={PROMPTS}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
                f"critic.ppo_mini_batch_size={PROMPTS // 2}",
                f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
                "actor_rollout_ref.rollout.agent.default_agent_loop=scripted",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
                f"fuse.run_dir={folder / 'run'}",
                "fuse.disabled_plugins=[observe]",
                "~fuse.observe",
                "fuse.poll_interval=0.01",
                # The first step waits for processes to import what they need.
                "fuse.stall_timeout=25",
                "fuse.replica_timeout=3",
                "fuse.interstage.enabled=true",
                "fuse.interstage.layout=slices",
                "fuse.interstage.micro_group=4",
            ],
        )
        OmegaConf.resolve(self._config)
        prepare_accounts(folder / "run")
        self._collector = start_collector()
        self.manager = CountingManager(REPLICAS)
        addresses = {address: rank for rank, address in enumerate(self.manager.get_addresses())}
        client = FuseLLMServerClient(self._config, self.manager.global_load_balancer, replicas=addresses)
        self.agents = AgentLoopManagerTQ.create(self._config, client)
        self.agent_errors = agent_errors.AgentErrors(self.agents, HANGS_AFTER)
        self._step = 1
        self.lane, self.slice_lanes = None, []
        self._begin_anew()

    def close(self) -> None:
        """End the lanes' threads."""
        for lane in (self.lane, *self.slice_lanes):
            if lane is not None:
                lane.close()

    def _lanes(self) -> None:
        self.close()
        recorder = Recorder(lambda span: None)
        self.lane = Lane("train", recorder, 20.0)
        self.slice_lanes = [Lane(f"slice {rank}", recorder, 20.0) for rank in range(REPLICAS)]

    def run(self, schedule: Schedule) -> Outcome:
        """Run one step under the schedule's faults, and return its outcome. Replicas and weights are those
        the step before left, unless that one ended the run."""
        config = self._config.copy()
        config.fuse.interstage.migration_threshold = schedule.threshold
        outcome = Outcome(schedule)
        trainer = ScheduleTrainer(config, self, self._step)
        trainer.ask_for(schedule)
        begun = time.monotonic()
        over = threading.Event()
        breaking = threading.Thread(target=self._break, args=(schedule, begun, over), daemon=True)
        breaking.start()
        listening = Said(outcome.said)
        agent_errors.logger.addHandler(listening)
        try:
            batch = with_deadline("the step", HANGS_AFTER, trainer.run, lambda: ["see above"])
            self._check(outcome, trainer, batch)
            over.set()
            breaking.join()
            trainer.on_step_end()
        except (FuseError, RuntimeError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            trainer.agent_errors.warn("the last rollout")
        agent_errors.logger.removeHandler(listening)
        over.set()
        breaking.join()
        outcome.seconds = time.monotonic() - begun
        spans = [span for span, _ in ray.get(self._collector.drain.remote())]
        outcome.moved = sum(span.args.get("stop_reason") == "aborted" for span in spans)
        self._judge(outcome, trainer)
        self._step += 1
        if outcome.error:
            self._begin_anew()
        else:
            tq.kv_clear(keys=list(self._tags()), partition_id="train")
            self._repair()
        return outcome

    def _break(self, schedule: Schedule, begun: float, over: threading.Event) -> None:
        for fault in schedule.faults:
            if over.wait(max(0.0, begun + fault.at - time.monotonic())):
                return
            action = getattr(self.manager.get_replicas()[fault.replica].server_handle, fault.action)
            action.remote(*([8.0] if fault.action == "slow_down" else []))

    def _check(self, outcome: Outcome, trainer: ScheduleTrainer, batch: KVBatchMeta) -> None:
        """Every sample asked for is in the batch once, whole, under the step's weights, with all its numbers."""
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        real = [key for key in batch.keys if not tags[key].get("is_padding")]
        fields = [name for stage in STAGES for name in STAGE_FIELDS[stage]]
        data = read(
            rows(real, tags, None), ["index", "session_id", "prompts", "responses", "rollout_log_probs", *fields]
        )
        # Once all others are freed, nobody contradicts a replica that answers garbage: verl hands it on, too.
        routed = {view.rank for view in trainer.replicas.views() if view.routed}
        garbage = {fault.replica for fault in outcome.schedule.faults if fault.action == "answer_garbage"}
        unheard = routed <= garbage
        seen: Counter[tuple[int, int]] = Counter()
        for row, key in enumerate(real):
            sample = (int(data["index"][row]), int(data["session_id"][row]))
            seen[sample] += 1
            wanted = outcome.schedule.asked.get(sample, 0)
            tokens, last = data["responses"][row].tolist(), int(data["prompts"][row][-1])
            if tokens != list(range(last + 1, last + 1 + wanted)):
                outcome.faults.append(f"{sample}: {len(tokens)} tokens, not the {wanted} that were asked for")
            log_probs = data["rollout_log_probs"][row]
            accepted = unheard and bool(log_probs.isnan().any())
            if not accepted and not torch.allclose(log_probs, torch.tensor(tokens) / -1000):
                outcome.faults.append(f"{sample}: log-probs of other tokens")
            for name in fields:
                if data[name][row].tolist() != [10.0 * token for token in tokens]:
                    outcome.faults.append(f"{sample}: {name} of other tokens")
            if {tags[key][f"{end}_global_steps"] for end in ("min", "max")} != {self._step - 1}:
                outcome.faults.append(f"{sample}: wrong weights")
        outcome.trained = len(real)
        outcome.failed = trainer.journal.step.account.missing
        outcome.faults += [f"{sample}: duplicated" for sample, count in seen.items() if count > 1]
        if lost := set(outcome.schedule.asked) - set(seen):
            outcome.faults.append(f"{sorted(lost)}: lost")
        if outcome.failed != PROMPTS * SAMPLES_PER_PROMPT - len(seen):
            outcome.faults.append(f"{outcome.failed} samples are said to be missing")

    def _judge(self, outcome: Outcome, trainer: ScheduleTrainer) -> None:
        """Whether the step ended as its faults demand: dead replicas named, and nothing else wrong."""
        schedule, error = outcome.schedule, outcome.error or ""
        victims = {fault.replica for fault in schedule.faults}
        if outcome.seconds > HANGS_AFTER / 2 or "did not finish in" in error or "no progress" in error:
            outcome.faults.append(f"hung: {error}")
        if trainer.director.policy.fallbacks:
            outcome.faults.append("a policy failed")
        if schedule.kind == "empty batch" and not schedule.asked:
            expected = "no materializable trajectories" in error
        elif schedule.kind in ("kill", "two kills", "all kills", "exit"):
            # A fault that comes after the step's end is none.
            named = [f"replica {rank}" in error for rank in victims]
            expected = not error or (any(named) and "dead: " in error)
            expected = expected and (bool(error) or not any(self._gone(rank) for rank in victims))
            if "no materializable trajectories" in error:
                expected = not any(view.routed for view in trainer.replicas.views())
        elif schedule.kind in FATAL or schedule.kind == "mute":
            expected = not error or any(f"replica {rank}" in error for rank in victims)
        else:
            expected = not error
        if not expected:
            outcome.faults.append(f"ended with {outcome.error}")
        if schedule.kind == "empty batch":
            failed = PROMPTS * SAMPLES_PER_PROMPT - len(schedule.asked)
            lost = f"step {self._step}: {failed} samples are missing and are not trained on"
            why = f"agent loops failed: RuntimeError: this rollout was to fail (and {failed - 1} more)"
            if outcome.said != [f"{lost}; {why}" if schedule.asked else f"the last rollout: {why}"]:
                outcome.faults.append(f"of {failed} failed rollouts was said: {outcome.said}")

    def _gone(self, rank: int) -> bool:
        """Whether a replica's engine is dead."""
        try:
            server = self.manager.get_replicas()[rank].server_handle
            return ray.get(server.__ray_call__.remote(lambda server: server.engine.errored), timeout=10)
        except ray.exceptions.RayError:
            return True

    def _repair(self) -> None:
        """Faults of the step are over; its replicas go on."""
        ray.get([r.server_handle.repair.remote() for r in self.manager.get_replicas()])

    def _begin_anew(self) -> None:
        """The run has ended: start it again, with the weights of the step before."""
        self.manager.revive(STEP_SECONDS, SEQUENCE_SECONDS)
        deadline = time.monotonic() + HANGS_AFTER
        while any(tag.get("status") in ("pending", "running") for tag in self._tags().values()):
            if time.monotonic() > deadline:
                raise RuntimeError("requests of an ended run go on for ever")
            time.sleep(0.02)
        if self._tags():
            tq.kv_clear(keys=list(self._tags()), partition_id="train")
        self.manager.reroute()
        handles = [replica.server_handle for replica in self.manager.get_replicas()]
        ray.get([handle.set_global_steps.remote(self._step - 1) for handle in handles])
        self._lanes()

    @staticmethod
    def _tags() -> dict[str, dict]:
        return (tq.kv_list("train") or {}).get("train", {})
