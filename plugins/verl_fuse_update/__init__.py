"""An update without waste: what has no gradient, and what is computed twice, is not computed."""
