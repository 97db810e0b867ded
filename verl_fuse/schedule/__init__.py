"""Solves schedule problems: bounds, methods from serial 1F1B to proven optimum, validation, pictures. Imports
neither torch nor ray nor verl."""
