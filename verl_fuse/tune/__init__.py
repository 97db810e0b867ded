"""Knows verl's own settings that change how a step is computed and not what is trained, and which of them a composed
configuration leaves to try. Imports neither torch nor ray nor verl."""
