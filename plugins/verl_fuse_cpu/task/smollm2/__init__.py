"""Makes the task of a published model: SmolLM2-135M-Instruct, and problems of reasoning-gym (see README.md)."""
