"""Brings weights from the training ranks' shards to the rollout replicas, without gathering a parameter."""
