"""Observation: a timeline of every step as JSON, Perfetto trace and HTML page, metrics, and a progress line."""
