"""The rollout: which replica generates which sample, and what happens when one leaves."""
