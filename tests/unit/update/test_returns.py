"""Returns against verl's generalized advantage estimation."""

import pytest

torch = pytest.importorskip("torch")
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
critic = pytest.importorskip("verl_fuse_update.critic.returns")
Rewards, estimated, returns_of = critic.Rewards, critic.estimated, critic.returns_of


def drawn(rows: int, tokens: int) -> tuple:
    draw = torch.Generator().manual_seed(tokens)
    rewards, values = torch.randn((2, rows, tokens), generator=draw)
    mask = (torch.rand((rows, tokens), generator=draw) < 0.7).long()
    mask[0] = 1
    # A response that ends early.
    mask[1, tokens // 2 :] = 0
    return rewards, values, mask


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 300])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 1.0)])
def test_returns_are_those_of_verl(tokens: int, gamma: float, lam: float):
    rewards, values, mask = drawn(5, tokens)
    _, theirs = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    ours = estimated(rewards, values, mask, gamma, lam)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours * mask, theirs * mask, rtol=1e-5, atol=1e-5)
    assert not (ours * (1 - mask)).any()


@pytest.mark.parametrize("gamma", [0.99, 0.999])
def test_values_of_low_precision_are_discounted_as_verl_does(gamma: float):
    rewards, values, mask = drawn(5, 300)
    rewards, values = 0.01 * rewards, (0.5 + 0.1 * values).bfloat16()
    _, theirs = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, 1.0)
    ours = estimated(rewards, values, mask, gamma, 1.0)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours * mask, theirs * mask, rtol=1e-4, atol=1e-4)
    exact = estimated(rewards, values.float(), mask, gamma, 1.0)
    assert (exact - ours).abs().max() > 0.01, "a rounding of each discount adds up"


def test_tokens_that_do_not_count_change_nothing():
    rewards, values, mask = drawn(4, 20)
    noise = 100 * (1 - mask)
    assert torch.equal(
        estimated(rewards, values, mask, 0.9, 0.8), estimated(rewards + noise, values - noise, mask, 0.9, 0.8)
    )


def test_kl_is_part_of_the_rewards():
    from tensordict import TensorDict

    rewards, values, mask = drawn(3, 8)
    old, reference = torch.randn((2, 3, 8), generator=torch.Generator().manual_seed(1))
    lengths = (8, 4, 6)

    def nested(padded):
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    columns = {"rm_scores": rewards, "response_mask": mask, "old_log_probs": old, "ref_log_prob": reference}
    data = TensorDict({name: nested(column) for name, column in columns.items()}, batch_size=[3])
    for row, length in enumerate(lengths):
        mask[row, length:] = 0
    penalty = core_algos.kl_penalty(old, reference, "k3") * mask
    expected = estimated(rewards - 0.25 * penalty, values, mask, 0.9, 0.8)
    found = returns_of(data, nested(values), Rewards(0.9, 0.8, "k3", 0.25))
    torch.testing.assert_close(found * mask, expected, rtol=1e-6, atol=1e-6)
    without = returns_of(data, nested(values), Rewards(0.9, 0.8))
    torch.testing.assert_close(without * mask, estimated(rewards, values, mask, 0.9, 0.8), rtol=1e-6, atol=1e-6)
