"""The only package of the library that imports verl. Nothing is imported here: `entry` must stay light."""
