"""Programs that show the library at work."""
