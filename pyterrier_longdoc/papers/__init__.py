"""The papers' models (`presets`) and experiments (`protocols`) by name."""
