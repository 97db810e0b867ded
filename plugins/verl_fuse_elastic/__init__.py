"""Elastic replica count: the plugin predicts responses, assigns prompts to replicas by prediction, and runs as many
replicas as pay."""
