"""Changes the layout in which an engine of verl trains, between two steps."""
