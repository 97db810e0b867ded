"""Defines the `verl-fuse` command: the list of its subcommands, and its entry point.

Subcommands are loaded on first use, so `verl-fuse --help` and the planning commands stay fast and need neither torch
nor verl. The entry point imports nothing but the standard library before Ctrl-C is taken care of.
"""

import io
import sys
import time

from verl_fuse.cli import interrupt

# What one wants -> name -> (module with `app`, one-line help).
GROUPS = {
    "Before a run": {
        "check": ("verl_fuse.cli.check", "Say what fuse.preset=fast does for a run of verl, and what unlocks more."),
        "simulate": ("verl_fuse.cli.simulate", "Predict a step, stock and with every feature, without a device."),
        "plan": ("verl_fuse.cli.plan", "Find devices, layouts and micro-batches for a step, as overrides for verl."),
        "schedule": ("verl_fuse.cli.schedule", "Solve, show and compare fused actor-critic pipeline schedules."),
        "example": ("verl_fuse.cli.example", "Print a commented file to start from, or write the package of a plugin."),
    },
    "Runs": {
        "recipes": ("verl_fuse.cli.recipes", "List the shipped recipes."),
        "run": ("verl_fuse.cli.run", "Run a recipe with verl-fuse on (or --baseline: stock verl)."),
        "ab": ("verl_fuse.cli.ab", "Run a recipe as stock verl, then with verl-fuse, and compare the two runs."),
        "tune": (
            "verl_fuse.cli.tune",
            "Find faster settings of verl that train the same, by short trials of real steps.",
        ),
    },
    "After a run": {
        "trace": ("verl_fuse.cli.trace", "Print the idle table of a recorded run and name its timeline page."),
        "compare": ("verl_fuse.cli.compare", "Compare a run with its baseline: step time, stages, rewards, a verdict."),
        "advise": ("verl_fuse.cli.advise", "Say which features would have paid on a recorded run, and what to paste."),
    },
    "This machine": {
        "doctor": ("verl_fuse.cli.doctor", "Check this installation, in the driver and inside a Ray worker."),
        "profile": ("verl_fuse.cli.profile", "Measure this device for the planner's cost model."),
    },
}
SUBCOMMANDS = {name: entry for entries in GROUPS.values() for name, entry in entries.items()}


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand and exit with its code (verl_fuse/cli/ending.py). This is the entry point."""
    begun = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A character that the terminal, or the file, does not have is shown by its number.
        sys.stdout.reconfigure(errors="backslashreplace")
    with interrupt.on_interrupt(interrupt.end_now):
        from verl_fuse.cli import ending
        from verl_fuse.cli.group import build

        app = build(GROUPS)
    sys.exit(ending.run(lambda: app(args=argv, prog_name="verl-fuse", standalone_mode=False, obj=begun)))
