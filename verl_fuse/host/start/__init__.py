"""Everything that is checked before a run starts."""
