"""Replaces two serial updates by one fused pipeline of actor and critic."""
