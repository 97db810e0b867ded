"""Worker groups on the devices of released replicas, which compute log-probs and values of finished samples."""
