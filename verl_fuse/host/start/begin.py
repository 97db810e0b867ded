"""Makes the checks of a trainer before it builds anything."""

import logging

from omegaconf import DictConfig

from verl_fuse.host.record.logs import join_verl_log
from verl_fuse.host.start.applied_plan import apply_plan
from verl_fuse.host.start.compat.start import require_contracts, require_version, warn_of_changes
from verl_fuse.host.start.set_by_plugins import set_by_plugins
from verl_fuse.host.start.settings import Settings, load_settings

logger = logging.getLogger(__name__)


def checked_settings(config: DictConfig) -> Settings:
    """Return the settings of a run that may begin; a plan file and the values that plugins set are applied to
    `config`."""
    require_version()
    settings = load_settings(config)
    join_verl_log(settings.manager)
    for change in apply_plan(config, settings.overrides):
        logger.warning(change)
    settings = set_by_plugins(config, settings)
    warn_of_changes(require_contracts(settings.manager, config))
    return settings
