"""Makes updates without waste: samples without a gradient, and log-probs that the update computes again, are not
computed."""
