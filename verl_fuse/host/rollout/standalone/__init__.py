"""Rollout replicas with devices of their own, created and destroyed while the run goes on."""
