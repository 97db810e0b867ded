"""Plugin `realloc`: weights move from the layout they are trained in to the layout they are used in."""
