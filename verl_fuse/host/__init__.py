"""This package joins the library to verl. It imports nothing here: `entry` must stay light."""
