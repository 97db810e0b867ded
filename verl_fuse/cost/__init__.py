"""From specs to seconds and bytes: an analytic roofline, and measured tables that override it."""
