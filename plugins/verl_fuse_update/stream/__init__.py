"""Streams the actor's update while the tail still generates: gradients of complete groups first, the rest and one
optimizer step at the end."""
