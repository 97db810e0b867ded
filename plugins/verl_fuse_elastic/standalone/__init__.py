"""Creates and destroys rollout replicas with devices of their own while the run goes on."""
