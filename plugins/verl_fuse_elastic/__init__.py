"""Elastic replica count: responses are predicted, prompts assigned to replicas by prediction, and as
many replicas run as pay."""
