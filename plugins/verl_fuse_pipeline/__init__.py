"""One fused pipeline of actor and critic replaces two serial updates."""
