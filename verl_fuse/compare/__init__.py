"""Compares two runs of the same training: step seconds, stages, rewards, and the certainty of each difference. Pure,
but for the page's template."""
