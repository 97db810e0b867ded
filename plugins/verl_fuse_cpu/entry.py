"""This entry point in verl's plugin group does nothing unless VERL_PLATFORM=cpu.

Every process that imports verl loads this module; on another platform that costs one look at the environment. verl
resolves a platform on first use, after all plugins are loaded (verl/plugin/platform/platform_manager.py), so
registering here is early enough.

verl logs a plugin that fails to load at DEBUG and goes on (verl/__init__.py). A failure here is therefore printed, kept
in `failure` for the trainer and `verl-fuse doctor`, and leaves the platform unregistered: verl then refuses
VERL_PLATFORM=cpu itself.
"""

import os
import sys

from verl_fuse_cpu.environment import active, process_defaults

# The error that kept the platform from being registered in this process; None when the platform was registered or not
# asked for.
failure: Exception | None = None


def register() -> None:
    """Install the patches and register the platform, if this process asks for the cpu platform."""
    global failure
    if not active():
        return
    try:
        from verl_fuse_patches import registry

        for name, value in process_defaults().items():
            os.environ.setdefault(name, value)
        registry.install(registry.load(name) for name in registry.NAMES)
        import verl_fuse_cpu.platform  # noqa: F401  registers itself
    except Exception as error:  # noqa: BLE001  verl would hide it
        import traceback

        failure = error
        print(f"verl-fuse: the cpu platform is not available in process {os.getpid()}:", file=sys.stderr)
        traceback.print_exc()


# verl loads the entry point object and does not call it.
register()
