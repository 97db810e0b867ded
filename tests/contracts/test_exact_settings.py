"""verl has every exact setting of the table, with the default that the table names, and the code named there reads it;
nothing reads what the table leaves out as unread."""

import ast
import importlib.util
from fnmatch import fnmatchcase

import pytest
import upstream_use as use
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.spec.composed import has_key
from verl_fuse.tune.candidates import leaves, not_tried
from verl_fuse.tune.outside import OUTSIDE, outside
from verl_fuse.tune.setting import Reader, Setting
from verl_fuse.tune.table import BY_KEY, TABLE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")

PACKAGES = ("verl", "megatron", "torch")
ENGINES = {"dp": {"fsdp", "fsdp2"}, "megatron": {"megatron"}}
# The trainer before V1 reads keys that V1 does not.
BEFORE_V1 = ("verl.trainer.ppo.ray_trainer", "verl.experimental.separation")
READERS = list(dict.fromkeys(reader for setting in TABLE for reader in setting.readers))
ADDED = {
    "critic.ppo_infer_max_token_len_per_gpu": ("verl.workers.config:CriticConfig.ppo_infer_max_token_len_per_gpu"),
    "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode": (
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.launch_server"
    ),
}
# How an engine comes by the block of its role, and by keys that verl copies.
LINKS = {
    "verl.workers.config.actor:FSDPActorConfig.__post_init__": (
        "self.engine = self.fsdp_config",
        "object.__setattr__(self.engine, 'strategy', self.strategy)",
        "self.fsdp_config.ulysses_sequence_parallel_size = self.ulysses_sequence_parallel_size",
    ),
    "verl.workers.config.critic:FSDPCriticConfig.__post_init__": (
        "self.engine = self.fsdp",
        "object.__setattr__(self.engine, 'strategy', self.strategy)",
    ),
    "verl.workers.config.actor:McoreActorConfig.__post_init__": ("self.engine = self.megatron",),
    "verl.workers.config.critic:McoreCriticConfig.__post_init__": ("self.engine = self.megatron",),
    "verl.workers.engine_workers:TrainingWorker.__init__": (
        "self.engine_config.use_remove_padding = self.model_config.get('use_remove_padding', False)",
        "self.engine_config.use_fused_kernels = self.model_config.get('use_fused_kernels', False)",
    ),
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model": (
        "assert self.config.actor.use_dynamic_bsz == self.config.rollout.log_prob_use_dynamic_bsz",
        "self.config.ref.use_dynamic_bsz = self.config.ref.pop('log_prob_use_dynamic_bsz', False)",
        "self.config.ref.ppo_max_token_len_per_gpu = self.config.ref.pop('log_prob_max_token_len_per_gpu', None)",
        "self.config.ref.pop('log_prob_micro_batch_size_per_gpu', None)",
    ),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup": (
        "critic_cfg.engine.infer_max_token_len_per_gpu = critic_cfg.ppo_infer_max_token_len_per_gpu",
        "critic_cfg.engine.max_token_len_per_gpu = critic_cfg.ppo_infer_max_token_len_per_gpu",
    ),
    # A reference on FSDP is on the host in any case.
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": (
        "cpu_offload = CPUOffload(offload_params=True)",
        "if self.engine_config.offload_policy or self.engine_config.forward_only:",
    ),
    # The first Megatron engine of a process divides the ranks of all.
    "verl.workers.engine.megatron.transformer_impl:MegatronEngine._init_device_mesh": ("if mpu.is_initialized():",),
    "verl.utils.seqlen_balancing:rearrange_micro_batches": ("assert max_token_len >= max_seq_len",),
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights": (
        "await self.server_handle.clear_kv_cache.remote()",
    ),
    "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter.update_weights": (
        "await self._engine.flush_cache()",
    ),
    # FSDP2 adds up gradients in the dtype of their reduction between two syncs.
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward": (
        "fsdp_param.to_accumulated_grad_if_needed()",
    ),
    "verl.workers.config:RolloutConfig.__post_init__": ("if self.pipeline_model_parallel_size > 1:",),
}


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree.installed(*PACKAGES)


@pytest.fixture(scope="module")
def composed() -> dict[str, DictConfig]:
    """verl's own configuration of each model engine."""
    found = {}
    for engine in ENGINES:
        with initialize_config_module("verl.trainer.config", version_base=None):
            found[engine] = compose("ppo_trainer", [f"model_engine={engine}"])
    return found


@pytest.fixture(scope="module")
def keys(composed) -> dict[str, list[str]]:
    """All keys of verl's configuration, by model engine."""
    return {engine: list(leaves(config)) for engine, config in composed.items()}


def of_engine(setting: Setting, engine: str) -> bool:
    return setting.role in ("rollout", "reward") or bool(ENGINES[engine] & set(setting.engines))


def reads(node: ast.AST) -> set[str]:
    """Expressions that the code reads: names, owner.name, and owner.name for `owner.get("name")` and the like."""
    found = {f"{owner}.{name}" for owner, name in use.attributes(node)}
    found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    for each in ast.walk(node):
        match each:
            case ast.Call(
                func=ast.Attribute(value=owner, attr="get" | "setdefault"), args=[ast.Constant(str(name)), *_]
            ):
                found.add(f"{ast.unparse(owner)}.{name}")
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(str(name)), *_]):
                found.add(f"{ast.unparse(owner)}.{name}")
    return found


def is_read(expression: str, found: set[str]) -> bool:
    return any(each == expression or each.endswith(f".{expression}") for each in found)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_is_in_verls_configuration_with_its_default(engine: str, composed):
    config = composed[engine]
    settings = [setting for setting in TABLE if of_engine(setting, engine) and not setting.added]
    assert len(settings) > 40
    assert [setting.key for setting in settings if not has_key(config, setting.key)] == []
    assert {setting.key: OmegaConf.select(config, setting.key) for setting in settings} == {
        setting.key: setting.default for setting in settings
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_set_with_a_key_is_in_verls_configuration_too(engine: str, composed):
    config = composed[engine]
    for setting in (setting for setting in TABLE if of_engine(setting, engine)):
        for key in (*setting.together, *(key for keys in setting.sets.values() for key in keys), *setting.needs):
            assert has_key(config, key) or key in BY_KEY, (setting.key, key)


def test_added_keys_have_their_default_in_verls_code(tree: SourceTree, composed):
    assert {setting.key for setting in TABLE if setting.added} == set(ADDED)
    for key, target in ADDED.items():
        assert not any(has_key(config, key) for config in composed.values())
        text = ast.unparse(tree.find(target).node)
        name, default = key.rpartition(".")[2], BY_KEY[key].default
        assert f"{name}: int = {default}" in text or f".setdefault({name!r}, {default!r})" in text


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.target} {reader.reads}")
def test_the_code_named_reads_the_key(reader: Reader, tree: SourceTree):
    assert is_read(reader.reads, reads(tree.find(reader.target).node))


def test_a_reader_reads_the_key_that_names_it():
    """By its own name, by that of its block, or by the name that a worker gives it."""
    renamed = {"use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "cudagraph_mode"}
    for setting in TABLE:
        names = {reader.reads.rpartition(".")[2] for reader in setting.readers}
        *_, block, name = setting.key.split(".")
        assert names <= {name, block} | renamed, setting.key
        assert names & {name, *renamed}, setting.key


def test_a_key_that_the_code_does_not_read_is_found(tree: SourceTree):
    node = tree.find("verl.workers.engine.fsdp.transformer_impl:FSDPEngine._init_device_mesh").node
    assert is_read("engine_config.fsdp_size", reads(node))
    assert not is_read("engine_config.forward_prefetch", reads(node))
    assert reads(ast.parse("a.get('x'); b.c")) >= {"a.x", "b.c"}


@pytest.mark.parametrize("target", LINKS)
def test_an_engine_gets_keys_as_the_table_says(target: str, tree: SourceTree):
    text = ast.unparse(tree.find(target).node)
    assert [line for line in LINKS[target] if line not in text] == []


def test_nothing_reads_what_is_left_out_as_unread(tree: SourceTree):
    unread = {expression for entry in OUTSIDE for expression in entry.unread}
    for expression in unread:
        word = expression.rpartition(".")[2]
        readers = [
            name
            for name, module in tree.modules_with("verl", word)
            if not name.startswith(BEFORE_V1) and is_read(expression, reads(module))
        ]
        assert readers == [], expression


@pytest.mark.parametrize("pattern", [pattern for entry in OUTSIDE for pattern in entry.patterns])
def test_a_pattern_stands_for_keys_of_verl_and_for_none_of_the_table(pattern: str, keys):
    assert any(fnmatchcase(key, pattern) for of_engine in keys.values() for key in of_engine)
    assert [key for key in BY_KEY if fnmatchcase(key, pattern)] == []


def test_a_twins_other_name_is_in_the_table(keys):
    for entry in (entry for entry in OUTSIDE if entry.instead):
        for key in (
            key
            for of_engine in keys.values()
            for key in of_engine
            if any(fnmatchcase(key, pattern) for pattern in entry.patterns)
        ):
            assert outside(key) == entry.why(key)
            assert entry.why(key).rpartition(": ")[2], key


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_of_verl_is_tried_or_has_a_reason(engine: str, composed, keys):
    assert len(keys[engine]) > 700
    for key in keys[engine]:
        assert key in BY_KEY or not_tried(key, composed[engine]), key
