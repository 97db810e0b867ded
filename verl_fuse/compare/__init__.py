"""Two runs of the same training side by side: step seconds, stages, rewards, and how sure that is. Pure, but
for the page's template."""
