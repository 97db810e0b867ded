"""The plugin `elastic` predicts responses, assigns prompts to replicas by prediction, and runs as many replicas as
pay."""
