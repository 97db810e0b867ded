"""Draws pictures of a schedule: Gantt chart, memory curve per rank, bubble fraction, bound line."""

from verl_fuse.schedule.render.write import write_picture

__all__ = ["write_picture"]
