"""Transfer programs: how the parameters of a model get from one layout to another."""
