"""Everything we use of upstream is under contract, and what is installed keeps every contract. Reads source only."""

import ast
import importlib.util
from pathlib import Path

import pytest
import upstream_use as use
from omegaconf import OmegaConf

from ci.upstream import lock
from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.judge import place
from verl_fuse.host.start.compat.seams import PACKAGES, host_seams, judge_all, plugin_seams
from verl_fuse.host.start.compat.signature import read_signature
from verl_fuse.host.start.compat.source import NotFound, SourceTree
from verl_fuse.host.start.compat.start import require_contracts
from verl_fuse.host.upstream.versions import installed
from verl_fuse.spec.contract import Attribute, Class, Code, ConfigGroup, ConfigKey, Decorator, Function, label
from verl_fuse_cpu.plugin import CpuPlugin
from verl_fuse_cpu.refusals import CHECKS
from verl_fuse_interstage.plugin import InterstagePlugin
from verl_fuse_pipeline.plugin import PipelinePlugin
from verl_fuse_update.refusals import torch_without_streams

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="verl, TransferQueue or vLLM is not installed",
)

REPO = Path(__file__).resolve().parents[2]
SOURCES = use.sources(
    *(
        REPO / folder
        for folder in (
            "verl_fuse/host",
            "verl_fuse/cli",
            "verl_fuse/runtime",
            "plugins/verl_fuse_cpu",
            "plugins/verl_fuse_elastic",
            "plugins/verl_fuse_interstage",
            "plugins/verl_fuse_pipeline",
            "plugins/verl_fuse_placement",
            "plugins/verl_fuse_realloc",
            "plugins/verl_fuse_speculation",
            "plugins/verl_fuse_update",
            "patches/verl_fuse_patches",
        )
    )
)
BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
BALANCER = "verl.workers.rollout.router:GlobalRequestLoadBalancer"
MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
SERVERS = "verl.workers.rollout.llm_server:LLMServerManager"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
REPLICA = "verl.workers.rollout.replica:RolloutReplica"
VLLM_REPLICA = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica"
OUTPUT = "verl.workers.rollout.replica:TokenOutput"
META = "transfer_queue:KVBatchMeta"
TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
# What the names of a module hold where an annotation does not say so: upstream's class.
HOLDS = {
    "rollout/discards.py": {"self._buffer": BUFFER, "b": BUFFER},
    "rollout/watch.py": {"buffer": BUFFER, "self._buffer": BUFFER, "b": BUFFER},
    "upstream/watchdog.py": {
        "manager": MANAGER,
        "manager.actor_wg": "verl.single_controller.ray.base:RayWorkerGroup",
        "replica": REPLICA,
        "actor": SERVER,
    },
    "record/journal.py": {"batch": META},
    "upstream/vllm.py": {"server": SERVER},
    "upstream/dispatch.py": {"worker_group": "verl.single_controller.base.worker_group:WorkerGroup"},
    "host/assembly.py": {"trainer": TRAINER},
    "slices/refresh.py": {"host": TRAINER, "host.llm_server_manager": SERVERS},
    "verl_fuse_placement/deferred.py": {"host": TRAINER},
    "standalone/sync.py": {"host": TRAINER, "manager": SERVERS},
    "standalone/launch.py": {
        "self._replica": REPLICA,
        "replica": REPLICA,
        "pool": "verl.single_controller.ray.base:RayResourcePool",
        "workers": "verl.single_controller.ray.base:RayWorkerGroup",
    },
    "weights/exports.py": {"engine": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"},
    "standalone/weights.py": {
        "replica": REPLICA,
        "worker": "verl.checkpoint_engine.base:CheckpointEngineWorker",
    },
    "slices/groups.py": {"batch": META},
    "slices/worker.py": {"model": "verl.workers.engine_workers:TrainingWorker"},
    "slices/sharded.py": {
        "handle": "torch.distributed.fsdp._flat_param:FlatParamHandle",
        "handle.flat_param": "torch.distributed.fsdp._flat_param:FlatParameter",
        "shard": "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
        "state": "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        "group": "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        "part": "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule",
    },
    "slices/models.py": {
        "sharded": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        "model": "verl.workers.engine_workers:TrainingWorker",
        "worker": "verl.workers.engine_workers:ActorRolloutRefWorker",
        "critic": "verl.workers.config:TrainingWorkerConfig",
        "engine": "verl.workers.config:FSDPEngineConfig",
    },
    "weights/memory.py": {
        "engine": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        "engine.model_config": "verl.workers.config:HFModelConfig",
    },
    "weights/computed.py": {"engine_config": "verl.workers.config:FSDPEngineConfig"},
    "weights/buckets.py": {"engine": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"},
    "sync/trained.py": {
        "engine": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        "engine.model_config": "verl.workers.config:HFModelConfig",
    },
    "sync/megatron.py": {
        "engine": MEGATRON,
        "model": "megatron.core.models.gpt.gpt_model:GPTModel",
        "groups": "megatron.core.process_groups_config:ProcessGroupCollection",
        "config": "megatron.core.transformer.transformer_config:TransformerConfig",
    },
    "sync/hybrid.py": {
        "worker": "verl.workers.engine_workers:ActorRolloutRefWorker",
        "worker.actor": "verl.workers.engine_workers:TrainingWorker",
        "engine": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        "base": "verl.workers.engine_workers:ActorRolloutRefWorker",
    },
    "inference/samples.py": {"batch": META, "part": META, "done": META},
    "inference/completeness.py": {"batch": META},
    "upstream/rows.py": {"batch": META},
    "rollout/client.py": {"output": OUTPUT},
    "rollout/routing.py": {
        "manager": SERVERS,
        "replica": REPLICA,
    },
    "rollout/prompts.py": {"worker": "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ"},
    "rollout/resume.py": {"part": OUTPUT, "first": OUTPUT, "last": OUTPUT},
    "rollout/replica.py": {"self.handle": VLLM_REPLICA},
    "rollout/roster.py": {
        "manager": SERVERS,
        "self._manager": SERVERS,
        "self._manager.global_load_balancer": BALANCER,
        "self._checkpoints": MANAGER,
        "handle": VLLM_REPLICA,
        "next(iter(self._replicas.values())).handle": VLLM_REPLICA,
    },
    "rollout/replicas.py": {
        "self._manager.global_load_balancer": BALANCER,
        "self._checkpoints": MANAGER,
        "replica.handle": VLLM_REPLICA,
    },
    "rollout/hangs.py": {"self._replicas[rank].handle": VLLM_REPLICA},
    "inference/stages.py": {
        "engine": "verl.workers.config:EngineConfig",
        "omega_conf_to_dataclass(config.critic)": "verl.workers.config:CriticConfig",
        "data": "verl.protocol:DataProto",
    },
    "megatron/engine.py": {"engine_config": "verl.workers.config:McoreEngineConfig"},
    "megatron/fusion.py": {"engine": MEGATRON, "engine.engine_config": "verl.workers.config:McoreEngineConfig"},
    "megatron/messages.py": {
        "engine_config": "verl.workers.config:McoreEngineConfig",
        "model_config": "megatron.core.transformer.transformer_config:TransformerConfig",
    },
    "megatron/stage.py": {"self._config": "megatron.core.transformer.transformer_config:TransformerConfig"},
    "verl_fuse_pipeline/fused.py": {
        "batch": META,
        "trainer": TRAINER,
        "critic": "verl.single_controller.ray.base:RayWorkerGroup",
    },
    "host/worker.py": {"self": "verl.workers.engine_workers:ActorRolloutRefWorker"},
}
# Attributes of the trainer of mode `fuse` that verl's has not.
OURS = ("client_options", "director", "inference", "journal", "lane", "replicas", "run_stage", "settings")
# Attributes of those names that are not the class's own.
OTHERS = {
    "upstream/watchdog.py": {("actor", "__ray_call__")},
    "upstream/vllm.py": {("server", "__ray_call__")},
    "upstream/dispatch.py": {("worker_group", "_query_dispatch_info")},
    "rollout/routing.py": {("worker", "__ray_call__")},
    "host/assembly.py": {("trainer", name) for name in ("call", "journal", "lane", "settings")},
    **{file: {("host", name) for name in OURS} for file, holds in HOLDS.items() if "host" in holds},
    "standalone/weights.py": {("worker", "__ray_call__")},
    "megatron/fusion.py": {("engine", "view")},
    "verl_fuse_pipeline/fused.py": {("critic", "fused_update")},
    "sync/hybrid.py": {
        ("worker", "_verl_fuse_stream"),
        ("worker", "__dict__"),
        ("base", "__name__"),
        ("base", "__doc__"),
    },
}


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree.installed(*PACKAGES)


@pytest.fixture(scope="module")
def contracts() -> list:
    return [seam.contract for seam in (*host_seams(), *plugin_seams(plugins.load(), None))]


@pytest.fixture(scope="module")
def covered(tree: SourceTree, contracts) -> dict[ast.stmt, list]:
    """Definition -> the contracts about it or about a member of it."""
    found: dict[ast.stmt, list] = {}
    for contract in contracts:
        if isinstance(contract, Function | Class | Attribute | Decorator | Code):
            target = place(contract, tree) if isinstance(contract, Code) else contract.target
            module, _, names = target.partition(":")
            for name in names.split(","):
                for target in {f"{module}:{name}", f"{module}:{name.split('.')[0]}"}:
                    found.setdefault(tree.find(target).node, []).append(contract)
    return found


def test_what_is_installed_keeps_every_contract(tree: SourceTree):
    if installed("verl") != "0.9.1":
        pytest.skip("the contracts were read at verl 0.9.1")
    verdicts = judge_all([*host_seams(), *plugin_seams(plugins.load(), None)], tree)
    assert {label(v.seam.contract): [p.text for p in v.problems] for v in verdicts if v.problems} == {}
    assert len(verdicts) > 200
    assert not any(verdict.absent for verdict in verdicts)


def test_the_lock_files_are_what_the_command_writes(capsys: pytest.CaptureFixture[str]):
    """An older torch declares less than the locks hold: they are written on the newest stack."""
    if installed("verl") != "0.9.1" or torch_without_streams():
        pytest.skip("the lock files are written on another stack")
    assert (lock.main(["--check"]), capsys.readouterr().out) == (0, "")


def test_no_contract_is_declared_twice():
    """Two plugins may rest on the same thing: each says so only where it is used."""
    host, owners = host_seams(), {}
    for seam in plugin_seams(plugins.load(), None):
        owners.setdefault(seam.owner, []).append(seam)
    for seams in (host, *([*host, *own] for own in owners.values())):
        declared = [repr(seam.contract) for seam in seams]
        assert sorted(set(declared)) == sorted(declared)


@pytest.mark.parametrize("file", SOURCES)
def test_what_a_module_imports_is_under_contract(file: str, tree: SourceTree, covered):
    missing = [target for target in use.uses(SOURCES[file]) if tree.find(target).node not in covered]
    assert missing == []


@pytest.mark.parametrize("file", [file for file in SOURCES if any(use.private_torch(SOURCES[file]))])
def test_what_is_private_in_torch_is_under_contract(file: str, tree: SourceTree, covered):
    missing = [target for target in use.private_torch(SOURCES[file]) if tree.find(target).node not in covered]
    assert missing == []


def test_a_torch_whose_fsdp2_keeps_its_parts_elsewhere_is_refused_at_start(tree, tmp_path, monkeypatch):
    module = "torch.distributed.fsdp._fully_shard._fsdp_state"
    changed = tmp_path / "changed.py"
    changed.write_text(
        tree.path(module)
        .read_text()
        .replace("def _fsdp_param_group", "def _parts")
        .replace("self._fsdp_param_group", "self._parts")
    )
    path = SourceTree.path
    monkeypatch.setattr(SourceTree, "path", lambda self, name: changed if name == module else path(self, name))
    slices = {"enabled": True, "layout": "slices"}
    actor = {"rollout": {"name": "vllm"}, "actor": {"strategy": "fsdp2"}}
    config = {"actor_rollout_ref": actor, "fuse": {"interstage": slices}}
    with pytest.raises(FuseError, match=f"{module}:FSDPState has no _fsdp_param_group"):
        require_contracts(plugins.load(), OmegaConf.create(config))
    slices["layout"] = "shared"
    require_contracts(plugins.load(), OmegaConf.create(config))


def test_private_names_of_torch_are_found():
    module = ast.parse(
        "import torch, torch.utils.data\n"
        "import torch.distributed as dist\n"
        "from torch.distributed import _composable_state, fsdp\n"
        "from torch.utils._pytree import tree_map as mapped\n"
        "dist.distributed_c10d._get_default_store(); dist.all_reduce(torch._C); _composable_state.mapping; "
        "fsdp.fully_shard.__doc__"
    )
    assert sorted(use.private_torch(module)) == [
        "torch.distributed._composable_state:mapping",
        "torch.distributed.distributed_c10d:_get_default_store",
        "torch.utils._pytree:tree_map",
        "torch:_C",
    ]


@pytest.mark.parametrize("file", [file for file in SOURCES if any(use.subclasses(SOURCES[file]))])
def test_what_a_subclass_overrides_is_under_contract_with_its_body(file: str, tree: SourceTree, covered):
    for cls, base in use.subclasses(SOURCES[file]):
        found = list(use.overrides(cls, base, tree))
        assert found
        for override in found:
            of_it = covered.get(tree.find(override.target).node, [])
            functions = [contract for contract in of_it if isinstance(contract, Function)]
            if functions:
                assert all(contract.body and contract.closed is not override.open for contract in functions), (
                    override.target
                )
            else:
                # A property in place of an instance attribute.
                assert any(isinstance(contract, Attribute) for contract in of_it), override.target


@pytest.mark.parametrize("file", [file for file in SOURCES if any(use.subclasses(SOURCES[file]))])
def test_what_a_subclass_inherits_is_under_contract(file: str, tree: SourceTree, covered):
    for cls, base in use.subclasses(SOURCES[file]):
        missing = [target for target in use.inherited(cls, base) if tree.find(target).node not in covered]
        assert missing == []


@pytest.mark.parametrize("file", HOLDS)
def test_what_is_taken_of_upstream_objects_is_under_contract(file: str, tree: SourceTree, covered):
    taken = {(owner, name) for owner, name in use.attributes(SOURCES[file]) if owner in HOLDS[file]} - OTHERS.get(
        file, set()
    )
    assert taken
    missing = []
    for owner, name in sorted(taken):
        try:
            if tree.find(f"{HOLDS[file][owner]}.{name}").node not in covered:
                missing.append((owner, name))
        except NotFound:
            missing.append((owner, name))
    assert missing == []


def test_wrapped_worker_methods_are_under_contract_with_their_dispatch(contracts):
    worker = importlib.import_module("verl_fuse.host.worker")
    classes = {"actor": "ActorRolloutRefWorker", "critic": "TrainingWorker"}
    for role, methods in worker.RECORDED_METHODS.items():
        for method in methods:
            target = f"verl.workers.engine_workers:{classes[role]}.{method}"
            kinds = {type(contract) for contract in contracts if getattr(contract, "target", None) == target}
            assert kinds == {Function, Decorator}, target


@pytest.mark.parametrize("file", SOURCES)
def test_modules_named_in_strings_are_under_contract(file: str, contracts):
    about = " ".join(map(label, contracts))
    entry_points = "_entry_points(group='verl.plugins')"
    assert any(isinstance(contract, Attribute) and contract.value == entry_points for contract in contracts)
    named = set(use.module_strings(SOURCES[file])) - {*PACKAGES, "verl.plugins", "verl.trainer.config"}
    assert [text for text in named if f"{text}:" not in about and f"{text}." not in about] == []


def keys_under_contract(contracts) -> dict[str, ConfigKey]:
    """Absolute configuration keys: the key of each file behind the place where verl's defaults lists put its folder."""
    places: dict[str, set[str]] = {"": {""}}
    # The root's list first: those of its parts build on it.
    for group in sorted((c for c in contracts if isinstance(c, ConfigGroup)), key=lambda group: group.file.count("/")):
        folder, _, place = group.entry.split(":")[0].removeprefix("../").partition("@")
        outer = places[folder_of(group.file)]
        places.setdefault(folder, set()).update(f"{before}{place}." for before in outer)
    return {
        place + contract.key: contract
        for contract in contracts
        if isinstance(contract, ConfigKey)
        for place in places[folder_of(contract.file)]
    }


def folder_of(file: str) -> str:
    return file.removeprefix("verl/trainer/config/").rpartition("/")[0]


def not_covered(keys, contracts) -> list[str]:
    ours = keys_under_contract(contracts)
    below = [f"{known}." for known, contract in ours.items() if contract.default in (dict, object)]
    return sorted(
        key
        for key in keys
        if not any(f"{known}.".startswith(f"{key}.") for known in ours) and not key.startswith(tuple(below))
    )


# Folders whose modules read verl's configuration under the name `config`.
READ_VERL = (
    *("host/", "cli/", "critic/", "lean/", "slices/", "standalone/", "stream/"),
    *("verl_fuse_placement/", "verl_fuse_update/"),
)


@pytest.mark.parametrize("file", [file for file in SOURCES if file.startswith(READ_VERL)])
def test_configuration_keys_read_by_modules_that_know_verl_are_under_contract(file: str, contracts):
    keys = {key for key in use.config_keys(SOURCES[file]) if not key.startswith("fuse")} - {"get"}
    assert not_covered(keys, contracts) == []


def test_configuration_keys_read_by_plugins_are_under_contract(tree: SourceTree, contracts, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    composed = OmegaConf.load(tree.roots["verl"] / "trainer/config/_generated_ppo_trainer.yaml")
    asked: set[str] = set()
    select = OmegaConf.select

    def recording(config, key: str, **options):
        asked.add(key)
        return select(config, key, **options)

    monkeypatch.setattr(OmegaConf, "select", recording)
    for change in ({}, {"actor_rollout_ref": {"hybrid_engine": False, "actor": {"use_kl_loss": True}}}):
        block = {"enabled": True, "layout": "slices", "migration_threshold": 4}
        config = OmegaConf.merge(composed, change, {"fuse": {"interstage": block, "pipeline": {"enabled": True}}})
        assert CpuPlugin().fuse_validate(config=config)
        InterstagePlugin().fuse_validate(config=config)
        assert PipelinePlugin().fuse_validate(config=config)
    # Some keys are in no YAML file, only fields of verl's dataclasses.
    fields = {
        c.target.rpartition(".")[2]
        for c in contracts
        if isinstance(c, Attribute) and c.target.startswith("verl.workers.config:")
    }
    keys = {key for key in asked if not key.startswith("fuse.") and not fields & set(key.split("."))}
    assert {"critic.strategy", "actor_rollout_ref.ref.strategy", "actor_rollout_ref.rollout.free_cache_engine"} <= keys
    assert not_covered(keys, contracts) == []
    assert len(CHECKS) == 10


def test_signatures_of_contracts_can_be_read(contracts):
    for contract in contracts:
        if isinstance(contract, Function):
            read_signature(contract.signature)


def test_the_cpu_plugin_rests_on_nothing_where_it_is_not_active(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert CpuPlugin().fuse_contracts(config={}) == ()
    assert {contract.patch for contract in CpuPlugin().fuse_contracts(config=None) if isinstance(contract, Code)} >= {
        "gloo_backend"
    }


def test_slices_alone_rest_on_what_fsdp_gathers_from_or_how_megatron_cuts():
    plugin = InterstagePlugin()

    def asked(**of_run) -> set:
        return set(plugin.fuse_contracts(config=OmegaConf.create(of_run)))

    slices = {"interstage": {"layout": "slices"}}
    fsdp = asked(fuse=slices) - asked()
    megatron = asked(fuse=slices, actor_rollout_ref={"actor": {"strategy": "megatron"}}) - asked()
    assert {contract.target.startswith("torch.distributed.fsdp.") for contract in fsdp} == {True}
    targets = {getattr(contract, "target", "") for contract in megatron}
    assert "megatron.core.transformer.transformer_layer:TransformerLayer.layer_number" in targets
    assert not any("torch.distributed.fsdp." in target for target in targets)
    assert set(plugin.fuse_contracts(config=None)) == asked() | fsdp | megatron
