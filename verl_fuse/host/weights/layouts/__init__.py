"""The layout an engine of verl trains in, changed between two steps."""
