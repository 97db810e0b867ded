"""The rollout: chooses the replica that generates each sample, and acts when a replica leaves."""
