"""One fused pipeline of actor and critic instead of two serial updates."""
