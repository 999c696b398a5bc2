"""Files: text that users name, private cache files, and SQLite tables shared by processes."""
