"""Lists verl's policy losses that were read for a lean update: the functions by the names that a run gives."""

# Each token's term is its advantage times something finite, and is divided by numbers of the whole mini-batch: a sample
# whose advantages are all 0 adds exactly 0 to loss and gradient.
ROW_LOSSES = {
    "vanilla": "compute_policy_loss_vanilla",
    "dppo_tv": "compute_policy_loss_dppo_tv",
    "dppo_kl": "compute_policy_loss_dppo_kl",
    "gspo": "compute_policy_loss_gspo",
    "sapo": "compute_policy_loss_sapo",
    "gpg": "compute_policy_loss_gpg",
    "cispo": "compute_policy_loss_cispo",
}
_DRO = {"dro": "compute_policy_loss_dro"}
# Further losses that only compare old log-probs with those of the model: where both are equal, it does not matter which
# pass they come from. `geo_mean` is a mean over the samples of a micro-batch, `dro` has a quadratic term; both need all
# samples.
ANY_LOSSES = ROW_LOSSES | _DRO | {"geo_mean": "compute_policy_loss_geo_mean"}
# Losses that do not depend on which samples of a mini-batch share a micro-batch or a rank.
BALANCED_LOSSES = ROW_LOSSES | _DRO
