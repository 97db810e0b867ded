"""Observation writes a timeline of every step as JSON, Perfetto trace and HTML page, and gives metrics and a progress
line."""
