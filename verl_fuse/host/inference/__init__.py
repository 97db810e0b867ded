"""Log-probs and values of finished samples, while others are still generated and at the stage barriers."""
