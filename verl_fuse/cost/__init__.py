"""Turns specs into seconds and bytes: an analytic roofline, and measured tables that override it."""
