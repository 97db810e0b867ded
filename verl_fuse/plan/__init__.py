"""Which devices and which layout each model call of a step gets: legal options, exact evaluation, search with a
bound."""
