"""Lists verl's policy losses that were read for a lean update, by the name a run gives and the fingerprint of the code
(contracts.py)."""

CORE_ALGORITHMS = "verl.trainer.ppo.core_algos"

# Each token's term is its advantage times something finite, and is divided by numbers of the whole mini-batch: a sample
# whose advantages are all 0 adds exactly 0 to loss and gradient.
ROW_LOSSES = {
    "vanilla": ("compute_policy_loss_vanilla", "1d553ed6316a4adc"),
    "dppo_tv": ("compute_policy_loss_dppo_tv", "eb41c3bafaf2fb9a"),
    "dppo_kl": ("compute_policy_loss_dppo_kl", "8b1c92f4c3c0d230"),
    "gspo": ("compute_policy_loss_gspo", "3822b3194964c0c7"),
    "sapo": ("compute_policy_loss_sapo", "2567f116e8bf2346"),
    "gpg": ("compute_policy_loss_gpg", "733100946087750d"),
    "cispo": ("compute_policy_loss_cispo", "91b1814dabeb38a8"),
}
_DRO = {"dro": ("compute_policy_loss_dro", "bd93f6c513960cf4")}
# Further losses that only compare old log-probs with those of the model: where both are equal, it does not matter which
# pass they come from. `geo_mean` is a mean over the samples of a micro-batch, `dro` has a quadratic term; both need all
# samples.
ANY_LOSSES = ROW_LOSSES | _DRO | {"geo_mean": ("compute_policy_loss_geo_mean", "b597cb870d64df46")}
# Losses that do not depend on which samples of a mini-batch share a micro-batch or a rank.
BALANCED_LOSSES = ROW_LOSSES | _DRO
