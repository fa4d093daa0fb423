"""The papers' models (`presets`) by name."""
