"""This package is the only one of the library that imports verl. It imports nothing here: `entry` must stay light."""
