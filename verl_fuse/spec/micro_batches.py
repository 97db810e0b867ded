"""Names the keys by which verl 0.9.1 cuts the rows of a stage into micro-batches on each rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from verl_fuse.spec.composed import ACTOR, CRITIC, REFERENCE, ROLLOUT
from verl_fuse.spec.timeline import OLD_LOG_PROB, REF_LOG_PROB, UPDATE_ACTOR, UPDATE_CRITIC, VALUES

# The forward pass takes this share of the time that a token takes in an update.
FORWARD = 1 / 3


@dataclass(frozen=True)
class MicroBatchKeys:
    """The role whose engine computes a stage; the key that is true where micro-batches are cut by tokens (empty: they
    always are), and those of their tokens and of their rows. `default`: tokens where verl's files lack the key."""

    role: str
    by_tokens: str
    tokens: str
    rows: str
    default: int | None = None

    @classmethod
    def of(cls, role: str, by_tokens: str, sizes: str, default: int | None = None) -> "MicroBatchKeys":
        """Return keys whose sizes begin alike."""
        return cls(role, by_tokens, f"{sizes}_max_token_len_per_gpu", f"{sizes}_micro_batch_size_per_gpu", default)


# The engine of old log-probs is the actor's; the critic's reads one number of tokens for values and update, whatever
# its other keys say.
_CRITIC = MicroBatchKeys.of(CRITIC, "", f"{CRITIC}.ppo_infer", default=32768)
MICRO_BATCHES: Mapping[str, MicroBatchKeys] = MappingProxyType(
    {
        OLD_LOG_PROB: MicroBatchKeys.of(ACTOR, f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob"),
        REF_LOG_PROB: MicroBatchKeys.of(REFERENCE, f"{REFERENCE}.log_prob_use_dynamic_bsz", f"{REFERENCE}.log_prob"),
        UPDATE_ACTOR: MicroBatchKeys.of(ACTOR, f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo"),
        VALUES: _CRITIC,
        UPDATE_CRITIC: _CRITIC,
    }
)
