"""Makes updates without waste: samples without a gradient are not computed, and old log-probs are the update's own."""
