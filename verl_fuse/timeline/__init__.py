"""Shows a recorded step: idle time, summaries, Perfetto traces and HTML pages. Pure functions of a `Timeline`, plus the
run's files."""
