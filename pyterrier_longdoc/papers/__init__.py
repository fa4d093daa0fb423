"""The models of the papers (`presets`) by name."""
