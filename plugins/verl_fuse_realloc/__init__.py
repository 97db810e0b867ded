"""The plugin `realloc` moves weights from the layout in which they are trained to the layout in which they are used."""
