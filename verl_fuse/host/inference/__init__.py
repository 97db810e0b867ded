"""Log-probs and values of finished samples, while other samples are generated and at the stage barriers."""
