"""Plans transfer programs, which bring the parameters of a model from one layout to another."""
