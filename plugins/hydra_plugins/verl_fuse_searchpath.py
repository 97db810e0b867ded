"""Make the config group `fuse` visible to every Hydra application, so that `+fuse=default` works on verl's own entry
point."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlFuseSearchPath(SearchPathPlugin):
    """Append verl-fuse's config package; an application's own groups keep precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-fuse", path="pkg://verl_fuse.host.config")
