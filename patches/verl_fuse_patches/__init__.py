"""Holds runtime patches of upstream defects, one module each (see patches/README.md). An import of this package patches
nothing."""
