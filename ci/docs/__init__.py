"""Generate the documentation: the configuration reference, and a site of all READMEs."""
